// The payload, and what all other files ask of it. Nothing of it becomes markup: `el` sets text alone.

const page = payloadIn(document);

/** The payload of a document, with the names of tensors in the order of their numbers; null if it has none. */
function payloadIn(from) {
  const found = JSON.parse(from.getElementById("payload")?.textContent ?? "null");
  if (!found?.names || !Array.isArray(found.tables)) return null;
  const all = (runs) => (runs ?? []).flatMap(([first, count]) => Array.from({ length: count }, (_, more) => first + more));
  const tables = found.tables.map((table) => ({ ...table, names: all(table.names), far: all(table.far), small: all(table.small), excused: all(table.excused) }));
  return { ...found, names: Object.keys(found.names), tables };
}

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
  average: "Averages of weights", numbers: "Losses and norms",
};
const WORDS = {
  batch: "batch's", forward: "output of", backward: "gradient at the output of", gradient: "gradient of",
  exp_avg: "first moment of", exp_avg_sq: "second moment of", parameter: "updated", update: "update of", average: "average of",
};
const OF_WEIGHTS = new Set(Object.keys(KINDS).filter((kind) => !["batch", "forward", "backward", "numbers"].includes(kind)));

function kindOf(name) {
  const cut = name.indexOf("/");
  return cut < 0 ? "numbers" : name.slice(0, cut);
}

function pathOf(name) {
  return name.slice(name.indexOf("/") + 1);
}

/** "the gradient at the input of model.layers.0.mlp": what a tensor is, in words. */
function inWords(name) {
  const kind = kindOf(name);
  if (kind === "numbers") return `the ${name}`;
  const [, module, entering] = pathOf(name).match(/^(.*?)(\.input(?:\.\d+)?)?$/s);
  const word = WORDS[kind] ?? `${kind} of`;
  return `the ${entering ? `${word.replace("output", "input")} ${module}` : `${word} ${pathOf(name)}`}`;
}

/** An error for people; null is one that is not finite. */
function sci(value, digits = 2) {
  if (value === null || value === undefined) return "not finite";
  return value === 0 ? "0" : value.toExponential(digits);
}

function shareText(share) {
  if (!Number.isFinite(share)) return "∞";
  if (share < 1000) return String(Number(share.toPrecision(3)));
  return share < 1e6 ? Number(share.toPrecision(2)).toLocaleString("en") : share.toExponential(1);
}

/** The batch, whose numbers are equal or not. */
function isBatch(name) {
  return kindOf(page.names[name]) === "batch";
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
      const batch = isBatch(name);
      const of = (column) => table.columns[column][place];
      return {
        error: of("error"), tolerated: of("tolerated"), largest: of("largest"), toleratedLargest: of("tolerated_largest"),
        share: of("share") ?? Infinity, said: table.said[place]?.[0] ?? "", hidden: table.said[place]?.[1] ?? null,
        far: kinds.far.has(place), small: kinds.small.has(place), excused: kinds.excused.has(place),
        batch, where: table.where[place] ?? "", ranks: Object.entries(table.ranks[place] ?? {}), picture: table.pictures[place] ?? null,
      };
    },
  };
});

const [BY_ITSELF, FROM_BATCH] = Object.keys(page.ways);
const wayOf = (alone) => (alone ? BY_ITSELF : FROM_BATCH);

/** What a view is called: its label, and its name where several have the label. */
function labelOf(number) {
  const { name, label } = page.views[number];
  return page.views.filter((view) => view.label === label).length > 1 ? `${name}: ${label}` : label;
}

/** `alone`: what each module of a run gives by itself; else what it gives from the batch. */
const tableOf = (view, step, alone = false) => tables.find((table) => table.view === view && table.step === step && table.alone === alone) ?? null;
const stepsOf = (view) => tables.filter((table) => table.view === view).map((table) => table.step);
const rowOf = (view, step, name, alone = false) => tableOf(view, step, alone)?.row(name) ?? null;

