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
  const head = document.getElementById("headline");
  if (head) head.textContent = headlineOf(page.views.findIndex((one) => one.first));
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

/** The first wrong tensor of a view: [what it is and on which ranks it is wrong, the one number that says by how much]. */
function headline(number) {
  const [step, name, what] = page.views[number].first;
  const tensor = numberOf.get(name) ?? null;
  const run = page.kind === "verification" ? `${labelOf(number)}: ` : "";
  const row = wrongRowOf(number, step, tensor);
  const odd = oddOf(number, step, name);
  if (odd.size && !row?.far) {
    const alike = page.views[number].differing.filter(([at, other]) => at === step && kindOf(other) === kindOf(name)).length - 1;
    return [`${run}copies of ${inWords(name)}${alike ? ` and of ${alike} more` : ""} differ between ranks in step ${step}`, apartText(odd)];
  }
  const on = row === null ? "" : onText(number, [...wrongRanks({ view: number, step, tensor }, row, heldOf(number, tensor), odd)], row);
  const copies = odd.size ? `; ${listed([...odd.keys()])} ${odd.size === 1 ? "has" : "have"} other values of it, which were not compared` : "";
  return [`${run}${inWords(name)} is wrong${on} in step ${step}`, oneNumber(what, row) + copies];
}

/** The same as a sentence. */
function headlineOf(number) {
  return capital(`${headline(number).join(": ")}.`);
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** " on rank 1": the ranks on which a tensor is wrong; "" if they are not known. */
function onText(view, ranks, row) {
  const all = page.views[view].ranks.length;
  if (row.where.includes("DP rank") && !ranks.length) return row.ranks.length ? ` on DP ${listed(row.ranks.filter(isFar).map(([rank]) => Number(rank)))}` : "";
  if (!ranks.length || all < 2) return "";
  return ranks.length === all ? " on all ranks" : ` on ${listed(ranks.sort((one, two) => one - two))}`;
}

/** Of what is wrong with a tensor, the number that says most: a factor, or else the error that is farther beyond what is tolerated of it. */
function oneNumber(what, row) {
  const factor = what.match(/; (it|its change) is (\S+) times the reference's/);
  if (factor) return `${factor[1]} is ${factor[2]} times the reference's`;
  if (what.startsWith("is ")) return `it ${what.split("; ")[0]}`;
  const [first, second] = what.replace(/^by itself, /, "").replace(/ \([^()]* times what [^()]*\)/, "").split("; ");
  return row && row.error <= row.tolerated && second?.includes("(largest element)") ? `relative error ${second}` : first;
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
  if (name === "gradient norm" && page.kind === "recording") list.querySelector(".size").after(pair("Ranks", "all: it is one number of the run"));
  const where = row.far ? [row.borrowed ? "" : row.where, row.picture ? placeText(view, number, row) : ""].filter(Boolean).join(": ") : "";
  const ranks = ranksText(view, step, number, row);
  const again = stepsAfter(view, step, number);
  if (again) list.append(pair("Again", again));
  list.querySelector(".size").after(...(ranks ? [pair("Ranks", ranks)] : []), ...(where ? [pair("Where", where)] : []));
  const observed = newlyObserved(page.views[view], where, ranks);
  list.querySelectorAll("[data-title=Observed] dd").forEach((one) => observed.includes(one.textContent) || one.remove());
  list.querySelectorAll("[data-title]:not(:has(dd))").forEach((one) => one.remove());
  if (page.kind === "recording") {
    for (const [title, said] of kindsOf(tableOf(view, step), number)) list.append(pair(title, said));
  }
  section.append(el("button", { type: "button", onclick: () => goTo(view, step, number) }, name.includes("/") ? "See this tensor below" : "See it below"));
}

/** "in steps 2, 3": the later steps in which a tensor is too far, too; "" if there are none. */
function stepsAfter(view, step, number) {
  const later = [...new Set(tablesOfRun(view).filter((table) => table.step > step && table.row(number)?.far).map((table) => table.step))];
  return later.length ? `in ${plural("step", later.length)} ${later.join(", ")}` : "";
}

/** Beside the map, the panel ends where the map does, and stays as high as what of that is on the screen: its name is not pushed out above it. */
function fitPanel() {
  const [panel, blocks] = ["tensor", "map"].map((id) => document.getElementById(id));
  const top = parseFloat(getComputedStyle(panel).top);
  const room = blocks.getBoundingClientRect().bottom - top;
  panel.style.maxHeight = isBeside() && blocks.offsetHeight > innerHeight && room < innerHeight - top ? `${Math.max(room, 96)}px` : "";
}

/** What was observed of a view's first wrong tensor, without what is said of where and on which ranks it is wrong. */
function newlyObserved({ observed }, where, ranks) {
  const told = [where && /^\d+ of \d+ elements are wrong$/, ranks && /^not the same on all ranks that hold it/].filter(Boolean);
  return observed.filter((one) => !told.some((said) => said.test(one)));
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

/** [title, kinds of tensors in words]: which are all right in a table, and of which some are too far or have copies that differ; those before `first` are right. */
function kindsOf(table, first) {
  const counts = new Map();
  const [far, odd] = [new Set(table.far), copiesOf(table)];
  table.names.forEach((name, place) => {
    const title = (KINDS[kindOf(page.names[name])] ?? kindOf(page.names[name])).toLowerCase();
    const [wrong, all] = counts.get(title) ?? [0, 0];
    counts.set(title, [wrong + (far.has(place) || odd.has(name) ? 1 : 0), all + 1]);
  });
  const same = kindOf(page.names[first] ?? "");
  const before = table.names.slice(0, table.names.indexOf(first)).filter((name) => kindOf(page.names[name]) === same).length;
  const earlier = before && !OF_WEIGHTS.has(same) ? `${KINDS[same].toLowerCase()} before it (${before})` : "";
  const of = (holds, text) => [...counts].filter(([, [wrong]]) => holds(wrong)).map(text).join(", ");
  return [
    ["Ruled out", [of((wrong) => !wrong, ([title, [, all]]) => `${title} (${all})`), earlier].filter(Boolean).join(", "), same === "numbers" ? ": right, but for what is said above" : ": right"],
    [`Wrong in step ${table.step}`, of((wrong) => wrong, ([title, [wrong, all]]) => `${wrong} of ${all} ${title}`), ""],
  ].flatMap(([title, kinds, end]) => (kinds ? [[title, kinds + end]] : []));
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
  return `${parts}: ${table.far.length} of ${judged.toLocaleString("en")} ${plural("tensor", judged)} ${table.far.length === 1 ? "is" : "are"} too far${odd ? `; copies of ${odd} of them differ between ranks` : ""}${table.unlike ? `; ${table.unlike} more are not judged, as they come after tensors of which ranks have other copies` : ""}.`;
}

/** The numbers of a tensor that the pointer or the focus is on. */
function read(name) {
  const row = rowOf(state.view, state.step, name, state.alone);
  const errors = row === null || row.batch || state.alone ? "" : `; error ${errorText(row)}`;
  const copies = copiesText(state, page.names[name]);
  const numbers = row === null ? "" : ` — ${state.alone ? "by itself, " : ""}${stateText(row, copies)}${errors}${row.far && copies ? `; ${copies}` : ""}`;
  const below = isBeside() || name !== state.tensor ? null : el("button", { type: "button", onclick: showPanel }, "See it below");
  document.getElementById("reading").replaceChildren(...(below ? [below] : []), el("code", {}, page.names[name]), numbers);
}

function open(name) {
  state.tensor = name;
  show();
  document.getElementById("tensor").scrollTop = 0;
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
    el("button", { type: "button", onclick: () => input.click() }, "Compare with another report …"), input,
    el("button", { type: "button", onclick: () => print() }, "Print"));
}

begin();
addEventListener("beforeprint", () => document.getElementById("how").open = true);
addEventListener("scroll", fitPanel, { passive: true });
addEventListener("resize", fitPanel);
addEventListener("hashchange", () => location.reload());
