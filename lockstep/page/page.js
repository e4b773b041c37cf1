// What is shown: one view, one step, one tensor.

const state = { view: 0, step: 1, tensor: null, alone: false };

function begin() {
  const asked = page.views.findIndex((view) => view.name === decodeURIComponent(location.hash.slice(1)));
  state.view = asked < 0 ? opening() : asked;
  const view = page.views[state.view];
  const near = view && !view.first ? worstOf(view) : null;
  const [step, name] = view?.first ?? near?.[1] ?? [];
  const number = numberOf.get(name);
  state.step = step ?? stepsOf(state.view)[0];
  state.tensor = number ?? null;
  state.alone = near ? page.kind === "verification" && near[0] === BY_ITSELF : isAlone(state.view, state.step, state.tensor);
  buildTools();
  document.querySelectorAll(".finding[data-view]").forEach((section) => sayWhere(section, Number(section.dataset.view)));
  showContracts(document.getElementById("contracts"));
  if (!page.tables.length) {
    document.getElementById("model").hidden = page.losses !== null;
    if (page.losses === null) document.getElementById("choices").append(el("p", {}, "No tensor was judged; the sentences above say why."));
    showLosses(document.getElementById("losses"), state);
    return;
  }
  map.build(document.getElementById("map"), { onRead: read, onOpen: open });
  buildChoices();
  show();
}

/** The view that the verdict is about: the first that failed, or of a PASS, the one whose nearest tensor is named above. */
function opening() {
  const failed = page.views.findIndex((view) => view.first);
  if (failed >= 0) return failed;
  const shares = page.views.map((view) => worstOf(view)?.[1][2] ?? 0);
  return Math.max(0, shares.indexOf(Math.max(...shares)));
}

const ALSO = 4; // further tensors that a finding names; more of them mostly follow from the first

/** In the finding of a view: where in its first wrong tensor the error lies, and what else is wrong in this step. */
function sayWhere(section, view) {
  const [step, name] = page.views[view].first;
  const number = numberOf.get(name);
  const list = section.querySelector("dl");
  const pair = (title, ...said) => el("div", {}, el("dt", {}, title), el("dd", {}, ...said));
  const also = wrongByThemselves(view, step).map(([one]) => one).filter((one) => one !== name);
  if (also.length && also.length <= ALSO) list.append(pair("Also wrong", ...also.flatMap((one, place) => [place ? ", " : "", el("code", {}, one)])));
  const row = wrongRowOf(view, step, number);
  if (row === null) return;
  const where = row.far ? [row.borrowed ? "" : row.where, row.picture ? placeText(view, number, row) : ""].filter(Boolean).join(": ") : "";
  const ranks = ranksText(view, step, number, row);
  list.querySelector(".size").after(...(ranks ? [pair("Ranks", ranks)] : []), ...(where ? [pair("Where", where)] : []));
  // What has been said already
  const told = [where && /^\d+ of \d+ elements are wrong$/, ranks && /^not the same on all ranks that hold it/].filter(Boolean);
  list.querySelectorAll("[data-title=Observed] dd").forEach((one) => told.some((said) => said.test(one.textContent)) && one.remove());
  list.querySelectorAll("[data-title]:not(:has(dd))").forEach((one) => one.remove());
  if (page.kind === "recording") list.append(pair(`In step ${step}`, rightText(tableOf(view, step))));
  section.append(el("button", { type: "button", onclick: () => goTo(view, step, number) }, "See this tensor below"));
}

/** Opens a tensor where it is wrong, and brings it and its cell into view. */
function goTo(view, step, tensor) {
  Object.assign(state, { view, step, tensor, alone: isAlone(view, step, tensor) });
  show();
  if (isBeside()) map.cells.get(tensor).scrollIntoView({ block: "center" });
  showPanel();
  document.getElementById("tensor-name").focus({ preventScroll: true });
}

/** Whether the panel of the open tensor is beside the map. */
function isBeside() {
  return getComputedStyle(document.getElementById("tensor")).position === "sticky";
}

/** Brings the panel into view; beside the map, it ends where the map ends, so its top may be above the screen. */
function showPanel() {
  const panel = document.getElementById("tensor");
  panel.scrollTop = 0;
  if (!isBeside()) panel.scrollIntoView();
  else scrollBy(0, Math.min(0, panel.getBoundingClientRect().top - parseFloat(getComputedStyle(panel).top)));
}

/** How many tensors of each kind are right in a table, and the same on all ranks. */
function rightText(table) {
  const counts = new Map();
  const [far, odd] = [new Set(table.far), copiesOf(table)];
  table.names.forEach((name, place) => {
    const title = KINDS[kindOf(page.names[name])] ?? kindOf(page.names[name]);
    const [right, all] = counts.get(title) ?? [0, 0];
    counts.set(title, [right + (far.has(place) || odd.has(name) ? 0 : 1), all + 1]);
  });
  return [...counts].map(([title, [right, all]]) => `${title}: ${right === all ? `all ${all}` : `${right} of ${all}`} right`).join("; ");
}

