// Where the error lies inside a tensor: the largest error of each block, with the shards of the ranks outlined.

const LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const DECADES = 6;

/** The wrong slices of each dim: of the picture, or the part that has a factor which its distance hides. Null if they are not known. */
function slicesOf({ picture, hidden }) {
  return hidden && picture ? picture.shape.map((size, dim) => [dim === hidden[0] ? [hidden[1], hidden[2] - hidden[1]] : [0, size]]) : (picture?.slices ?? null);
}

/** Where in a tensor the error is. */
function placeText(view, name, row) {
  const { picture, hidden } = row;
  const { shape } = picture;
  const all = shape.reduce((one, two) => one * two, 1);
  const names = dimNames(page.names[name], shape);
  const heads = headsOf(name, shape);
  const slices = slicesOf(row);
  const said = shape.flatMap((size, dim) => {
    const found = spans(slices[dim], size);
    const head = heads?.dim === dim ? headText(heads, slices[dim]) : null;
    const count = slices[dim].reduce((sum, [, length]) => sum + length, 0);
    const text = placesText(names[dim], found, count, `of ${size}`);
    return found === null ? [] : [head ? `${head} (${text})` : text];
  });
  const place = said.join(", ");
  if (hidden) return `The factor is in ${said.length ? place : "all of it"}. No element is too far off alone; only together do they show the factor.`;
  const off = row.batch ? `${picture.wrong === 1 ? "is" : "are"} not equal` : `${picture.wrong === 1 ? "is" : "are"} too far off`;
  const everywhere = picture.wrong === all ? "" : ", in every part of the tensor";
  return `${picture.wrong.toLocaleString("en")} of ${all.toLocaleString("en")} elements ${off}${said.length ? `: ${place}, counted from 0` : everywhere}.`;
}

/** On which ranks a tensor is wrong, as far as that is known; "" if it is not. */
function ranksText(view, step, name, row) {
  const odd = oddOf(view, step, page.names[name]);
  const far = row.far ? farText(view, step, name, row) : "";
  if (!odd.size) return far;
  const others = [...odd.keys()];
  const counts = [...odd.values()].filter(({ count }) => count !== null).map(({ count }) => count.toLocaleString("en"));
  const where = counts.length ? `, in ${counts.join(", ")} elements` : "";
  const also = others.length === 1 ? "has another copy" : "have other copies";
  const [copies, was] = others.length === 1 ? [`the copy of ${ranksAt(view, others)} differs`, "was"] : [`the copies of ${ranksAt(view, others)} differ`, "were"];
  if (row.far) return `${[far, copies].filter(Boolean).join("; ")}${where.slice(1)}, and ${was} not compared with the reference`;
  const same = judgedOn(view, odd, heldOf(view, name).filter(({ ranks }) => ranks.some((rank) => odd.has(rank))));
  if (!isRightCopy(view, step, page.names[name])) return `${ranksAt(view, others)} ${also} than ${listed(same)}${where}; no copy is known to be right`;
  return `${ranksAt(view, others)} alone: ${others.length === 1 ? "it has another copy" : "they have other copies"} than ${listed(same)}${where}, where it is right`;
}

/** The ranks that hold what was judged: those whose copies are not others. */
function judgedOn(view, odd, held) {
  const ranks = held.length ? held.flatMap((one) => one.ranks) : [...page.views[view].ranks.keys()];
  return ranks.filter((rank) => !odd.has(rank)).sort((one, two) => one - two);
}

