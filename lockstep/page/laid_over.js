// Another report laid over this one: what changed from it to this.

/** The payload of a report.html. Throws for any other text. */
function payloadOf(text) {
  const other = payloadIn(new DOMParser().parseFromString(text, "text/html"));
  if (other?.format !== page.format) throw new Error("it is no report.html of this version");
  return other;
}

async function layOver(parent, file) {
  parent.hidden = false;
  try {
    showChanges(parent, file.name, payloadOf(await file.text()));
  } catch (error) {
    parent.replaceChildren(el("h2", { id: "over-title" }, "Laid over"), el("p", {}, `${file.name} cannot be read: ${error.message}`));
  }
  parent.scrollIntoView();
}

function showChanges(parent, title, other) {
  const lines = [];
  if (other.verdict !== page.verdict) lines.push(`The verdict was ${other.verdict} and is ${page.verdict}.`);
  const [before, now] = [other, page].map(firstsText);
  if (before !== now) lines.push(`First wrong tensor: was ${before}, is ${now}.`);
  if (other.lead !== page.lead) lines.push(`It was said: ${other.lead}`, `It is said: ${page.lead}`);
  const [was, is] = [other, page].map((one) => Object.fromEntries(one.found_out));
  for (const entry of Object.keys({ ...was, ...is })) {
    if (was[entry] !== is[entry]) lines.push(`${entry}: ${changed(was[entry] ?? "not said", is[entry] ?? "not said")}`);
  }
  const { moved, count, alike } = compared(other);
  const head = ["tensor", "step", "run", "was", "is"];
  const body = moved.slice(0, 200).map((one) => el("tr", { class: one.far[0] === one.far[1] ? "" : "differs-row" },
    el("td", {}, el("code", {}, one.name)), el("td", {}, String(one.step)), el("td", {}, one.label),
    ...[0, 1].map((side) => el("td", { class: "number" }, `${shareText(one.share[side])}${one.far[side] ? " ✕" : ""}`))));
  parent.replaceChildren(
    el("h2", { id: "over-title" }, `What changed since ${title}`),
    el("ul", { class: "notes" }, ...lines.map((line) => el("li", {}, line))),
    el("p", {}, `${count} tensors are in both, ${alike} of them with the same errors. Those that crossed what is tolerated come first, then the largest changes of the share of it.`),
    body.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tensors that changed" }, el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((one) => el("th", { scope: "col" }, one)))), el("tbody", {}, ...body))) : el("span"));
}

function firstsText({ views, causes: ofRun }) {
  const found = views.filter((view) => view.first).map(({ label, first: [step, name], causes }) => [`${name} in step ${step}, ${label}`, ...[...causes, ...ofRun].map(([cause]) => cause)].join(": "));
  return found.join("; ") || "none";
}

/** The tensors of both reports, by name, step, the label of their view, and how they were computed. */
function compared(other) {
  const moved = [];
  let [count, alike] = [0, 0];
  for (const table of other.tables) {
    const label = other.views[table.view].label;
    const mine = tableOf(page.views.findIndex((view) => view.label === label), table.step, table.alone);
    if (!mine) continue;
    const run = table.alone ? `${label}, ${wayOf(true)}` : label;
    const far = new Set(table.far);
    table.names.forEach((number, place) => {
      const name = other.names[number];
      const row = mine.row(numberOf.get(name));
      if (row === null) return;
      count += 1;
      const share = table.columns.share[place] ?? Infinity;
      if (share === row.share && far.has(place) === row.far) alike += 1;
      else moved.push({ name, step: table.step, label: run, share: [share, row.share], far: [far.has(place), row.far] });
    });
  }
  const weight = (one) => (one.far[0] === one.far[1] ? 0 : 1e9) + Math.min(1e8, Math.abs(Math.log((one.share[1] + 1e-9) / (one.share[0] + 1e-9))));
  return { moved: moved.sort((one, two) => weight(two) - weight(one)), count, alike };
}

/** Of two lists of words with commas, only the entries that differ. */
function changed(was, is) {
  const [one, two] = [was.split(", "), is.split(", ")];
  const [gone, come] = [one.filter((part) => !two.includes(part)), two.filter((part) => !one.includes(part))];
  return `was ${gone.join(", ") || "without"}, is ${come.join(", ") || "without"}`;
}