function show() {
  showLosses(document.getElementById("losses"), state);
  const table = tableOf(state.view, state.step, state.alone);
  map.paint(table);
  const way = page.kind === "recording" ? page.views[state.view].name : wayOf(state.alone);
  const ways = page.kind === "recording" || page.tables.some((one) => one.alone);
  document.getElementById("way").replaceChildren(el("strong", {}, tableText(table, ways ? way : "")));
  paintChoices();
  map.mark(state.tensor);
  showTensor(document.getElementById("tensor"), state);
  showRanks(document.getElementById("ranks"), state);
  if (state.tensor !== null) read(state.tensor);
}

/** What is shown, and how much of it is wrong. */
function tableText(table, way) {
  const parts = [page.kind === "verification" ? labelOf(state.view) : "", `step ${state.step}`, way].filter(Boolean).join(", ");
  if (table === null) return `${parts}: nothing was judged.`;
  const judged = table.names.length - table.small.length - table.excused.length;
  const odd = copiesOf(table).size;
  return `${parts}: ${table.far.length} of ${judged.toLocaleString("en")} ${plural("tensor", judged)} ${table.far.length === 1 ? "is" : "are"} wrong${odd ? `; ${odd} ${odd === 1 ? "is" : "are"} not the same on all ranks` : ""}.`;
}

/** The numbers of a tensor that the pointer or the focus is on. */
function read(name) {
  const row = rowOf(state.view, state.step, name, state.alone);
  const errors = row === null || row.batch || state.alone ? "" : `; error ${errorText(row)}`;
  const copies = row !== null && !state.alone && oddOf(state.view, state.step, page.names[name]).size ? "; not the same on all ranks" : "";
  const numbers = row === null ? "" : ` — ${state.alone ? "by itself, " : ""}${stateText(row)}${errors}${copies}`;
  document.getElementById("reading").replaceChildren(el("code", {}, page.names[name]), numbers);
}

function open(name) {
  state.tensor = name;
  show();
  showPanel();
}

function buildChoices() {
  const parent = document.getElementById("choices");
  const steps = [...new Set(page.tables.map((table) => table.step))];
  parent.append(choice(page.kind === "verification" ? "Run" : "Computed", "view", page.views.map((_, number) => [number, labelOf(number)])));
  if (page.tables.some((table) => table.alone)) parent.append(choice("Computed", "alone", [true, false].map((alone) => [alone, wayOf(alone)])));
  if (steps.length > 1) parent.append(choice("Step", "step", steps.map((step) => [step, String(step)])));
}

function choice(title, key, items) {
  const labels = items.map(([value, text]) => el("label", { title: page.ways[text] },
    el("input", { type: "radio", name: key, value: String(value), onchange: () => { state[key] = value; show(); } }),
    el("span", {}, text, el("span", { class: "unseen" }, ", has failures"))));
  return el("fieldset", {}, el("legend", {}, title), ...labels);
}

/** Marks what is chosen, and what has failures: a run in any way, a way in any step of the chosen run, a step of both. */
function paintChoices() {
  const wrong = (holds) => tables.some((table) => (table.far.length || copiesOf(table).size) && holds(table));
  const bad = {
    view: (view) => page.views[view].first !== null || (page.kind === "recording" && wrong((table) => table.view === view)),
    alone: (alone) => wrong((table) => table.view === state.view && table.alone === alone),
    step: (step) => wrong((table) => table.view === state.view && table.alone === state.alone && table.step === step),
  };
  for (const input of document.querySelectorAll("#choices input")) {
    const value = JSON.parse(input.value);
    input.checked = value === state[input.name];
    const isBad = bad[input.name](value);
    input.nextElementSibling.classList.toggle("bad", isBad);
    input.nextElementSibling.querySelector(".unseen").hidden = !isBad;
  }
}

function buildTools() {
  const over = document.getElementById("over");
  const input = el("input", { type: "file", accept: ".html,text/html", hidden: true, id: "other", "aria-label": "Another report.html", onchange: () => input.files.length && layOver(over, input.files[0]) });
  document.getElementById("tools").append(
    el("button", { type: "button", id: "issue", onclick: () => openIssue() }, "Copy as issue"),
    el("button", { type: "button", onclick: () => input.click() }, "Compare with another report"), input,
    el("button", { type: "button", onclick: () => print() }, "Print"));
}

begin();
addEventListener("beforeprint", () => document.getElementById("how").open = true);
addEventListener("hashchange", () => location.reload());