function farText(view, step, name, row) {
  const held = heldOf(view, name, row.picture);
  const slices = slicesOf(row);
  if (row.ranks.length && !(held.length > 1 && slices)) return alikeText(view, step, row);
  const all = page.views[view].ranks.length;
  const odd = oddOf(view, step, page.names[name]);
  if (held.length === 1) {
    const { ranks } = held[0];
    if (odd.size) return `wrong on ${listed(judgedOn(view, odd, held))}${sinceText(view, step)}`;
    if (all === 1) return "";
    return ranks.length === all ? "all ranks: each has the same wrong copy" : ranks.length === 1 ? `${listed(ranks)}, which alone has it` : `${listed(ranks)}: each has the same wrong copy, and no other rank has one`;
  }
  if (!held.length || !slices) return "";
  const hit = holders(held, slices, row);
  if (row.hidden) return hit.length ? `${shardsOf(view, hit)} alone` : "all ranks: the factor is in each shard";
  const [most] = held.map((one) => [squareIn(row.picture, one.boxes) ?? 0, one]).sort((one, two) => two[0] - one[0]);
  const square = most[0] >= MOSTLY ? `${percent(most[0])} of the squared error` : "";
  if (!hit.length && odd.size) return `wrong on ${listed(judgedOn(view, odd, held))}${sinceText(view, step)}`;
  if (!hit.length) return `all ranks: each has wrong elements in its shard${square ? `; ${square} is in ${shardsOf(view, [most[1]])}` : ""}`;
  return `${shardsOf(view, hit)} alone${!square ? "" : hit.length === 1 && hit[0] === most[1] ? `, with ${square}` : `; ${square} is in ${shardsOf(view, [most[1]])}`}`;
}

const isFar = ([, share]) => share === null || share > 1;

/** Of a tensor that each rank has for its own samples: where it is wrong. */
function alikeText(view, step, row) {
  const whose = (ranks) => (row.where.includes("DP rank") ? `DP ${listed(ranks)}` : listed(ranks));
  const ranksOf = (shares) => shares.map(([rank]) => Number(rank));
  const [far, right] = [row.ranks.filter(isFar), row.ranks.filter((one) => !isFar(one))];
  if (!right.length) return far.length === 1 ? `${whose(ranksOf(far))}, the only one that was judged` : `wrong on ${whose(ranksOf(far))}${far.length < page.views[view].ranks.length && !row.where.includes("DP rank") ? "; the other ranks have the same micro batches, and are judged from the batch alone" : ""}`;
  return `${whose(ranksOf(far))} alone; on ${whose(ranksOf(right))} it is near enough${sinceText(view, step)}`;
}

