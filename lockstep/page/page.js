// What is shown: one view, one step, one tensor.

const state = { view: 0, step: 1, tensor: null };

function begin() {
  const asked = page.views.findIndex((view) => view.name === decodeURIComponent(location.hash.slice(1)));
  state.view = asked < 0 ? Math.max(0, page.views.findIndex((view) => view.first)) : asked;
  const view = page.views[state.view];
  state.step = view?.first?.[0] ?? stepsOf(state.view)[0];
  const near = view?.first ?? view?.nearest;
  const number = near ? page.names.indexOf(near[1]) : -1;
  state.tensor = number < 0 ? null : number;
  if (!view?.first && near) state.step = near[0];
  buildTools();
  document.querySelectorAll(".finding").forEach((section) => sayWhere(section, Number(section.dataset.view)));
  showContracts(document.getElementById("contracts"));
  if (!page.tables.length) {
    document.getElementById("model").hidden = page.losses !== null;
    document.getElementById("choices").append(el("p", {}, "No tensor was judged; the sentences above say why."));
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
  const row = tableOf(view, step)?.row(number) ?? null;
  if (row === null) return;
  const said = [row.where, row.picture ? whereText(view, number, row.picture) : ""].filter(Boolean).join(": ");
  if (said) section.querySelector("dl").prepend(el("div", {}, el("dt", {}, "Where"), el("dd", {}, said)));
}

function show() {
  showLosses(document.getElementById("losses"), state);
  map.paint(tableOf(state.view, state.step));
  map.mark(state.tensor);
  showTensor(document.getElementById("tensor"), state);
  showRanks(document.getElementById("ranks"), state);
  if (state.tensor !== null) read(state.tensor);
}

/** The numbers of a tensor that the pointer or the focus is on. */
function read(name) {
  const row = tableOf(state.view, state.step)?.row(name) ?? null;
  const numbers = row === null ? "" : ` — ${stateText(row)}; error ${sci(row.error)} (2-norm) of ${sci(row.tolerated)}, ${sci(row.largest)} (largest element) of ${sci(row.toleratedLargest)}`;
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
  const wrong = (view, step) => page.tables.some((table) => table.view === view && (step === null || table.step === step) && table.far.length);
  const views = page.views.map((view, number) => [number, labelOf(number), view.first !== null]);
  parent.append(choice(page.kind === "verification" ? "Run" : "Computed", "view", views, (value) => (state.view = value)));
  if (steps.length > 1) {
    parent.append(choice("Step", "step", steps.map((step) => [step, String(step), page.views.some((_, view) => wrong(view, step))]), (value) => (state.step = value)));
  }
}

function choice(title, key, items, set) {
  const labels = items.map(([value, text, bad]) => el("label", {},
    el("input", { type: "radio", name: key, value, checked: state[key] === value, onchange: () => { set(value); show(); } }),
    el("span", { class: bad ? "bad" : "" }, text, bad ? el("span", { class: "unseen" }, ", has failures") : null)));
  return el("fieldset", {}, el("legend", {}, title), ...labels);
}

function buildTools() {
  const over = document.getElementById("over");
  const input = el("input", { type: "file", accept: ".html,text/html", hidden: true, id: "other", "aria-label": "Another report.html", onchange: () => input.files.length && layOver(over, input.files[0]) });
  document.getElementById("tools").append(
    el("button", { type: "button", id: "issue", onclick: () => openIssue(state) }, "Copy as issue"),
    el("button", { type: "button", onclick: () => input.click() }, "Lay another report over this one"), input,
    el("button", { type: "button", onclick: () => print() }, "Print"));
}

begin();
addEventListener("hashchange", () => location.reload());
