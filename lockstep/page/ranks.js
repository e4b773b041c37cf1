// The mesh: the ranks on their axes, what each holds of the open tensor, and which disagree. And contracts, side by side.

function showRanks(parent, state) {
  const view = page.views[state.view];
  parent.hidden = !view.ranks.length;
  if (parent.hidden) return;
  const name = state.tensor === null ? null : page.names[state.tensor];
  const odd = new Set(view.differing.filter(([step, tensor]) => step === state.step && tensor === name).flatMap(([, , ranks]) => ranks));
  const boxes = state.tensor === null ? [] : boxesOf(state.view, state.tensor);
  const axes = Object.keys(view.ranks[0]);
  const wide = axes.length ? Math.max(...view.ranks.map((place) => place[axes.at(-1)])) + 1 : 1;
  const cards = view.ranks.map((place, rank) => {
    const box = boxes.find(([ranks]) => ranks.includes(rank));
    const shape = box ? box[1].map((_, dim) => Math.max(...boxes.map(([, start, size]) => start[dim] + size[dim]))) : [];
    const coordinates = axes.filter((axis) => axis !== "rank").map((axis) => `${axis} ${place[axis]}`).join(", ");
    return el("div", { class: `rank ${odd.has(rank) ? "differs" : ""}` },
      el("b", {}, `rank ${rank}`), coordinates ? el("span", { class: "quiet" }, `${coordinates} `) : null,
      box ? el("span", {}, boxText(name, shape, box[1], box[2])) : null,
      odd.has(rank) ? el("em", {}, " differs from the other ranks that hold it") : null);
  });
  const grid = el("div", { class: "mesh" }, ...cards);
  grid.style.gridTemplateColumns = `repeat(${Math.min(wide, 8)}, minmax(0, 1fr))`;
  const other = view.differing.filter(([step]) => step === state.step);
  parent.replaceChildren(el("h2", { id: "ranks-title" }, `Ranks of ${page.kind === "verification" ? view.label : "the run"}`),
    el("p", { class: "quiet" }, name === null ? "" : boxes.length ? "What each holds of " : "It is not known what each holds of ", name === null ? null : el("code", {}, name)),
    grid,
    other.length ? el("p", {}, `In step ${state.step}, ${other.length} tensors are not the same on all ranks that hold them; the first is `, el("code", {}, other[0][1]), `, on ${listed(other[0][2])}.`) : el("span"));
}

function showContracts(parent) {
  const views = page.views.filter((view) => Object.keys(view.contract).length);
  if (!views.length) return;
  const entries = [...new Set(views.flatMap((view) => Object.keys(view.contract)))];
  const text = (view, entry) => (entry in view.contract ? JSON.stringify(sorted(view.contract[entry])) : "");
  const differs = (entry) => views.some((view) => text(view, entry) !== text(views[0], entry));
  const line = (entry) => el("tr", { class: differs(entry) ? "differs-row" : "" }, el("th", { scope: "row" }, entry), ...views.map((view) => el("td", {}, el("code", {}, short(text(view, entry))))));
  const table = (which, title) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "entry"), ...views.map((view) => el("th", { scope: "col" }, view.label)))),
    el("tbody", {}, ...which.map(line))));
  const [different, same] = [entries.filter(differs), entries.filter((entry) => !differs(entry))];
  parent.hidden = false;
  parent.append(el("h2", { id: "contracts-title" }, "Contracts"),
    el("p", { class: "quiet" }, "What each run ran with, read back from its live objects. A difference that is by design, such as of sharding, is no failure."),
    different.length ? table(different, "Entries that differ") : el("p", {}, "All entries are the same."),
    el("details", {}, el("summary", {}, `${same.length} entries that are the same`), table(same, "Entries that are the same")));
}

/** The same value with the keys of its objects in order, which is chance. */
function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}

function short(text) {
  return text.length > 400 ? `${text.slice(0, 400)} ...` : text;
}