/** Where the weights of the ranks were not the same before a step, an error may be that of the reference's copy. */
function sinceText(view, step) {
  const before = page.views[view].differing.find(([at, name]) => at < step && /^(update|parameter)\//.test(name));
  return before ? `; but weights of the ranks differ since step ${before[0]}, and the reference has the copy that was judged there` : "";
}

const MOSTLY = 0.9; // of the squared error, in one shard

/** "ranks 1, 3 (tp 1)": with the coordinates that all of them have. */
function ranksAt(view, ranks, text = listed(ranks)) {
  const places = ranks.map((rank) => page.views[view].ranks[rank]);
  const same = Object.keys(places[0]).filter((axis) => axis !== "rank" && places.every((place) => place[axis] === places[0][axis]));
  return text + (same.length ? ` (${same.map((axis) => `${axis} ${places[0][axis]}`).join(", ")})` : "");
}

/** "rank 1's shard (dp 0, tp 1)" */
function shardsOf(view, held) {
  const ranks = held.flatMap((one) => one.ranks).sort((one, two) => one - two);
  return ranksAt(view, ranks, ranks.length === 1 ? `rank ${ranks[0]}'s shard` : `the ${plural("shard", held.length)} of ${listed(ranks)}`);
}

function percent(share) {
  const shown = 100 * share;
  return shown >= 99.95 ? "100 %" : shown < 0.05 ? "0 %" : `${shown.toPrecision(shown < 1 ? 1 : shown < 99 ? 2 : 3)} %`;
}

/** The share of the squared error that is in boxes of a tensor, a block that is cut counting by its part in them; null if it is not known. */
function squareIn(picture, boxes) {
  if (!picture.squares) return null;
  const { shape } = picture;
  const [high, wide, parts] = picture.squares;
  const [rows, columns] = [shape.slice(0, -1).reduce((one, two) => one * two, 1), shape.at(-1)];
  const across = Math.ceil(columns / wide);
  const found = boxes.map(([start, size]) => rectangles(shape, start, size));
  if (found.some((one) => !one.length)) return null;
  // [block, its part] for the blocks of `block` indices that `count` of them, from `first` on, lie in
  const along = (first, count, block, length) => Array.from({ length: Math.floor((first + count - 1) / block) - Math.floor(first / block) + 1 }, (_, more) => {
    const place = Math.floor(first / block) + more;
    const [begin, end] = [place * block, Math.min(length, (place + 1) * block)];
    return [place, (Math.min(end, first + count) - Math.max(begin, first)) / (end - begin)];
  });
  let sum = 0;
  for (const [row, column, tall, broad] of found.flat().filter(([, , tall, broad]) => tall && broad)) {
    for (const [down, part] of along(row, tall, high, rows)) {
      for (const [at, share] of along(column, broad, wide, columns)) sum += part * share * parts[down * across + at];
    }
  }
  return sum / parts.reduce((one, two) => one + two, 0);
}

/** Those parts that are wrong; none if all are. */
function holders(held, slices, row) {
  const hit = held.filter(({ boxes }) => isWrong(boxes, slices, row));
  return hit.length < held.length ? hit : [];
}

const LEVEL = 10 ** (DECADES / 61); // from one level of a picture to the next

/** Whether boxes have wrong slices of each dim, and a block with an element that is wrong. */
function isWrong(boxes, slices, { picture, hidden }) {
  const meets = ([start, length], dim) => ([from, size]) => from[dim] < start + length && start < from[dim] + size[dim];
  const hit = boxes.filter((box) => slices.every((runs, dim) => runs.some((run) => meets(run, dim)(box))));
  const largest = hit.length && !hidden ? largestIn(picture, hit) : null;
  return hit.length > 0 && (largest === null || largest[0] === null || largest[0] * LEVEL > picture.beyond);
}

/** [the largest error in boxes of a tensor, null if not finite; whether no block reaches out of them]; null where the boxes are in too many pieces. */
function largestIn(picture, boxes) {
  const { shape, blocks } = picture;
  const columns = shape.at(-1);
  const rows = shape.slice(0, -1).reduce((one, two) => one * two, 1);
  const across = Math.ceil(columns / blocks[1]);
  const found = boxes.map(([start, size]) => rectangles(shape, start, size));
  if (found.some((one) => !one.length)) return null;
  let [largest, whole] = [0, true];
  const along = (first, count, block, length) => {
    whole &&= first % block === 0 && ((first + count) % block === 0 || first + count === length);
    return [Math.floor(first / block), Math.floor((first + count - 1) / block)];
  };
  for (const [row, column, high, wide] of found.flat()) {
    if (!high || !wide) continue;
    const [top, bottom] = along(row, high, blocks[0], rows);
    const [left, right] = along(column, wide, blocks[1], columns);
    for (let down = top; down <= bottom; down += 1) {
      for (let at = left; at <= right; at += 1) {
        const value = valueOf(picture, picture.cells[down * across + at]);
        largest = value === null || largest === null ? null : Math.max(largest, value);
      }
    }
  }
  return [largest, whole];
}

/** The error that a cell of a picture stands for; null if it is not finite. */
function valueOf(picture, cell) {
  return cell === "." ? 0 : cell === "!" ? null : picture.largest * 10 ** (DECADES * (LEVELS.indexOf(cell) / 61 - 1));
}

/** The box of a shard as rectangles [row, column, rows, columns] of the tensor with all dims but the last laid out as rows. */
function rectangles(shape, start, size) {
  const last = shape.length - 1;
  const columns = [start[last], size[last]];
  if (last === 0) return [[0, columns[0], 1, columns[1]]];
  let cut = last - 1;
  while (cut > 0 && size[cut] === shape[cut]) cut -= 1;
  const inner = shape.slice(cut + 1, last).reduce((one, two) => one * two, 1);
  const outer = size.slice(0, cut).reduce((one, two) => one * two, 1);
  if (outer > 32) return [];
  return Array.from({ length: outer }, (_, number) => {
    let row = 0;
    let left = number;
    for (let dim = cut - 1, stride = inner * shape[cut]; dim >= 0; stride *= shape[dim], dim -= 1) {
      row += (start[dim] + (left % size[dim])) * stride;
      left = Math.floor(left / size[dim]);
    }
    return [row + start[cut] * inner, columns[0], size[cut] * inner, columns[1]];
  });
}

function drawPicture({ view, step }, name, row) {
  const { picture, batch: counted } = row;
  const { shape } = picture;
  const columns = shape.at(-1) ?? 1;
  const rows = shape.slice(0, -1).reduce((one, two) => one * two, 1);
  const across = Math.ceil(columns / picture.blocks[1]);
  const down = Math.ceil(rows / picture.blocks[0]);
  const width = Math.max(1, Math.floor(384 / across));
  const height = rows === 1 ? 28 : Math.max(1, Math.min(Math.floor(384 / down), width * 2));
  const canvas = el("canvas", { class: "picture", width: width * across, height: height * down, tabindex: 0, role: "img" });
  const at = el("p", { class: "at", "aria-live": "polite" }, "Arrow keys or the pointer read off a block.");
  const heads = headsOf(name, shape);
  const names = dimNames(page.names[name], shape);
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const ramp = [0, 1, 2, 3, 4].map((stop) => style.getPropertyValue(`--p${stop}`).trim());
    const context = canvas.getContext("2d");
    context.fillStyle = style.getPropertyValue("--raised");
    context.fillRect(0, 0, canvas.width, canvas.height);
    [...picture.cells].forEach((cell, place) => {
      if (cell === ".") return;
      context.fillStyle = cell === "!" ? style.getPropertyValue("--bad") : mix(ramp, LEVELS.indexOf(cell) / 61);
      context.fillRect((place % across) * width, Math.floor(place / across) * height, width, height);
    });
    divide(context, style);
    outline(context, style);
  };
  // The borders of heads
  const divide = (context, style) => {
    const step = heads && (heads.size * (heads.dim === shape.length - 1 ? canvas.width : canvas.height)) / shape[heads.dim];
    if (!heads || step < 6) return;
    context.strokeStyle = style.getPropertyValue("--quiet");
    context.lineWidth = 1;
    context.setLineDash([2, 3]);
    for (let head = 1; head < heads.count; head += 1) {
      const at = Math.round(head * step) + 0.5;
      context.beginPath();
      if (heads.dim === shape.length - 1) [context.moveTo(at, 0), context.lineTo(at, canvas.height)];
      else [context.moveTo(0, at), context.lineTo(canvas.width, at)];
      context.stroke();
    }
    context.setLineDash([]);
  };
  const outline = (context, style) => {
    const slices = row.far ? slicesOf(row) : null;
    const found = heldOf(view, name, picture).map((held) => [slices !== null && isWrong(held.boxes, slices, row), held]);
    // What is wrong is drawn last, over the borders that it shares.
    const odd = oddOf(view, step, page.names[name]); // other copies were not compared with the reference
    const boxes = found.sort(([one], [two]) => one - two).flatMap(([wrong, held]) => held.boxes.map((box) => [wrong, judgedOn(view, odd, [held]), ...box]));
    if (boxes.length < 2) return;
    const [x, y] = [canvas.width / columns, canvas.height / rows];
    context.font = "600 12px system-ui, sans-serif";
    for (const [wrong, ranks, start, size] of boxes) {
      if (size.length !== shape.length) continue;
      rectangles(shape, start, size).forEach(([row, column, high, wide], number) => {
        context.strokeStyle = style.getPropertyValue(wrong ? "--bad" : "--quiet");
        context.lineWidth = wrong ? 3 : 1;
        context.strokeRect(column * x + 1, row * y + 1, wide * x - 2, high * y - 2);
        if (number || !ranks.length) return;
        const text = ` ${listed(ranks)}${wrong ? " ✕" : ""} `;
        const length = context.measureText(text).width;
        if (length > wide * x - 4 || high * y < 18) return;
        context.fillStyle = style.getPropertyValue("--ground");
        context.fillRect(column * x + 3, row * y + 3, length, 16);
        context.fillStyle = style.getPropertyValue("--text");
        context.fillText(text, column * x + 3, row * y + 15);
      });
    }
  };
  const place = [0, 0];
  const read = (row, column) => {
    [place[0], place[1]] = [Math.max(0, Math.min(down - 1, row)), Math.max(0, Math.min(across - 1, column))];
    const value = valueOf(picture, picture.cells[place[0] * across + place[1]]);
    const side = heads?.dim === shape.length - 1 ? 1 : 0;
    const head = heads && headText(heads, [[place[side] * picture.blocks[side], Math.min(picture.blocks[side], shape[heads.dim] - place[side] * picture.blocks[side])]]);
    at.textContent = `${head ? `${head}, ` : ""}${rangeText(shape, names, place[0] * picture.blocks[0], picture.blocks[0], rows)}${rangeOf(names.at(-1), place[1] * picture.blocks[1], Math.min(columns, (place[1] + 1) * picture.blocks[1]) - 1)}: ${counted ? (value === 0 ? "equal" : "not equal") : `largest error ${value === 0 ? "0" : value === null ? "not finite" : `about ${value.toExponential(1)}`}`}`;
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    read(Math.floor(((event.clientY - box.top) / box.height) * down), Math.floor(((event.clientX - box.left) / box.width) * across));
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    read(place[0] + moves[event.key][0], place[1] + moves[event.key][1]);
  });
  canvas.setAttribute("aria-label", `${counted ? "What is not equal" : "The largest error"} in each of ${down} by ${across} blocks of ${page.names[name]}`);
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  const lowest = picture.largest * 10 ** -DECADES;
  const scale = el("p", { class: "scale" }, "up to ", sci(lowest), el("i"), sci(picture.largest), " |run − reference|, on a logarithmic scale");
  const laid = shape.length > 2 ? el("p", { class: "at" }, `${shape.slice(0, -1).join(" × ")} rows of ${columns}: ${names.slice(0, -1).join(", then ")}, one after the other.`) : null;
  const divided = heads ? el("p", { class: "at" }, `${heads.parts.length > 1 ? `${heads.parts.join(", ")}: ` : ""}${heads.count} ${plural(heads.word, heads.count)} of ${heads.size} ${plural(names[heads.dim], 2)}, divided by dotted lines.`) : null;
  return el("div", {}, at, canvas, counted ? null : scale, divided, laid);
}

