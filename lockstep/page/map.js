// The model as a map: a grid for each kind of tensor, with layers down and modules across. One tab stop each; arrows move inside.

const ITSELF = "itself"; // the column of what is of a line as a whole: of a layer's own output, and of modules outside of layers

/** The places of all names: kind -> {columns, lines: label -> cells}. All kinds have lines and columns in the order of the forward pass. */
function layOut(names) {
  const found = names.map((name) => ({ kind: kindOf(name), path: pathOf(name).replace(/^model\./, "") }));
  const layered = new Set();
  for (const one of found) {
    one.parts = one.kind === "numbers" ? [one.path] : one.path.split(".");
    one.at = one.parts.findIndex((part, place) => /^\d+$/.test(part) && place < one.parts.length - 1);
    if (one.at >= 0) layered.add(one.parts.slice(0, one.at).join("."));
  }
  const lines = new Map();
  const kinds = new Map();
  const batchIn = found.some((one) => one.kind === "forward") ? "forward" : "batch"; // it has lines above the outputs
  found.forEach((one, number) => {
    const last = one.parts.findIndex((part) => /^\d+$/.test(part));
    const isLayer = last >= 0 && layered.has(one.parts.slice(0, last).join("."));
    const line = isLayer ? one.parts.slice(0, last + 1).join(".") : `${one.kind === "batch" ? "batch: " : ""}${shown(one.kind, one.parts.join("."))}`;
    const column = (isLayer && one.parts.slice(last + 1).join(".")) || ITSELF;
    if (!lines.has(line)) lines.set(line, lines.size);
    const block = one.kind === "batch" ? batchIn : one.kind;
    if (!kinds.has(block)) kinds.set(block, new Map());
    const own = kinds.get(block);
    if (!own.has(line)) own.set(line, new Map());
    own.get(line).set(column, number);
  });
  const order = [...new Set([...(kinds.get("forward")?.values() ?? [])].flatMap((cells) => [...cells.keys()]))];
  // A weight is where its module is. Modules whose outputs are not known are behind the others.
  const placeOf = (kind, column) => {
    const place = order.indexOf(OF_WEIGHTS.has(kind) ? column.replace(/\.[^.]*$/, "") : column);
    return column === ITSELF ? -1 : place < 0 ? order.length : place;
  };
  for (const [kind, own] of kinds) {
    const columns = [...new Set([...own.values()].flatMap((cells) => [...cells.keys()]))].sort((one, two) => placeOf(kind, one) - placeOf(kind, two));
    kinds.set(kind, { columns, lines: own });
  }
  return { kinds, lines: [...lines.keys()] };
}

/** What a line or a column is called. */
function shown(kind, text) {
  return OF_WEIGHTS.has(kind) ? text.replace(/\.weight$/, "") : text;
}

