// The mesh: the ranks on their axes, what each holds of the open tensor, and which disagree. And contracts, side by side.

/** Rank -> {count, apart}: in how many elements its copy of a tensor is another, and how far it is from the first copy, relative to that; null if that is not known. */
function oddOf(view, step, text) {
  const found = page.views[view].differing.filter(([at, tensor]) => at === step && tensor === text);
  return new Map(found.flatMap(([, , ranks, counts, aparts]) => ranks.map((rank, place) => [rank, { count: counts?.[place] ?? null, apart: aparts?.[place] ?? null }])));
}

/** Whether the copy that was judged is right where it is near enough: in a recording, a gradient that was not reduced may be, too. */
function isRightCopy(view, step, text) {
  return page.kind === "verification" || page.views[view].differing.some(([at, tensor, , , , right]) => at === step && tensor === text && right);
}

/** "rank 1's differs by a relative 8.76e-1 in 64 elements": the copies that differ, as far as that is known. */
function apartText(odd) {
  const ranks = [...odd.keys()];
  const [counts, aparts] = ["count", "apart"].map((key) => [...odd.values()].map((one) => one[key]).filter((one) => one !== null));
  const by = aparts.length ? ` by a relative ${sci(Math.max(...aparts))}` : "";
  const each = [...new Set(counts)];
  const where = each.length ? ` in ${each.map((count) => count.toLocaleString("en")).join(", ")} elements${ranks.length > 1 && each.length === 1 ? " each" : ""}` : "";
  return `${ranks.length === 1 ? `rank ${ranks[0]}'s differs` : `those of ${listed(ranks)} differ`}${by}${where}`;
}

/** Of an open step: that copies of a tensor differ between ranks, and how; "" if none does. */
function copiesText({ view, step, alone }, name) {
  const odd = alone ? new Map() : oddOf(view, step, name);
  return odd.size ? `copies differ between ranks: ${apartText(odd)}` : "";
}

function showRanks(parent, state) {
  const view = page.views[state.view];
  parent.hidden = !view.ranks.length;
  if (parent.hidden) return;
  const name = state.tensor === null ? null : page.names[state.tensor];
  const isNumber = name !== null && !name.includes("/");
  const odd = oddOf(state.view, state.step, name);
  const held = state.tensor === null ? [] : heldOf(state.view, state.tensor);
  const shape = shapeOf(held);
  const axes = Object.keys(view.ranks[0]);
  const wide = axes.length ? Math.max(...view.ranks.map((place) => place[axes.at(-1)])) + 1 : 1;
  const row = name === null ? null : withPicture(state.view, state.step, state.tensor, state.alone);
  const wrong = wrongRanks(state, row, held, odd);
  const judged = row?.ranks.length && held.length < 2 && !row.where.includes("DP rank") ? row.ranks.map(([rank]) => Number(rank)) : [...view.ranks.keys()];
  const cards = view.ranks.map((place, rank) => {
    const own = held.find(({ ranks }) => ranks.includes(rank));
    const coordinates = axes.filter((axis) => axis !== "rank").map((axis) => `${axis} ${place[axis]}`).join(", ");
    return el("div", { class: `rank ${odd.has(rank) ? "differs" : ""}${wrong.has(rank) ? "wrong" : ""}` },
      el("b", {}, `rank ${rank}`), coordinates ? el("span", { class: "quiet" }, `${coordinates} `) : null,
      own ? el("span", {}, heldText(name, shape, own.boxes)) : null,
      odd.has(rank) ? el("em", {}, " differs from the other ranks that hold it") : null,
      wrong.has(rank) ? el("em", {}, " ✕ wrong here") : null,
      judged.includes(rank) ? null : el("span", { class: "quiet" }, "not judged"));
  });
  const grid = el("div", { class: "mesh" }, ...cards);
  grid.style.gridTemplateColumns = `repeat(${Math.min(wide, 8)}, minmax(0, 1fr))`;
  const other = view.differing.filter(([step]) => step === state.step);
  parent.replaceChildren(el("h2", { id: "ranks-title" }, `Ranks of ${page.kind === "verification" ? view.label : "the run"}`),
    el("p", { class: "quiet" }, name === null ? "" : held.length ? "What each holds of " : isNumber ? "" : "It is not known what each holds of ", name === null || (isNumber && !held.length) ? null : el("code", {}, name)),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The mesh" }, grid),
    other.length ? el("p", {}, `In step ${state.step}, the copies of ${other.length} ${plural("tensor", other.length)} differ between ranks. The first is `, el("code", {}, other[0][1]), `, on ${listed(other[0][2])}.`) : el("span"));
}

