// Curves over the age of the job, drawn by uPlot.
"use strict";

const charts = (() => {
  const drawn = new Map();
  const ROWS_MAX = 60;
  /** Distances of an axis of numbers of workers, and of one of ages in seconds. */
  const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000];
  const AGES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200,
    14400, 21600, 43200, 86400, 172800, 432000, 864000];
  let isEnded = false;
  let latest = null;

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Options of a chart with these series: `{name, colour, scale, format}`. */
  function options(series, width, isLog) {
    const scales = [...new Set(series.map((one) => one.scale))];
    // Of several axes, each has the colour of its curve.
    const stroke = (scale) => colour(scale === "x" || scales.length < 2 ? "muted"
      : series.find((one) => one.scale === scale).colour);
    const axis = (scale, side, format) => ({
      scale,
      side,
      stroke: stroke(scale),
      grid: { stroke: colour("line"), width: 1, show: side !== 1 },
      ticks: { stroke: colour("line"), width: 1 },
      font: "11px system-ui, sans-serif",
      size: side === 2 ? 28 : 58,
      space: side === 2 ? 60 : 30,
      incrs: { workers: COUNTS, x: AGES }[scale],
      values: (_, splits) => splits.map(format),
    });
    const sides = scales.map((scale, index) =>
      axis(scale, index === 0 ? 3 : 1, series.find((one) => one.scale === scale).format));
    return {
      width,
      height: 190,
      padding: [8, scales.length > 1 ? 8 : 34, 0, 0],
      scales: { x: { time: false }, ...(isLog ? { [scales[0]]: { distr: 3 } } : {}) },
      cursor: { sync: { key: "job" }, points: { size: 7 } },
      axes: [axis("x", 2, text.duration), ...sides],
      series: [
        { label: "Age", value: (plot, value, at) => text.duration(shown(plot, value, at)) },
        ...series.map((one) => ({
          label: one.name,
          scale: one.scale,
          stroke: colour(one.colour),
          width: 1.75,
          dash: one.dash,
          spanGaps: true,
          points: { show: one.points },
          value: (plot, value, at) => one.format(shown(plot, value, at)),
        })),
      ],
    };
  }

  /** A value of the legend: that under the cursor, else the last one. */
  function shown(plot, value, at) {
    const idle = plot.cursor.idx === null || plot.cursor.idx === undefined;
    if (!idle || !plot.data) return value;
    const known = plot.data[at].filter((one) => one !== null && one !== undefined);
    return known.length ? known[known.length - 1] : null;
  }

  function size(chart) {
    const width = chart.box.clientWidth;
    if (width > 0 && chart.plot.width !== width) chart.plot.setSize({ width, height: 190 });
  }

  /**
   * Draws `columns` (the ages, then the values of each series) in the section `id`. `what` is
   * read to those who don't see the curves.
   */
  function draw(id, series, columns, what, isLog = false) {
    const section = dom.id(id);
    const known = drawn.get(id);
    const names = `${series.map((one) => one.name).join()} ${isLog}`;
    section.hidden = columns[0].length === 0 && (isEnded || id !== "chart-loss");
    if (columns[0].length === 0) {
      if (!known && !section.querySelector(".empty")) {
        section.append(dom.make("p", { class: "empty" }, "no values yet"));
      }
      return;
    }
    if (known && known.names === names) {
      known.plot.setData(columns);
    } else {
      section.querySelectorAll(".empty, .plot").forEach((one) => one.remove());
      const box = dom.make("div", { class: "plot" });
      section.append(box);
      const plot = new uPlot(options(series, box.clientWidth || 300, isLog), columns, box);
      const chart = { box, plot, names, series, columns, what, isLog };
      drawn.set(id, chart);
      new ResizeObserver(() => size(chart)).observe(box);
    }
    const chart = drawn.get(id);
    Object.assign(chart, { columns, what });
    const canvas = chart.box.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", what);
  }

  // Colours of a canvas don't follow the colour scheme by themselves.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    const before = [...drawn];
    drawn.clear();
    for (const [id, { series, columns, what, isLog }] of before) {
      dom.id(id).querySelectorAll(".plot").forEach((one) => one.remove());
      draw(id, series, columns, what, isLog);
    }
  });

  const rate = (value) => `${text.number(value === null ? null : Math.round(value))}`;

  /** The first and the last value of a series, as text. */
  function ends(name, values) {
    const known = values.filter((value) => value !== null);
    if (known.length === 0) return `${name}: no values`;
    return `${name}: first ${text.number(known[0])}, last ${text.number(known[known.length - 1])}`;
  }

  /** The training loss, and that of the evaluations, if they have one. */
  function losses(history) {
    const points = history.curves.points;
    const isLog = dom.id("log-scale").checked;
    const value = (loss) => (isLog && !(loss > 0) ? null : loss ?? null);
    const ages = points.map((point) => point.at_s);
    const loss = points.map((point) => value(point.loss));
    const evaluations = history.evaluations.filter((one) => "loss" in one.metrics);
    const validation = evaluations.map((one) => value(one.metrics.loss));
    const training = { name: "Loss", colour: "blue", scale: "loss", format: text.number };
    if (evaluations.length === 0) {
      return draw("chart-loss", [training], [ages, loss], ends("Loss", loss), isLog);
    }
    const joined = uPlot.join([[ages, loss], [evaluations.map((one) => one.at_s), validation]]);
    const columns = joined.map((column) => Array.from(column, (one) => one ?? null));
    const held = { ...training, name: "Validation loss", colour: "green", points: true };
    draw("chart-loss", [training, held], columns,
      `${ends("Loss", loss)}; ${ends("validation loss", validation)}`, isLog);
  }

  /** The curves as tables, for the keyboard and for screen readers. */
  function tables(history) {
    if (!dom.id("curves-details").open) return;
    const points = history.curves.points;
    const every = Math.max(Math.ceil(points.length / ROWS_MAX), 1);
    const isShown = (_, at) => (points.length - 1 - at) % every === 0;
    dom.table(dom.id("curves"), ["age", "step", "loss", "learning rate", "records/s", "workers"],
      points.filter(isShown).reverse().map((point) => [text.duration(point.at_s), point.step,
        text.number(point.loss), text.number(point.learning_rate),
        Math.round(point.records_per_s), text.number(point.workers)]));
    const names = [...new Set(history.evaluations.flatMap((one) => Object.keys(one.metrics)))];
    dom.table(dom.id("evaluations"), ["age", "step", "records", ...names],
      [...history.evaluations].reverse().map((one) => [text.duration(one.at_s), one.step,
        one.records, ...names.map((name) => text.number(one.metrics[name]))]));
  }

  /** Draws all curves of the job. `hasEnded`: no value will follow. */
  function show(history, hasEnded) {
    isEnded = hasEnded;
    if (!latest) {
      const again = () => show(latest, isEnded);
      dom.id("log-scale").addEventListener("change", again);
      dom.id("curves-details").addEventListener("toggle", again);
    }
    latest = history;
    const points = history.curves.points;
    const column = (of) => points.map((point) => of(point) ?? null);
    const ages = column((point) => point.at_s);
    const format = text.number;
    losses(history);
    tables(history);
    const rates = column((point) => point.learning_rate);
    const hasRates = rates.some((value) => value !== null);
    draw("chart-rate", [{ name: "Learning rate", colour: "purple", scale: "rate", format }],
      hasRates ? [ages, rates] : [[]], ends("Learning rate", rates));
    const throughput = column((point) => point.records_per_s);
    const workers = column((point) => point.workers);
    draw("chart-throughput", [
      { name: "Records/s", colour: "teal", scale: "records", format: rate },
      { name: "Workers", colour: "orange", scale: "workers", format, dash: [5, 3] },
    ], [ages, throughput, workers],
      `${ends("Records per second", throughput)}; ${ends("workers", workers)}`);
    const all = history.evaluations;
    const names = [...new Set(all.flatMap((one) => Object.keys(one.metrics)))]
      .filter((name) => name !== "loss");
    const evaluations = names.length ? all : [];
    const palette = ["green", "blue", "orange", "purple", "teal", "red"];
    const series = names.slice(0, palette.length).map((name, index) =>
      ({ name, colour: palette[index], scale: index === 0 ? "first" : "others", format,
        points: true }));
    const values = series.map(({ name }) => evaluations.map((one) => one.metrics[name] ?? null));
    draw("chart-validation", series, [evaluations.map((one) => one.at_s), ...values],
      series.map(({ name }, index) => ends(name, values[index])).join("; "));
  }

  return { show };
})();
