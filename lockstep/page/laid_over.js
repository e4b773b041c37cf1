// Another report laid over this one: what changed from it to this.

/** The payload of a report.html. Throws for any other text. */
function payloadOf(text) {
  const parsed = new DOMParser().parseFromString(text, "text/html");
  const other = payloadIn(parsed);
  if (parsed.getElementById("listing")) throw new Error("it is a table of runs; choose the page of one of them");
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
  lines.push(...inOneAlone(other), ...contractsApart(other), ...lossesApart(other));
  const { moved, count, alike } = compared(other);
  const head = ["tensor", "step", "run", "was", "is"];
  const body = moved.slice(0, 200).map((one) => el("tr", { class: one.far[0] === one.far[1] ? "" : "differs-row" },
    el("td", {}, el("code", {}, one.name)), el("td", {}, String(one.step)), el("td", {}, one.label),
    ...[0, 1].map((side) => el("td", { class: "number" }, `${shareText(one.share[side])}${one.far[side] ? " ✕" : ""}`))));
  parent.replaceChildren(
    el("h2", { id: "over-title" }, `What changed since ${title}`),
    el("p", { class: "quiet" }, `Made ${was.compared ?? was.judged ?? "at an unknown time"}.`),
    el("ul", { class: "notes" }, ...lines.map((line) => el("li", {}, line))),
    el("p", {}, `${count} tensors are in both, ${alike} of them with the same errors. Those that crossed what is tolerated come first, then the largest changes of the share of it.`),
    body.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tensors that changed" }, el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((one) => el("th", { scope: "col", class: ["was", "is"].includes(one) ? "number" : "" }, one)))), el("tbody", {}, ...body))) : el("span"));
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

/** Runs, and steps of a run, that only one of the reports has. */
function inOneAlone(other) {
  const stepsIn = (from) => new Map(from.views.map((view, number) => [view.label, new Set(from.tables.filter((table) => table.view === number).map((table) => table.step))]));
  const [was, is] = [other, page].map(stepsIn);
  return [...new Set([...was.keys(), ...is.keys()])].flatMap((label) => {
    if (!was.has(label) || !is.has(label)) return [`${label} is in ${was.has(label) ? "the other" : "this"} report alone.`];
    const steps = [...new Set([...was.get(label), ...is.get(label)])].filter((step) => !was.get(label).has(step) || !is.get(label).has(step));
    return steps.length ? [`${label}: ${plural("step", steps.length)} ${steps.join(", ")} in one report alone.`] : [];
  });
}

/** The entries of contracts that are others, of the runs of both. */
function contractsApart(other) {
  return page.views.flatMap(({ label, contract }) => {
    const before = other.views.find((view) => view.label === label)?.contract;
    if (!before) return [];
    const [was, is] = [flat(before), flat(contract)];
    return Object.keys({ ...was, ...is }).filter((entry) => was[entry] !== is[entry]).map((entry) => `Contract of ${label}: ${entry}: was ${was[entry] ?? "not there"}, is ${is[entry] ?? "not there"}`);
  });
}

/** How far the losses of runs of both are apart. */
function lossesApart(other) {
  if (!other.losses || !page.losses) return [];
  return page.losses.labels.flatMap((label, number) => {
    const before = other.losses.loss[other.losses.labels.indexOf(label)] ?? [];
    const apart = page.losses.loss[number].map((loss, step) => (Number.isFinite(loss) && Number.isFinite(before[step]) ? Math.abs(loss - before[step]) : -1));
    const most = Math.max(...apart);
    return most > 0 ? [`Losses of ${label}: up to ${sci(most)} apart, in step ${page.losses.steps[apart.indexOf(most)]}.`] : [];
  });
}

/** Of two lists of words with commas, only the entries that differ; all of what is said by run or by name. */
function changed(was, is) {
  if (/: /.test(was + is)) return `was ${was}, is ${is}`;
  const [one, two] = [was, is].map((text) => text.split(/, (?![^()]*\))/));
  const [gone, come] = [one.filter((part) => !two.includes(part)), two.filter((part) => !one.includes(part))];
  return `was ${gone.join(", ") || "without"}, is ${come.join(", ") || "without"}`;
}
