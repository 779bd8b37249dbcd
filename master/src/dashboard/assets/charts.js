// Curves over the age of the job, drawn by uPlot.
"use strict";

const charts = (() => {
  const drawn = new Map();

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Options of a chart with these series: `{name, colour, scale, format}`. */
  function options(series, width) {
    const axis = (scale, side, format) => ({
      scale,
      side,
      stroke: colour("muted"),
      grid: { stroke: colour("line"), width: 1, show: side !== 1 },
      ticks: { stroke: colour("line"), width: 1 },
      font: "11px system-ui, sans-serif",
      size: side === 2 ? 28 : 58,
      incrs: scale === "workers" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000] : undefined,
      values: (_, splits) => splits.map(format),
    });
    const scales = [...new Set(series.map((one) => one.scale))];
    const sides = scales.map((scale, index) =>
      axis(scale, index === 0 ? 3 : 1, series.find((one) => one.scale === scale).format));
    return {
      width,
      height: 190,
      scales: { x: { time: false } },
      cursor: { sync: { key: "job" }, points: { size: 7 } },
      axes: [axis("x", 2, text.duration), ...sides],
      series: [
        { label: "Age", value: (_, value) => text.duration(value) },
        ...series.map((one) => ({
          label: one.name,
          scale: one.scale,
          stroke: colour(one.colour),
          width: 1.75,
          dash: one.dash,
          spanGaps: true,
          points: { show: one.points },
          value: (_, value) => one.format(value),
        })),
      ],
    };
  }

  function size(chart) {
    const width = chart.box.clientWidth;
    if (width > 0 && chart.plot.width !== width) chart.plot.setSize({ width, height: 190 });
  }

  /**
   * Draws `columns` (the ages, then the values of each series) in the section `id`. `what` is
   * read to those who don't see the curves.
   */
  function draw(id, series, columns, what) {
    const section = dom.id(id);
    const known = drawn.get(id);
    const names = series.map((one) => one.name).join();
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
      const plot = new uPlot(options(series, box.clientWidth || 300), columns, box);
      const chart = { box, plot, names, series, columns, what };
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
    for (const [id, { series, columns, what }] of before) {
      dom.id(id).querySelectorAll(".plot").forEach((one) => one.remove());
      draw(id, series, columns, what);
    }
  });

  const rate = (value) => `${text.number(value === null ? null : Math.round(value))}`;

  /** The first and the last value of a series, as text. */
  function ends(name, values) {
    const known = values.filter((value) => value !== null);
    if (known.length === 0) return `${name}: no values`;
    return `${name}: first ${text.number(known[0])}, last ${text.number(known[known.length - 1])}`;
  }

  /** Draws all curves of the job. */
  function show(history) {
    const points = history.curves.points;
    const column = (of) => points.map((point) => of(point) ?? null);
    const ages = column((point) => point.at_s);
    const loss = column((point) => point.loss);
    const format = text.number;
    draw("chart-loss", [{ name: "Loss", colour: "blue", scale: "loss", format }],
      [ages, loss], ends("Loss", loss));
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
    const evaluations = history.evaluations;
    const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.metrics)))];
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