/** Whether a module by itself shows that a tensor is wrong. Then it is wrong by itself, whatever is wrong before it. */
function isAlone(view, step, tensor) {
  return Boolean(rowOf(view, step, tensor, true)?.far);
}

/** In which way the tensors of a table were computed. */
function wayOfTable(table) {
  return page.kind === "recording" ? page.views[table.view].name : wayOf(table.alone);
}

const numberOf = new Map(page.names.map((name, number) => [name, number]));

/** The numbers of the tensors of a table of which ranks have other copies. */
function copiesOf(table) {
  const found = table.alone ? [] : page.views[table.view].differing.filter(([step]) => step === table.step);
  return new Set(found.map(([, name]) => numberOf.get(name)).filter(table.has));
}

const INPUTS = new Set(["batch", "forward", "backward"]); // of modules
const FOLLOW = new Set(["forward", "backward", "gradient", "numbers"]); // from what is wrong before them, unless they are wrong by themselves

/** The tables of a run: a recording's views are of one. */
function tablesOfRun(view) {
  return tables.filter((table) => page.kind === "recording" || table.view === view);
}

/** The first tensor of a step that modules compute from, of which ranks have other copies: what comes after it follows from these. */
function firstUnlike(view, step) {
  const unlike = page.views[view].differing.filter(([at, name]) => at === step && INPUTS.has(kindOf(name)));
  return Math.min(...unlike.map(([, name]) => numberOf.get(name)), Infinity);
}

/** [name, what is wrong, "" for a copy] of the tensors of a run in a step that are wrong by themselves, in order; where none is known to be, of the first
 * that is too far. And of those of which ranks have other copies: what is made of them differs, too, so only the first output, or all weights of its kind. */
function wrongByThemselves(view, step) {
  const last = firstUnlike(view, step);
  const all = tablesOfRun(view).filter((table) => table.step === step).flatMap((table) => table.far.map((place) => [table, table.names[place]]));
  const far = all.filter(([, name]) => name <= last);
  const itself = far.filter(([table, name]) => wayOfTable(table) === BY_ITSELF || !FOLLOW.has(kindOf(page.names[name])));
  const found = (itself.length ? itself : far.slice(0, 1)).sort(([, one], [, two]) => one - two).map(([table, name]) => [page.names[name], table.row(name).said || errorText(table.row(name))]);
  const copies = page.views[view].differing.filter(([at]) => at === step).map(([, name]) => name);
  const first = copies.filter((name, place) => kindOf(name) === kindOf(copies[0]) && (place === 0 || OF_WEIGHTS.has(kindOf(name))));
  const further = first.filter((name) => !found.some(([one]) => one === name));
  return [...found, ...further.map((name) => [name, ""])];
}

/** The row that shows that a tensor is wrong, with its picture: by itself, or else from the batch. */
function wrongRowOf(view, step, name) {
  return withPicture(view, step, name, isAlone(view, step, name));
}

/** A row; where a tensor is wrong in both ways, one of them has the picture. */
function withPicture(view, step, name, alone) {
  const row = rowOf(view, step, name, alone);
  const free = alone && row && !row.picture ? rowOf(view, step, name) : null;
  return free?.far && free.picture ? { ...row, picture: free.picture, borrowed: true } : row;
}

/** The tensor of a view that came nearest to what is tolerated, or is farthest beyond: [the way it was computed, [step, name, share]]. */
function worstOf(view) {
  const size = ([, [, , share]]) => share ?? Infinity;
  return Object.entries(view.counts).flatMap(([way, { worst }]) => (worst ? [[way, worst]] : [])).sort((one, two) => size(two) - size(one))[0] ?? null;
}

/** The state of a row in words: colour is never the only sign. Of copies that differ, one was judged. */
function stateText(row, copies = "") {
  if (copies && !row.far) return `${copies}; the copy that was judged: ${stateText(row)}`;
  if (row.excused) return "another convention";
  if (row.small) return "too small to judge";
  if (row.batch) return row.far ? "not what was to be fed" : "as it was to be fed";
  if (row.hidden) return `off by a factor: ${shareText(row.share)} times what one may be off by`;
  return row.far ? `too far: ${shareText(row.share)} times what is tolerated` : `${shareText(row.share)} of what is tolerated`;
}