/** The ranks on which the open tensor is wrong, as far as that is known; what differs from the judged copy was not judged. */
function wrongRanks(state, row, held, odd) {
  if (!row?.far) return new Set();
  const slices = slicesOf(row);
  const each = row.ranks.length && !(held.length > 1 && slices);
  if (each && row.where.includes("DP rank")) return new Set();
  const parts = held.length === 1 || (slices && heldOf(state.view, state.tensor, row.picture).length) ? held : [];
  const hit = each ? row.ranks.filter(isFar).map(([rank]) => Number(rank)) : parts.flatMap(({ ranks, boxes }) => (held.length === 1 || isWrong(boxes, slices, row) ? ranks : []));
  return new Set(hit.filter((rank) => !odd.has(rank)));
}

function shapeOf(held) {
  const boxes = held.flatMap((one) => one.boxes);
  return boxes.length ? boxes[0][0].map((_, dim) => Math.max(...boxes.map(([start, size]) => start[dim] + size[dim]))) : [];
}

function heldText(name, shape, boxes) {
  return boxes.map(([start, size]) => boxText(name, shape, start, size)).join("; and ");
}

const SHOWN = 8; // lines of ranks that are not folded

/** The open tensor on the ranks: where it is wrong in words, what each holds of it, the largest error there, and whose copy is another. */
function onRanks(state, row) {
  const name = page.names[state.tensor];
  const held = heldOf(state.view, state.tensor);
  const odd = oddOf(state.view, state.step, name);
  const said = row && ranksText(state.view, state.step, state.tensor, row);
  const head = [el("h3", {}, "On the ranks"), ...(said ? [el("p", { class: "where" }, `${said}.`)] : [])];
  const each = row?.ranks.length > 1 && held.length < 2 ? [sharesOf(row)] : [];
  if (held.length < 2 && !odd.size) return said ? [el("section", { id: "on-ranks" }, ...head, ...each)] : [];
  const shape = shapeOf(held);
  // Ranks that differ from others with the same part have lines of their own.
  const lines = (held.length ? held : [{ ranks: page.views[state.view].ranks.map((_, rank) => rank), boxes: [] }]).flatMap(({ ranks, boxes }) => {
    const same = ranks.filter((rank) => !odd.has(rank));
    return [...(same.length ? [{ ranks: same, boxes }] : []), ...ranks.filter((rank) => odd.has(rank)).map((rank) => ({ ranks: [rank], boxes }))];
  }).sort((one, two) => one.ranks[0] - two.ranks[0]);
  const wrong = wrongRanks(state, row, held, odd);
  const picture = heldOf(state.view, state.tensor, row?.picture).length ? row?.picture : null;
  const square = ({ ranks, boxes }) => {
    const found = picture && boxes.length && !odd.has(ranks[0]) ? squareIn(picture, boxes) : null;
    return found === null ? "" : percent(found);
  };
  const error = ({ ranks, boxes }) => {
    if (odd.has(ranks[0])) return "not judged";
    const found = picture && boxes.length ? largestIn(picture, boxes) : null;
    if (found !== null && row.batch) return found[0] ? "not equal" : "equal";
    return found === null ? "" : found[0] === null ? "not finite" : found[0] === 0 ? "0" : `${found[1] ? "" : "at most "}${found[0].toExponential(1)}`;
  };
  const copy = ({ ranks, boxes }) => {
    const { count, apart } = odd.get(ranks[0]) ?? {};
    const all = boxes.reduce((sum, [, size]) => sum + size.reduce((one, two) => one * two, 1), 0);
    if (!odd.has(ranks[0])) return odd.size ? "judged here" : "";
    return count === null ? "other values" : `${count.toLocaleString("en")} of ${all.toLocaleString("en")} elements differ${apart === null ? "" : `, by a relative ${sci(apart)}`}`;
  };
  const squares = held.length > 1 && lines.some(square);
  const columns = ["rank", "holds", ...(squares ? ["squared error"] : []), row?.batch ? "equal or not" : "largest error", ...(odd.size ? ["copy"] : [])];
  const body = lines.map((line) => el("tr", { class: odd.has(line.ranks[0]) ? "differs-row" : "" },
    el("td", {}, `${line.ranks.some((rank) => wrong.has(rank)) ? "✕ " : ""}${line.ranks.join(", ")}`), el("td", {}, heldText(name, shape, line.boxes)), ...(squares ? [el("td", { class: "number" }, square(line))] : []), el("td", { class: "number" }, error(line)), ...(odd.size ? [el("td", {}, copy(line))] : [])));
  const table = (lines) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The tensor on the ranks" }, el("table", {},
    el("thead", {}, el("tr", {}, ...columns.map((one) => el("th", { scope: "col", class: one.endsWith("error") ? "number" : "" }, one)))), el("tbody", {}, ...lines)));
  const rest = body.slice(SHOWN);
  return [el("section", { id: "on-ranks" }, ...head, ...each, table(body.slice(0, SHOWN)),
    rest.length ? el("details", {}, el("summary", {}, `${rest.length} more`), table(rest)) : null)];
}