const map = {
  cells: new Map(),
  build(parent, { onRead, onOpen }) {
    const { kinds, lines } = layOut(page.names);
    const order = [...Object.keys(KINDS), ...[...kinds.keys()].filter((kind) => !(kind in KINDS))];
    const blocks = el("div", { class: "blocks" });
    for (const kind of order.filter((one) => kinds.has(one))) {
      blocks.append(this.block(kind, kinds.get(kind), lines));
    }
    parent.append(legend(), blocks);
    const cellAt = (event) => event.target.closest?.(".cell[data-name]");
    blocks.addEventListener("click", (event) => cellAt(event) && onOpen(Number(cellAt(event).dataset.name)));
    for (const kind of ["mouseover", "focusin"]) {
      blocks.addEventListener(kind, (event) => cellAt(event) && onRead(Number(cellAt(event).dataset.name)));
    }
    blocks.addEventListener("keydown", (event) => this.key(event, onOpen));
  },
  block(kind, { columns, lines: own }, lines) {
    const title = KINDS[kind] ?? kind;
    const grid = el("div", { class: "grid", role: "grid", "aria-label": title });
    if (columns.length > 1) {
      const heads = columns.map((column) => el("span", { role: "columnheader", class: "column", title: column }, shown(kind, column)));
      grid.append(el("div", { role: "row", class: "line head" }, el("span", { role: "columnheader" }, "layer"), ...heads));
    }
    let first = true;
    for (const line of lines.filter((one) => own.has(one))) {
      const row = el("div", { role: "row", class: "line" }, el("span", { role: "rowheader", title: line }, line));
      for (const column of columns) {
        const name = own.get(line).get(column);
        if (name === undefined) {
          row.append(el("span", { role: "gridcell", class: "cell none" }));
          continue;
        }
        const cell = el("span", { role: "gridcell", class: "cell", tabindex: first ? 0 : -1, "data-name": name });
        first = false;
        this.cells.set(name, cell);
        row.append(cell);
      }
      grid.append(row);
    }
    const head = { forward: "computed downwards", backward: "computed upwards" }[kind];
    return el("div", { class: `block ${kind === "numbers" ? "numbers" : ""}` }, el("h3", {}, title, head ? el("span", { class: "quiet" }, `, ${head}`) : null), grid);
  },
  /** Shows a table: each cell by its share of what is tolerated. */
  paint(table) {
    const odd = table ? copiesOf(table) : new Set();
    for (const [name, cell] of this.cells) {
      const row = table?.row(name) ?? null;
      const open = cell.classList.contains("open") ? " open" : "";
      const copies = row !== null && odd.has(name);
      cell.className = `cell ${row === null ? "none" : classOf(row)}${copies ? " copies" : ""}${open}`;
      cell.setAttribute("aria-label", row === null ? page.names[name] : `${page.names[name]}, ${stateText(row, copies ? "copies differ between ranks" : "")}${copies && row.far ? "; copies differ between ranks" : ""}`);
    }
    // What this view has nothing of is not shown, and each grid keeps one tab stop.
    for (const part of document.querySelectorAll("#map .line:not(.head), #map .block")) {
      part.classList.toggle("empty", !part.querySelector(".cell:not(.none)"));
    }
    for (const grid of document.querySelectorAll("#map .grid")) {
      const stop = grid.querySelector('.cell[tabindex="0"]');
      const first = grid.querySelector(".cell[data-name]:not(.none)");
      if (stop?.classList.contains("none") && first) [stop.tabIndex, first.tabIndex] = [-1, 0];
    }
  },
  mark(name) {
    for (const cell of document.querySelectorAll(".cell.open")) cell.classList.remove("open");
    const cell = this.cells.get(name);
    if (!cell) return;
    cell.classList.add("open");
    const stop = cell.closest(".grid").querySelector('.cell[tabindex="0"]');
    if (stop && !cell.classList.contains("none")) [stop.tabIndex, cell.tabIndex] = [-1, 0]; // Tab leads to the open tensor
  },
  key(event, onOpen) {
    const cell = event.target.closest(".cell[data-name]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onOpen(Number(cell.dataset.name));
      return;
    }
    const next = neighbour(cell, event.key);
    if (next) {
      event.preventDefault();
      cell.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  },
};

function classOf(row) {
  if (row.excused) return "excused";
  if (row.far) return `far ${row.share < 10 ? "f1" : row.share < 1000 ? "f2" : "f3"}`;
  return row.small ? "small" : `s${Math.min(9, Math.floor(row.share * 10))}`;
}

/** The cell that a key leads to, in the same grid. */
function neighbour(cell, key) {
  const seen = (one) => one.dataset.name !== undefined && !one.classList.contains("none");
  const line = cell.parentElement;
  const cells = [...line.querySelectorAll(".cell")];
  const at = cells.indexOf(cell);
  const inLine = cells.filter(seen);
  if (key === "Home") return inLine[0];
  if (key === "End") return inLine.at(-1);
  if (key === "ArrowRight") return inLine[inLine.indexOf(cell) + 1];
  if (key === "ArrowLeft") return inLine[inLine.indexOf(cell) - 1];
  if (key !== "ArrowDown" && key !== "ArrowUp") return undefined;
  const lines = [...line.parentElement.querySelectorAll(".line")].filter((one) => [...one.querySelectorAll(".cell")].some(seen));
  const other = lines[lines.indexOf(line) + (key === "ArrowDown" ? 1 : -1)];
  if (!other) return undefined;
  const there = [...other.querySelectorAll(".cell")];
  return there.map((one, place) => [Math.abs(place - at), one]).filter(([, one]) => seen(one)).sort((one, two) => one[0] - two[0])[0][1];
}

function legend() {
  const ramp = el("span", { class: "ramp" }, "0 ", ...Array.from({ length: 10 }, (_, level) => el("i", { class: `cell s${level}` })), " 1 of what is tolerated");
  const item = (kind, text) => el("span", {}, el("i", { class: `cell ${kind}` }), text);
  const any = (which) => page.tables.some((table) => table[which].length);
  return el("p", { class: "legend" }, ramp,
    ...(any("far") ? [item("far f1", "too far: 1 to 10 times"), item("far f2", "to 1000 times"), item("far f3", "more")] : []),
    any("small") ? item("small", "too small to judge") : null,
    page.views.some((view) => view.differing.length) ? item("s0 copies", "copies differ between ranks") : null,
    any("excused") ? item("excused", "another convention") : null);
}
