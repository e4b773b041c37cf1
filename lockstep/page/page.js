// What is shown: one view, one step, one tensor.

const state = { view: 0, step: 1, tensor: null, alone: false };

const WAYS = {
  "from the batch": "Computed from the batch on: what follows a wrong tensor is wrong, too. Moments and updated weights follow from the run's own gradients.",
  "each module by itself": "Each module is computed from the inputs that it had in the run, and from the gradient that arrived there: what is wrong here is wrong by itself.",
};

function begin() {
  const asked = page.views.findIndex((view) => view.name === decodeURIComponent(location.hash.slice(1)));
  state.view = asked < 0 ? Math.max(0, page.views.findIndex((view) => view.first)) : asked;
  const view = page.views[state.view];
  state.step = view?.first?.[0] ?? stepsOf(state.view)[0];
  const near = view?.first ?? view?.worst;
  const number = near ? page.names.indexOf(near[1]) : -1;
  state.tensor = number < 0 ? null : number;
  if (!view?.first && near) state.step = near[0];
  state.alone = isAlone(state.view, state.step, state.tensor);
  buildTools();
  document.querySelectorAll(".finding").forEach((section) => sayWhere(section, Number(section.dataset.view)));
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

/** In the finding of a view: where in its first wrong tensor the error lies. */
function sayWhere(section, view) {
  const [step, name] = page.views[view].first;
  const number = page.names.indexOf(name);
  const row = wrongRowOf(view, step, number);
  if (row === null) return;
  const said = [row.where, row.picture ? whereText(view, number, row) : ""].filter(Boolean).join(": ");
  const list = section.querySelector("dl");
  if (said) list.prepend(el("div", {}, el("dt", {}, "Where"), el("dd", {}, said)));
  section.append(el("button", { type: "button", onclick: () => goTo(view, step, number) }, "See this tensor below"));
  if (page.kind === "recording") list.append(el("div", {}, el("dt", {}, `Step ${step}`), el("dd", {}, rightText(tableOf(view, step)))));
}

/** Opens a tensor where it is wrong, and brings it into view. */
function goTo(view, step, tensor) {
  Object.assign(state, { view, step, tensor, alone: isAlone(view, step, tensor) });
  for (const input of document.querySelectorAll("#choices input")) input.checked = input.value === String(state[input.name]);
  show();
  document.getElementById("tensor").scrollIntoView();
  document.getElementById("tensor-name").focus({ preventScroll: true });
}

/** Whether nothing but a module by itself shows that a tensor is wrong. */
function isAlone(view, step, tensor) {
  return Boolean(rowOf(view, step, tensor, true)?.far && !rowOf(view, step, tensor)?.far);
}

/** How many tensors of each kind are right in a table. */
function rightText(table) {
  const counts = new Map();
  const far = new Set(table.far);
  table.names.forEach((name, place) => {
    const title = KINDS[kindOf(page.names[name])] ?? kindOf(page.names[name]);
    const [right, all] = counts.get(title) ?? [0, 0];
    counts.set(title, [right + (far.has(place) ? 0 : 1), all + 1]);
  });
  return [...counts].map(([title, [right, all]]) => `${title}: ${right === all ? `all ${all}` : `${right} of ${all}`} right`).join("; ");
}

function show() {
  showLosses(document.getElementById("losses"), state);
  map.paint(tableOf(state.view, state.step, state.alone));
  const views = page.kind === "recording";
  document.getElementById("way").textContent = views || page.tables.some((table) => table.alone) ? WAYS[views ? page.views[state.view].name : wayOf(state.alone)] : "";
  map.mark(state.tensor);
  showTensor(document.getElementById("tensor"), state);
  showRanks(document.getElementById("ranks"), state);
  if (state.tensor !== null) read(state.tensor);
}

function wayOf(alone) {
  return Object.keys(WAYS)[alone ? 1 : 0];
}

/** The numbers of a tensor that the pointer or the focus is on. */
function read(name) {
  const row = rowOf(state.view, state.step, name, state.alone);
  const numbers = row === null ? "" : state.alone ? ` — by itself, ${stateText(row)}` : ` — ${stateText(row)}; error ${sci(row.error)} (2-norm) of ${sci(row.tolerated, 1)}, ${sci(row.largest)} (largest element) of ${sci(row.toleratedLargest, 1)}`;
  document.getElementById("reading").replaceChildren(el("code", {}, page.names[name]), numbers);
}

function open(name) {
  state.tensor = name;
  show();
  const panel = document.getElementById("tensor");
  if (panel.getBoundingClientRect().top > innerHeight * 0.8) panel.scrollIntoView();
}

function buildChoices() {
  const parent = document.getElementById("choices");
  const steps = [...new Set(page.tables.map((table) => table.step))];
  const wrong = (step) => page.tables.some((table) => table.step === step && table.far.length);
  const views = page.views.map((view, number) => [number, labelOf(number), view.first !== null]);
  parent.append(choice(page.kind === "verification" ? "Run" : "Computed", "view", views, (value) => (state.view = value)));
  if (page.tables.some((table) => table.alone)) {
    const ways = [false, true].map((alone) => [alone, wayOf(alone), page.tables.some((table) => table.alone === alone && table.far.length)]);
    parent.append(choice("Computed", "alone", ways, (value) => (state.alone = value)));
  }
  if (steps.length > 1) {
    parent.append(choice("Step", "step", steps.map((step) => [step, String(step), wrong(step)]), (value) => (state.step = value)));
  }
}

function choice(title, key, items, set) {
  const labels = items.map(([value, text, bad]) => el("label", {},
    el("input", { type: "radio", name: key, value: String(value), checked: state[key] === value, onchange: () => { set(value); show(); } }),
    el("span", { class: bad ? "bad" : "" }, text, bad ? el("span", { class: "unseen" }, ", has failures") : null)));
  return el("fieldset", {}, el("legend", {}, title), ...labels);
}

function buildTools() {
  const over = document.getElementById("over");
  const input = el("input", { type: "file", accept: ".html,text/html", hidden: true, id: "other", "aria-label": "Another report.html", onchange: () => input.files.length && layOver(over, input.files[0]) });
  document.getElementById("tools").append(
    el("button", { type: "button", id: "issue", onclick: () => openIssue() }, "Copy as issue"),
    el("button", { type: "button", onclick: () => input.click() }, "Lay another report over this one"), input,
    el("button", { type: "button", onclick: () => print() }, "Print"));
}

begin();
addEventListener("hashchange", () => location.reload());
