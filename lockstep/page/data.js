// The payload, and what all other files ask of it. Nothing of it becomes markup: `el` sets text alone.

const page = JSON.parse(document.getElementById("payload").textContent);

/** An element with attributes and children; texts among them stay texts. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const KINDS = {
  batch: "Batch", forward: "Outputs", backward: "Gradients at outputs", gradient: "Gradients of weights",
  exp_avg: "First moments", exp_avg_sq: "Second moments", parameter: "Updated weights", update: "Updates",
  average: "Averages of weights", numbers: "Numbers",
};
const OF_WEIGHTS = new Set(Object.keys(KINDS).filter((kind) => !["batch", "forward", "backward", "numbers"].includes(kind)));

function kindOf(name) {
  const cut = name.indexOf("/");
  return cut < 0 ? "numbers" : name.slice(0, cut);
}

function pathOf(name) {
  return name.slice(name.indexOf("/") + 1);
}

/** An error for people; null is one that is not finite. */
function sci(value) {
  if (value === null || value === undefined) return "not finite";
  return value === 0 ? "0" : value.toExponential(2);
}

function shareText(share) {
  if (!Number.isFinite(share)) return "∞";
  return share < 1000 ? String(Number(share.toPrecision(3))) : share.toExponential(1);
}

function times(error, tolerated) {
  if (error === 0) return 0;
  return error === null || tolerated === null || tolerated === 0 ? Infinity : error / tolerated;
}

/** The tables with an index from names to places, and what is known of each place. */
const tables = page.tables.map((table) => {
  const places = new Map(table.names.map((name, place) => [name, place]));
  const kinds = { far: new Set(table.far), small: new Set(table.small), excused: new Set(table.excused) };
  return {
    ...table,
    has: (name) => places.has(name),
    row(name) {
      const place = places.get(name);
      if (place === undefined) return null;
      const of = (column) => table[column][place];
      return {
        error: of("error"), tolerated: of("tolerated"), largest: of("largest"), toleratedLargest: of("tolerated_largest"), norm: of("norm"),
        share: Math.max(times(of("error"), of("tolerated")), times(of("largest"), of("tolerated_largest")), table.factors[place]?.[1] ?? 0),
        factor: table.factors[place]?.[0] ?? "",
        far: kinds.far.has(place), small: kinds.small.has(place), excused: kinds.excused.has(place),
        where: table.where[place] ?? "", picture: table.pictures[place] ?? null,
      };
    },
  };
});

const tableOf = (view, step) => tables.find((table) => table.view === view && table.step === step) ?? null;
const stepsOf = (view) => tables.filter((table) => table.view === view).map((table) => table.step);

/** The state of a row in words: colour is never the only sign. */
function stateText(row) {
  if (row.excused) return "another convention";
  if (row.small) return "too small to judge";
  return row.far ? `too far: ${shareText(row.share)} times what is tolerated` : `${shareText(row.share)} of what is tolerated`;
}

/** [[start, length], ...] as "512 to 1023, 2000"; null if all of `size` are meant. */
function spans(runs, size) {
  if (runs.length === 1 && runs[0][0] === 0 && runs[0][1] === size) return null;
  const shown = runs.slice(0, 6).map(([start, length]) => (length === 1 ? `${start}` : `${start} to ${start + length - 1}`));
  return shown.join(", ") + (runs.length > 6 ? ", ..." : "");
}

/** What the dims of a tensor are called. */
function dimNames(name, shape) {
  const kind = kindOf(name);
  if (shape.length === 1) return ["element"];
  if (shape.length === 2) return ["row", "column"];
  if (page.kind === "verification" && shape.length === 3 && !OF_WEIGHTS.has(kind)) return ["sample", "position", "column"];
  return shape.map((_, dim) => (dim === shape.length - 1 ? "column" : `index of dim ${dim}`));
}

/** "rows 512 to 1023, columns 0 to 63": a box inside a shape; "all of it" if it is the whole. */
function boxText(name, shape, start, size) {
  const names = dimNames(name, shape);
  const said = shape.flatMap((length, dim) => {
    const found = spans([[start[dim], size[dim]]], length);
    return found === null ? [] : [`${plural(names[dim], size[dim])} ${found}`];
  });
  return said.join(", ") || "all of it";
}

function plural(word, count) {
  if (count === 1) return word;
  return word.startsWith("index") ? word.replace("index", "indices") : `${word}s`;
}

function boxesOf(view, name) {
  const number = page.views[view].placed[name];
  return number === undefined ? [] : page.views[view].placements[number];
}

function listed(numbers) {
  return `${numbers.length === 1 ? "rank" : "ranks"} ${numbers.join(", ")}`;
}