/** Of a tensor that each rank has for its own samples: how far it is off there. */
function sharesOf(row) {
  const title = row.where.includes("DP rank") ? "DP rank" : "rank";
  const line = (one) => el("tr", { class: isFar(one) ? "differs-row" : "" },
    el("td", {}, one[0]), el("td", { class: "number" }, shared({ share: one[1] ?? Infinity, far: isFar(one) })));
  const table = (ranks, label) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, title), el("th", { scope: "col", class: "number" }, "of tolerated, in its worst micro batch"))), el("tbody", {}, ...ranks.map(line))));
  const rest = row.ranks.slice(SHOWN);
  return el("div", {}, table(row.ranks.slice(0, SHOWN), "How far it is off on each rank"),
    rest.length ? el("details", {}, el("summary", {}, `${rest.length} more`), table(rest, "How far it is off on further ranks")) : null);
}

function showContracts(parent) {
  const views = page.views.filter((view) => Object.keys(view.contract).length);
  if (!views.length) return;
  const contracts = views.map((view) => flat(view.contract));
  const entries = [...new Set(contracts.flatMap((one) => Object.keys(one)))];
  const differs = (entry) => contracts.some((one) => one[entry] !== contracts[0][entry]);
  const line = (entry) => el("tr", { class: differs(entry) ? "differs-row" : "" }, el("th", { scope: "row" }, entry), ...contracts.map((one) => el("td", {}, one[entry] ?? el("span", { class: "quiet" }, "has none"))));
  const table = (which, title) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "entry"), ...views.map((view) => el("th", { scope: "col" }, page.kind === "recording" ? "the run" : view.label)))),
    el("tbody", {}, ...which.map(line))));
  const [different, same] = [entries.filter(differs), entries.filter((entry) => !differs(entry))];
  parent.hidden = false;
  if (views.length === 1) {
    const title = page.kind === "recording" ? "Settings of the optimizer" : "Contract";
    parent.append(el("h2", { id: "contracts-title" }, title), el("p", { class: "quiet" }, "What the run ran with, read back from its live objects."), table(same, "What the run ran with"));
    return;
  }
  parent.append(el("h2", { id: "contracts-title" }, "Contracts"),
    el("p", { class: "quiet" }, "What each run ran with, read back from its live objects. A difference that is by design, such as of sharding, is no failure."),
    different.length ? table(different, "Entries that differ") : el("p", {}, "All entries are the same."),
    el("details", {}, el("summary", {}, `${same.length} entries that are the same`), table(same, "Entries that are the same")));
}

/** A contract as lines of text: an entry that has entries of its own, such as sharding, is a line for each. */
function flat(contract) {
  const lines = Object.entries(contract).flatMap(([entry, value]) =>
    isObject(value) ? Object.keys(value).sort().map((key) => [`${entry}: ${key}`, value[key]]) : [[entry, value]]);
  return Object.fromEntries(lines.map(([entry, value]) => [entry, short(valueText(value))]));
}

function valueText(value) {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.map(valueText).join(", ") || "none";
  return isObject(value) ? Object.keys(value).sort().map((key) => `${key}: ${valueText(value[key])}`).join("; ") || "none" : String(value);
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function short(text) {
  return text.length > 400 ? `${text.slice(0, 400)} ...` : text;
}