const RUNS = 6; // of wrong slices that a picture has; one behind them holds all others

/** [[start, length], ...] as "512 to 1023, 2000"; null if all of `size` are meant. */
function spans(runs, size) {
  if (runs.length === 1 && runs[0][0] === 0 && runs[0][1] === size) return null;
  const text = ([start, length]) => (length === 1 ? `${start}` : `${start} to ${start + length - 1}`);
  return runs.slice(0, RUNS).map(text).join(", ") + (runs.length > RUNS ? ` and some of ${text(runs[RUNS])}` : "");
}

/** What the dims of a tensor are called. */
function dimNames(name, shape) {
  const kind = kindOf(name);
  if (kind === "batch" && shape.length === 2) return ["sample", "position"];
  if (shape.length === 1) return ["element"];
  if (shape.length === 2) return ["row", "column"];
  const ofTokens = page.kind === "verification" || page.tokens.every((size, dim) => size === shape[dim]) && page.tokens.length;
  if (ofTokens && shape.length === 3 && !OF_WEIGHTS.has(kind)) return ["sample", "position", "column"];
  return shape.map((_, dim) => (dim === shape.length - 1 ? "column" : `slice along dim ${dim}`));
}

/** "rows 32 to 63 of 64", "slices 0 to 3 of 8 along dim 0": what is called `word`; `of` may be left out. */
function placesText(word, found, count, of = "") {
  const [first, ...rest] = word.split(" ");
  return [plural(first, count), found, of, ...rest].filter(Boolean).join(" ");
}

/** "rows 512 to 1023, columns 0 to 63": a box inside a shape; "all of it" if it is the whole. */
function boxText(name, shape, start, size) {
  const names = dimNames(name, shape);
  const said = shape.flatMap((length, dim) => {
    const found = spans([[start[dim], size[dim]]], length);
    return found === null ? [] : [placesText(names[dim], found, size[dim])];
  });
  return said.join(", ") || "all of it";
}

function plural(word, count) {
  return count === 1 ? word : `${word}s`;
}

/** What ranks hold of a tensor: [{ranks, boxes: [[start, shape], ...]}, ...], a rank in one of them. Of positions a rank may have several boxes.
 * Nothing for a picture of one micro batch of it. */
function heldOf(view, name, picture = null) {
  const number = page.views[view].placed[name];
  if (number === undefined) return [];
  const placed = page.views[view].placements[number];
  if (picture && page.kind === "verification" && String(placed[0]) !== String(picture.shape)) return [];
  const found = new Map();
  (page.kind === "verification" ? boxesOf(view, name, ...placed) : placed).forEach((boxes, rank) => {
    if (!boxes.length) return;
    const key = JSON.stringify(boxes);
    if (!found.has(key)) found.set(key, { ranks: [], boxes });
    found.get(key).ranks.push(rank);
  });
  return [...found.values()];
}

/** The boxes of each rank of a mesh, of a tensor of which axes cut dims (`sharded`). */
function boxesOf(view, name, shape, sharded) {
  const { ranks, contract } = page.views[view];
  const sizeOf = (axis) => Math.max(...ranks.map((place) => place[axis])) + 1;
  const computed = ["batch", "forward", "backward"].includes(kindOf(page.names[name]));
  const layer = pathOf(page.names[name]).match(/(?:^|\.)layers\.(\d+)(?:\.|$)/);
  return ranks.map((here) => {
    // A stage of a pipeline has its own layers alone.
    if (layer && here.pp !== undefined && !contract.cuts.pp.units[here.pp].flat().includes(Number(layer[1]))) return [];
    const parts = shape.map((size) => [[0, size]]);
    // A rank along cp has pieces of each sequence, of which tp may cut positions. Ranks along dp and cp hold shards of weights together, of what tp has left.
    if (computed && sharded.cp !== undefined) parts[sharded.cp] = contract.cuts.cp[here.cp];
    for (const axes of computed ? [["dp"], ["tp"]] : [["tp"], ["dp", "cp"]]) {
      const cutting = axes.filter((axis) => sharded[axis] !== undefined);
      if (!cutting.length) continue;
      const dim = sharded[cutting[0]];
      const [place, of] = cutting.reduce(([at, all], axis) => [at * sizeOf(axis) + here[axis], all * sizeOf(axis)], [0, 1]);
      parts[dim] = shareOf(parts[dim], place, of);
    }
    return parts.reduce((boxes, along) => boxes.flatMap(([start, size]) => along.map(([first, length]) => [[...start, first], [...size, length]])), shape.length ? [[[], []]] : []);
  });
}