/** The rows of a block, in the indices of the leading dims. */
function rangeOf(what, first, last) {
  return first === last ? `${what} ${first}` : `${what}s ${first} to ${last}`;
}

function rangeText(shape, names, first, count, rows) {
  if (shape.length < 2) return "";
  const last = Math.min(rows, first + count) - 1;
  if (shape.length === 2) return `${rangeOf(names[0], first, last)}, `;
  const index = (row) => {
    const found = [];
    for (let dim = shape.length - 2; dim >= 0; dim -= 1) {
      found.unshift(row % shape[dim]);
      row = Math.floor(row / shape[dim]);
    }
    return found;
  };
  const [one, two] = [index(first), index(last)];
  const same = one.findIndex((place, dim) => place !== two[dim]); // dims before it have one index
  const alike = same < 0 ? one.length : same;
  const before = one.slice(0, alike).map((place, dim) => `${names[dim]} ${place}`);
  const ranges = alike === one.length - 1 ? [rangeOf(names[alike], one[alike], two[alike])] : same < 0 ? [] : [`${names.slice(alike, -1).join(", ")} ${one.slice(alike).join(", ")} to ${two.slice(alike).join(", ")}`];
  return `${[...before, ...ranges].join(", ")}, `;
}

/** A colour between the stops of a ramp, "#rrggbb" each. */
function mix(ramp, share) {
  const at = Math.min(ramp.length - 2, Math.floor(share * (ramp.length - 1)));
  const part = share * (ramp.length - 1) - at;
  const [one, two] = [ramp[at], ramp[at + 1]].map((color) => [1, 3, 5].map((from) => parseInt(color.slice(from, from + 2), 16)));
  return `rgb(${one.map((value, place) => Math.round(value + part * (two[place] - value))).join(",")})`;
}
