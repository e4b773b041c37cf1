// The open tensor: its numbers over steps and views, where the error lies, and the elements that are farthest off.

function showTensor(parent, state) {
  const name = state.tensor;
  if (name === null) {
    parent.replaceChildren(el("p", { class: "quiet" }, "Choose a tensor of the map."));
    return;
  }
  const row = rowOf(state.view, state.step, name, state.alone);
  const said = [false, true].flatMap((alone) => {
    const found = rowOf(state.view, state.step, name, alone)?.said;
    return found ? [el("p", { class: "where" }, `${alone ? "By itself, " : ""}${found}`)] : [];
  });
  const text = page.names[name];
  const kind = KINDS[kindOf(text)] ?? kindOf(text);
  parent.replaceChildren(
    el("h3", { id: "tensor-name", tabindex: -1 }, el("code", {}, text)),
    el("p", {}, `${kind}, step ${state.step}, ${labelOf(state.view)}: `,
      row === null ? "it is not among the tensors that were judged here" : el("span", { class: row.far ? "far-text" : "" }, stateText(row)),
      row?.where ? ` (worst in ${row.where})` : ""),
    ...said,
    numbers(name, state),
    ...onRanks(state, row),
    ...pictureOf(name, state, row),
  );
}

/** Numbers of the tensor in every step of every view that has it. */
function numbers(name, state) {
  const alone = tables.some((table) => table.alone && table.has(name));
  const head = ["step", "run", alone ? "share, and by itself" : "share", "2-norm", "largest element"];
  const body = tables.filter((table) => table.has(name) && !table.alone).map((table) => {
    const row = table.row(name);
    const alone = rowOf(table.view, table.step, name, true);
    const now = table.view === state.view && table.step === state.step;
    return el("tr", { class: now ? "now" : "" },
      el("td", {}, String(table.step)), el("td", {}, labelOf(table.view), el("br"), el("span", { class: "quiet" }, `norm ${row.norm === null ? "not finite" : row.norm}`)),
      el("td", { class: "number" }, shared(row), ...(alone ? [el("br"), shared(alone)] : [])),
      ...[[row.error, row.tolerated], [row.largest, row.toleratedLargest]].map(([error, tolerated]) => el("td", { class: "number" }, sci(error), el("br"), el("span", { class: "quiet" }, `of ${sci(tolerated)}`))));
  });
  return el("section", {}, el("h3", {}, "Relative errors, of what is tolerated"), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Relative errors" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((one, place) => el("th", { scope: "col", class: place > 1 ? "number" : "" }, one)))), el("tbody", {}, ...body))));
}

function shared(row) {
  return el("span", { class: row.far ? "far-text" : "" }, `${shareText(row.share)}${row.far ? " ✕" : ""}`);
}

function pictureOf(name, state, row) {
  if (row === null) return [];
  const { picture } = row;
  if (picture === null) {
    return [el("p", { class: "quiet" }, row.far ? "No picture: of those that are too far, the first of each pass have one, if there is a reference and they are not too large." : "No picture: tensors that are too far have one, and the few that are nearest to it.")];
  }
  const elements = picture.elements.map(([index, own, reference]) => el("tr", {},
    el("td", {}, `[${index.join(", ")}]`), el("td", { class: "number" }, digits(own)), el("td", { class: "number" }, digits(reference)),
    el("td", { class: "number" }, own === null ? "not finite" : sci(own - reference))));
  return [
    el("section", {}, el("h3", {}, "Where the error lies"),
      row.far ? el("p", { class: "where" }, whereText(state.view, name, row)) : null,
      drawPicture(state.view, name, picture)),
    el("section", {}, el("h3", {}, "The elements that are farthest off"),
      elements.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The elements that are farthest off" }, el("table", {},
        el("thead", {}, el("tr", {}, ...["index", "run", "reference", "difference"].map((one) => el("th", { scope: "col", class: one === "index" ? "" : "number" }, one)))),
        el("tbody", {}, ...elements))) : el("p", {}, "none: all elements are equal")),
  ];
}

function digits(value) {
  return value === null ? "not finite" : value === 0 ? "0" : Number(value.toPrecision(7)).toString();
}