/** A rank's share of the places in runs [start, length], as torch.chunk cuts them: equal shares, the last ones shorter. */
function shareOf(runs, place, size) {
  const total = runs.reduce((sum, [, length]) => sum + length, 0);
  const each = Math.ceil(total / size);
  let [skip, left] = [Math.min(place * each, total), Math.min(each, Math.max(0, total - place * each))];
  return runs.flatMap(([start, length]) => {
    const [from, to] = [Math.min(skip, length), Math.min(length, skip + left)];
    [skip, left] = [skip - from, left - (to - from)];
    return to > from ? [[start + from, to - from]] : [];
  });
}

/** The heads of an attention in a tensor: the dim that they are in, how many, and the elements of one; null if it has none or they are not known.
 * GPT-2 has queries, keys and values beside each other, each with all heads: three `parts`. Its weights have inputs as rows. */
function headsOf(name, shape) {
  const match = page.names[name].match(/^\w+\/(?:(.*)\.)?(?:([qkv])_proj(\.weight|\.bias)?|o_proj\.(?:weight|input)|(c_attn)(?:\.weight|\.bias)?|(?<=attn\.)(c_proj)(\.weight|\.input))$/);
  const told = match ? (page.heads[match[1] ?? ""] ?? page.heads[""]) : null;
  if (!told) return null;
  const [heads, keys, own, width] = told;
  const grouped = (match[2] === "k" || match[2] === "v") && Boolean(keys);
  const parts = match[4] ? ["queries", "keys", "values"] : [""];
  const [dim, each, size] = [match[3] || match[6] === ".weight" ? 0 : shape.length - 1, grouped ? keys : heads, own || width / heads];
  const count = each * parts.length;
  const known = [count, size].every(Number.isInteger) && shape[dim] === count * size;
  return known ? { dim, count, size, parts, word: grouped && keys !== heads ? "KV head" : "head" } : null;
}

/** "head 2 of 4": those that runs of slices are in; null if they are in all of them. */
function headText(heads, runs) {
  const hit = new Set(runs.flatMap(([start, length]) => Array.from({ length: Math.floor((start + length - 1) / heads.size) - Math.floor(start / heads.size) + 1 }, (_, more) => Math.floor(start / heads.size) + more)));
  if (hit.size === heads.count || !hit.size) return null;
  const each = heads.count / heads.parts.length;
  return heads.parts.flatMap((part, place) => {
    const here = [...hit].map((head) => head - place * each).filter((head) => head >= 0 && head < each).sort((one, two) => one - two);
    if (!here.length) return [];
    const joined = [];
    for (const head of here) {
      if (joined.length && joined.at(-1)[0] + joined.at(-1)[1] === head) joined.at(-1)[1] += 1;
      else joined.push([head, 1]);
    }
    const found = spans(joined, each);
    const said = found === null ? `all ${each} ${plural(heads.word, each)}` : `${plural(heads.word, here.length)} ${found} of ${each}`;
    return [part ? `${said} of the ${part}` : said];
  }).join("; ");
}

function listed(numbers) {
  return `${numbers.length === 1 ? "rank" : "ranks"} ${numbers.join(", ")}`;
}
