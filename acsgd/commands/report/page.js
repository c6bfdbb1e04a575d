"use strict";
// The page of `acsgd report`. Text of runs is set as textContent alone.
const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const CURVES = 10, HEIGHT = 230;
const DASHES = [[], [8, 3], [2, 3]], LEGEND = ["solid", "dashed", "dotted"];
const HIDDEN_KINDS = new Set();
let plots = [], range = null;

function add(parent, tag, text, className) {
  const child = parent.appendChild(document.createElement(tag));
  if (text !== undefined) child.textContent = text;
  if (className) child.className = className;
  return child;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => value == null ? "" : String(Number(value.toPrecision(4)));
const tick = (value) => value && Math.abs(value) < 0.01 ? Number(value.toPrecision(4)).toExponential() : short(value);
const axisOf = (run) => runs[run].axes[element("axis").value];

// The value on the present axis of a step, or of the first point after it.
function positionOf(run, step) {
  const index = runs[run].axes.step.findIndex((each) => each >= step);
  return index < 0 ? axisOf(run).at(-1) : axisOf(run)[index];
}

function isShown(event) { return !HIDDEN_KINDS.has(event.kind); }

function drawEvents(plot, chart) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color("--mark");
  ctx.globalAlpha = 0.55;
  ctx.setLineDash([4, 4]);
  for (const run of new Set(chart.curves.map((curve) => curve.run)))
    for (const event of runs[run].events.filter(isShown)) {
      const x = plot.valToPos(positionOf(run, event.step), "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
  ctx.restore();
}

// Curves of several runs have points at several steps: the table of uPlot has one row per step of any of them.
function tableOf(chart) {
  const table = uPlot.join(chart.curves.map((curve) => [axisOf(curve.run), curve.values]));
  if (chart.stacked)
    for (let curve = 2; curve < table.length; curve++)
      table[curve] = table[curve].map((value, row) => value == null ? null : value + (table[curve - 1][row] ?? 0));
  return table;
}

// Index of the dashes of a curve: evaluations are dashed, and curves of one run differ, since they may coincide.
function dashOf(curve, index, chart) {
  if (chart.stacked) return 0;
  if (chart.run === undefined) return curve.dashed ? 1 : curve.run < CURVES ? 0 : 2;
  return index % DASHES.length;
}

function seriesOf(curve, index, chart) {
  // a run has one colour in all charts that compare runs
  const number = chart.run === undefined ? curve.run : index, stroke = color(`--c${number % CURVES}`);
  return {
    label: curve.label, stroke, width: 1.8, spanGaps: true,
    dash: DASHES[dashOf(curve, index, chart)],
    fill: chart.stacked ? stroke + "66" : undefined,
    points: { show: curve.values.filter((value) => value != null).length < 40, size: 5 },
    value: (_, value, series, row) => short(chart.stacked && row != null ? curve.values[row] : value),
  };
}

function draw(parent, chart) {
  const figure = add(parent, "figure");
  add(figure, "figcaption", chart.title);
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid") } };
  const plot = new uPlot({
    width: figure.clientWidth - 18, height: HEIGHT,
    scales: { x: { time: false }, y: chart.stacked ? { range: (_, low, high) => [0, high * 1.05 || 1] } : {} },
    axes: [axis, { ...axis, size: 66, values: (_, ticks) => ticks.map(tick) }],
    series: [{ label: element("axis").value, value: (_, value) => short(value) }, ...chart.curves.map((curve, index) => seriesOf(curve, index, chart))],
    bands: chart.stacked ? chart.curves.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
    legend: { markers: { dash: (_, index) => LEGEND[dashOf(chart.curves[index - 1], index - 1, chart)] } },
    cursor: { sync: { key: "report" }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      draw: [(plot) => drawEvents(plot, chart)],
      setSelect: [(plot) => plot.select.width > 4 && zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")])],
    },
  }, tableOf(chart), figure);
  plot.over.addEventListener("dblclick", () => zoom(null));
  plots.push(plot);
}

function whole() {
  const ends = runs.flatMap((_, run) => axisOf(run).length ? [axisOf(run)[0], axisOf(run).at(-1)] : []);
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function zoom(to) {
  range = to && to[0] < to[1] ? to : null;
  const [min, max] = range ?? whole();
  element("from").value = short(min);
  element("to").value = short(max);
  for (const plot of plots) {
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    plot.setScale("x", { min, max: max > min ? max : min + 1 });
  }
}

function drawCharts() {
  plots.forEach((plot) => plot.destroy());
  plots = [];
  element("compared").replaceChildren();
  element("details").replaceChildren();
  for (const chart of charts)
    if (chart.run === undefined) draw(element("compared"), chart);
    else if (chart.run === Number(element("run").value)) draw(element("details"), chart);
  element("details-title").hidden = !element("details").children.length;
  zoom(range);
}

function describeRuns() {
  runs.forEach((run, index) => {
    const part = add(element("runs"), "div", undefined, "run"), line = add(part, "p");
    add(line, "b", run.name).style.color = `var(--c${index % CURVES})`;
    const of = run.steps == null ? "" : ` of ${run.steps}`, isPartial = run.steps != null && run.last < run.steps;
    add(line, "span", ` step ${run.last}${of}${isPartial ? ", not complete: running or stopped" : ""}, ${run.directory}`, "quiet");
    run.problems.forEach((problem) => add(part, "p", problem, "problem"));
    add(element("run"), "option", run.name).value = index;
  });
  element("run-label").hidden = runs.length < 2;
}

function listEvents() {
  const table = element("events");
  table.replaceChildren();
  const head = add(table, "tr");
  ["run", "step", "kind", "event", "time"].forEach((name) => add(head, "th", name));
  runs.forEach((run, index) => run.events.filter(isShown).forEach((event) => {
    const row = add(table, "tr");
    [run.name, event.step, event.kind, event.text, event.time].forEach((text) => add(row, "td", text));
    row.addEventListener("click", () => {
      const [low, high] = whole(), at = positionOf(index, event.step), width = (high - low) / 20 || 1;
      zoom([Math.max(low, at - width), Math.min(high, at + width)]);
    });
  }));
  if (table.children.length === 1) add(add(table, "tr"), "td", "none");
}

function listKinds() {
  for (const kind of new Set(runs.flatMap((run) => run.events.map((event) => event.kind)))) {
    const label = add(element("kinds"), "label"), box = add(label, "input");
    box.type = "checkbox";
    box.checked = true;
    label.append(" " + kind);
    box.addEventListener("change", () => {
      if (box.checked) HIDDEN_KINDS.delete(kind); else HIDDEN_KINDS.add(kind);
      listEvents();
      plots.forEach((plot) => plot.redraw());
    });
  }
}

function listOptions() {
  const table = element("options"), head = add(table, "tr");
  ["option", ...runs.map((run) => run.name)].forEach((name) => add(head, "th", name));
  for (const name of [...new Set(runs.flatMap((run) => Object.keys(run.config)))]) {
    const values = runs.map((run) => Object.hasOwn(run.config, name) ? run.config[name] : "");
    const row = add(table, "tr", undefined, new Set(values).size > 1 ? "differs" : "");
    [name, ...values].forEach((text) => add(row, "td", text));
  }
  element("differences-label").hidden = runs.length < 2;
  element("differences").addEventListener("change", () => {
    for (const row of table.querySelectorAll("tr:not(:first-child)"))
      row.hidden = element("differences").checked && row.className !== "differs";
  });
}

function applyTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = element("theme").value || system;
}

function main() {
  applyTheme();
  describeRuns();
  listKinds();
  listEvents();
  listOptions();
  drawCharts();
  const redraw = () => { applyTheme(); drawCharts(); };
  element("axis").addEventListener("change", () => { range = null; drawCharts(); });
  element("run").addEventListener("change", drawCharts);
  element("theme").addEventListener("change", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  element("reset").addEventListener("click", () => zoom(null));
  for (const name of ["from", "to"])
    element(name).addEventListener("change", () => zoom([Number(element("from").value), Number(element("to").value)]));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); } });
}

main();
