// Curves of losses and gradient norms, and of the differences from the first run. Zero is drawn as zero.

const STROKES = [["#1d4f7c", "#8fbce8"], ["#a83a08", "#ff9256"], ["#6b5b00", "#d6c34a"], ["#5d3a7d", "#c9a3ea"], ["#2f6b4f", "#86d0ab"], ["#555555", "#bbbbbb"]];

const MOST = 6; // curves; of more runs, the first and the chosen one are drawn

/** The losses that are shown beside a view: of all runs, or of the first one and the view's. */
function lossesOf(state) {
  const { names, labels } = page.losses;
  const called = labels.map((label, place) => (labels.indexOf(label) === labels.lastIndexOf(label) ? label : `${names[place]}: ${label}`));
  const own = names.indexOf(page.views[state.view]?.name);
  const kept = names.map((_, place) => place).filter((place) => names.length <= MOST || place === 0 || place === own);
  const of = (values) => kept.flatMap((place) => (values.length ? [page.losses.steps.map((_, step) => values[place][step] ?? null)] : []));
  return { ...page.losses, labels: kept.map((place) => called[place]), loss: of(page.losses.loss), norm: of(page.losses.norm), tolerated: page.losses.tolerated.some(Boolean) ? page.losses.tolerated : [] };
}

let drawn = null; // the view whose losses are shown

function showLosses(parent, state) {
  if (page.losses === null || drawn === state.view) return;
  if (drawn !== null && page.losses.names.length <= MOST) return;
  drawn = state.view;
  const losses = lossesOf(state);
  const base = losses.labels[0];
  parent.hidden = false;
  parent.replaceChildren(el("h2", { id: "losses-title" }, "Losses"));
  if (!page.tables.length && page.losses.names.length > MOST) {
    const names = page.views.map((_, number) => el("option", { value: number, selected: number === state.view }, labelOf(number)));
    parent.append(el("p", {}, el("label", {}, "Run ", el("select", { id: "run", onchange: (event) => { state.view = Number(event.target.value); showLosses(parent, state); parent.querySelector("#run").focus(); } }, ...names))));
  }
  const table = lossTable(losses);
  if (losses.steps.length < 3) {
    parent.append(table);
    return;
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = el("div");
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const [text, line] = [style.getPropertyValue("--text").trim(), style.getPropertyValue("--line").trim()];
    const runs = (values) => values.map((run, number) => ({
      label: losses.labels[number], values: run, width: 1.6 + 1.4 * (values.length - 1 - number), dash: [[], [8, 3], [2, 3], [8, 3, 2, 3]][number % 4], stroke: STROKES[number % STROKES.length][dark.matches ? 1 : 0],
    }));
    const apart = losses.loss.map((run) => run.map((value, step) => (value === null || losses.loss[0][step] === null ? null : Math.abs(value - losses.loss[0][step]))));
    const bounds = [
      { label: "noise floor (control run)", values: losses.control, width: 1, stroke: line, fill: line },
      { label: "noise floor (derived)", values: losses.floor === null ? [] : losses.steps.map(() => losses.floor), width: 1, stroke: style.getPropertyValue("--quiet").trim(), dash: [2, 4] },
      { label: "tolerated", values: losses.tolerated, width: 2, stroke: text, dash: [6, 4] },
    ].filter(({ values }) => values.length);
    plots.replaceChildren(
      plot("Loss", losses.steps, runs(losses.loss)),
      ...(losses.labels.length > 1 ? [plot(`|loss − loss of ${base}|`, losses.steps, [...bounds, ...runs(apart).slice(1)], true)] : []),
      ...(losses.norm.length ? [plot("Gradient norm", losses.steps, runs(losses.norm))] : []));
  };
  draw();
  dark.onchange = draw;
  parent.append(el("p", { class: "quiet" }, "Drag to zoom, double-click to see all; the numbers of a step are below each plot."), stepsShown(losses.steps, plots), plots,
    el("details", {}, el("summary", {}, "All numbers as a table"), table));
}

/** Zoom without a pointer: the first and the last step that are shown. */
function stepsShown(steps, plots) {
  const [first, last] = [steps[0], steps.at(-1)];
  const zoom = () => {
    const [from, to] = inputs.map((input) => Number(input.value));
    if (from >= first && from < to && to <= last) plots.querySelectorAll(".plot").forEach((box) => box.chart.setScale("x", { min: from, max: to }));
  };
  const inputs = [first, last].map((value) => el("input", { type: "number", min: first, max: last, value, onchange: zoom }));
  return el("p", { id: "steps-shown" }, ...["Steps ", " to "].map((text, place) => el("label", {}, text, inputs[place])));
}

/** Curves over steps; `fromZero`: the axis begins at 0. */
function plot(title, steps, series, fromZero = false) {
  const box = el("div", { class: "plot", role: "img", "aria-label": `${title}, by step` });
  const style = getComputedStyle(document.documentElement);
  const [text, line] = [style.getPropertyValue("--text").trim(), style.getPropertyValue("--line").trim()];
  const exact = (_, value) => (value === null || value === undefined ? "" : value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toPrecision(7));
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  box.chart = new uPlot({
    title, width: Math.min(900, Math.max(320, document.documentElement.clientWidth - 48)), height: 240,
    scales: { x: { time: false }, y: fromZero ? { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1e-9] } : {} },
    axes: [{ ...axis, incrs: [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5, 6].map((decade) => one * 10 ** decade)).sort((one, two) => one - two) }, { ...axis, size: 76, values: (_, ticks) => ticks.map((value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(4))))) }],
    series: [{ label: "step" }, ...series.map(({ values, ...one }) => ({ ...one, value: exact }))],
  }, [steps, ...series.map(({ values }) => values)], box);
  return box;
}

function lossTable(losses) {
  const base = losses.labels[0];
  const head = ["step", ...losses.labels.map((label, number) => (number ? `${label} (difference)` : base)), ...(losses.tolerated.length ? ["tolerated"] : [])];
  const lines = losses.steps.map((step, place) => el("tr", {}, el("td", {}, String(step)), ...losses.loss.map((run, number) => {
    const value = run[place] ?? null;
    const apart = number && value !== null && losses.loss[0][place] !== null ? ` (${sci(Math.abs(value - losses.loss[0][place]))})` : "";
    return el("td", { class: "number" }, value === null ? "" : `${value.toFixed(9)}${apart}`);
  }), ...(losses.tolerated.length ? [el("td", { class: "number" }, losses.tolerated[place] ? sci(losses.tolerated[place]) : "")] : [])));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Losses by step" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((one) => el("th", { scope: "col", class: "number" }, one)))), el("tbody", {}, ...lines)));
}
