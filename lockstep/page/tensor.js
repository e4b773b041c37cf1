// The open tensor: its numbers over steps and views, where the error lies, and the elements that are farthest off.

function showTensor(parent, state) {
  const name = state.tensor;
  if (name === null) {
    parent.replaceChildren(el("p", { class: "quiet" }, "Choose a tensor of the map."));
    return;
  }
  const row = withPicture(state.view, state.step, name, state.alone);
  const said = [true, false].flatMap((alone) => {
    const found = rowOf(state.view, state.step, name, alone)?.said;
    return found ? [el("p", { class: "where" }, `${alone ? "By itself, " : ""}${found}`)] : [];
  });
  const ways = page.kind === "verification" && page.tables.some((table) => table.alone);
  const text = page.names[name];
  const copies = copiesText(state, text);
  const kind = KINDS[kindOf(text)] ?? kindOf(text);
  parent.replaceChildren(
    el("h3", { id: "tensor-name", tabindex: -1 }, el("code", {}, text)),
    el("p", {}, `${kind}, step ${state.step}, ${labelOf(state.view)}${ways ? `, ${wayOf(state.alone)}` : ""}: `,
      row === null ? "it is not among the tensors that were judged here" : el("span", { class: row.far || copies ? "far-text" : "" }, stateText(row, copies)),
      row?.where ? ` (worst in ${row.where})` : ""),
    el("button", { type: "button", class: "to-cell", onclick: () => map.cells.get(name).scrollIntoView({ block: "center" }) }, "Its cell in the map"),
    ...said,
    ...onRanks(state, row),
    ...pictureOf(name, state, row),
    ...numbers(name, state),
    ...elementsOf(row),
  );
}

/** Numbers of the tensor in every step of every run: first as it is computed where it is open, the open run first. */
function numbers(name, state) {
  const open = page.kind === "recording" ? page.views[state.view].name : wayOf(state.alone);
  const found = tables.filter((table) => table.has(name));
  const ways = [...new Set([open, ...found.map(wayOfTable)])].map((way) => [way, found.filter((table) => wayOfTable(table) === way)]).filter(([, of]) => of.length);
  const sections = ways.map(([way, of]) => {
    const rows = [...of].sort((one, two) => (two.view === state.view) - (one.view === state.view) || one.view - two.view || one.step - two.step);
    const title = `Errors ${way === FROM_BATCH ? "from the batch" : "of each module by itself"}`;
    return el("section", {}, el("h3", {}, title), numbersOf(name, title, rows, (table) => way === open && table.view === state.view && table.step === state.step));
  });
  // Runs, and ways to compute, may differ in what is tolerated.
  const differs = new Set(ways.filter(([way]) => way === FROM_BATCH).flatMap(([, of]) => of.map((table) => sci(table.row(name).tolerated, 1)))).size > 1;
  if (differs && page.tolerance) sections[ways.findIndex(([way]) => way === FROM_BATCH)].append(el("p", { class: "quiet" }, page.tolerance));
  if (ways.length > 1) sections[1].append(el("p", { class: "quiet" }, "Less is tolerated by itself: from the batch, the rounding errors of all that comes before it add up."));
  return sections;
}

function numbersOf(name, title, of, isOpen) {
  const runs = page.kind === "verification";
  const inText = of[0].alone || isBatch(name);
  const head = ["step", ...(runs ? ["run"] : []), isBatch(name) ? "" : "of tolerated", ...(inText ? ["what is wrong"] : ["2-norm, relative", "largest, relative"])].filter(Boolean);
  const body = of.map((table) => {
    const row = table.row(name);
    const errors = [[row.error, row.tolerated], [row.largest, row.toleratedLargest]].map(([error, tolerated]) => el("td", { class: "number" }, sci(error), el("br"), el("span", { class: "quiet" }, `of ${sci(tolerated, 1)}`)));
    return el("tr", { class: isOpen(table) ? "now" : "" },
      el("td", {}, String(table.step)), runs ? el("td", {}, labelOf(table.view)) : null,
      row.batch ? null : el("td", { class: "number" }, shared(row), copiesText(table, page.names[name]) ? el("span", { class: "far-text" }, " copies differ") : null), ...(inText ? [el("td", {}, row.said || "nothing")] : errors));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((one) => el("th", { scope: "col", class: /^(step|run|what)/.test(one) ? "" : "number" }, one)))), el("tbody", {}, ...body)));
}

function shared(row) {
  return el("span", { class: row.far ? "far-text" : "" }, row.far ? `✕ ${shareText(row.share)} times` : shareText(row.share));
}

function pictureOf(name, state, row) {
  if (row === null) return [];
  const { picture } = row;
  if (picture === null) {
    if (!page.names[name].includes("/")) return [];
    return [el("p", { class: "quiet" }, row.far ? "No picture: of those that are too far, the first of each pass have one, if there is a reference and they are not too large." : "No picture: tensors that are too far have one, and the few that are nearest to it.")];
  }
  return [
    el("section", {}, el("h3", {}, row.borrowed ? "Where the error lies, computed from the batch" : "Where the error lies"),
      row.far ? el("p", { class: "where" }, placeText(state.view, name, row)) : null,
      drawPicture(state, name, row)),
  ];
}

function elementsOf(row) {
  if (!row?.picture) return [];
  const elements = row.picture.elements.map(([index, own, reference]) => el("tr", {},
    el("td", {}, `[${index.join(", ")}]`), el("td", { class: "number" }, digits(own)), el("td", { class: "number" }, digits(reference)),
    row.batch ? null : el("td", { class: "number" }, own === null ? "not finite" : sci(own - reference))));
  const title = row.batch ? "The first elements that are not equal" : "The elements that are farthest off";
  const head = ["index", "run", "reference", ...(row.batch ? [] : ["difference"])];
  return [
    el("section", {}, el("h3", {}, title),
      elements.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
        el("thead", {}, el("tr", {}, ...head.map((one) => el("th", { scope: "col", class: one === "index" ? "" : "number" }, one)))),
        el("tbody", {}, ...elements))) : el("p", {}, "none: all elements are equal")),
  ];
}

function digits(value) {
  return value === null ? "not finite" : value === 0 ? "0" : Number(value.toPrecision(7)).toString();
}
