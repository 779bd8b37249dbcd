// The timeline of memberships: a bar for each worker, a line for each generation.
"use strict";

const timeline = (() => {
  const ROW = 20;
  const LEFT = 34;
  const TOP = 20;
  const ROWS_MAX = 60;

  /** Ends of workers by reason: colour, sign and name. */
  const ENDS = {
    crashed: ["red", "!", "crashed"],
    evicted: ["purple", "↯", "reclaimed by the cluster"],
    exited: ["red", "!", "exited"],
    failed: ["red", "!", "failed"],
    killed: ["orange", "×", "killed"],
    limit_exceeded: ["red", "!", "exceeded a limit"],
    start_failed: ["red", "!", "did not start"],
    terminated: ["grey", "■", "was asked to end"],
    unknown: ["grey", "?", "unknown"],
    unresponsive: ["purple", "~", "unresponsive, killed by the master"],
  };

  /** Generations by cause: colour and name. */
  const CAUSES = {
    start: ["blue", "start"],
    join: ["green", "workers joined"],
    leave: ["grey", "workers left"],
    lost: ["red", "workers lost"],
    hung: ["orange", "a worker hung"],
  };

  const PHASES = ["detect", "abort", "agree", "connect", "state", "first_step"];
  let known = null;
  let selected = null;
  let drawnShape = null;

  function phases(change) {
    const part = (name) => `${name.replace("_", " ")} ${text.milliseconds(change[`${name}_ms`])}`;
    return PHASES.map(part).join(" · ");
  }

  function workers(name, ids) {
    return ids.length ? `${ids.length === 1 ? "worker" : "workers"} ${ids.join(", ")} ${name}` : "";
  }

  /** A membership change as a sentence. */
  function describeChange(change) {
    const others = change.joined.filter((id) => !change.promoted.includes(id));
    const who = [["lost", change.lost], ["left", change.left], ["promoted", change.promoted],
      ["joined", others]]
      .map(([name, ids]) => workers(name, ids)).filter((part) => part).join(", ");
    const [, cause] = CAUSES[change.cause] || ["grey", change.cause];
    const at = change.at_s === null ? "" : ` after ${text.duration(change.at_s)}`;
    const size = text.count(change.world_size, "worker", "workers");
    const gap = change.gap_ms === null
      ? "" : `; pause ${text.milliseconds(change.gap_ms)}: ${phases(change)}`;
    return `Generation ${change.generation}${at}: ${who || cause}; ${size} at step ` +
      `${text.number(change.at_step)}${gap}`;
  }

  /** The end of a worker: colour, sign and text. */
  function endOf(life) {
    if (life.ended_s === null) return ["", "", "runs"];
    const [colour, sign, name] = ENDS[life.end] || ["grey", "?", life.end];
    return [colour, sign, `${name}${life.end_text ? ` (${life.end_text})` : ""}`];
  }

  /** A worker as a sentence. */
  function describeWorker(id, life, isLive) {
    const parts = [`started after ${text.duration(life.launched_s)}`];
    if (life.connected_s !== null) {
      parts.push(`connected after ${text.duration(life.connected_s)}`);
    }
    if (life.joined_s !== null) parts.push(`member after ${text.duration(life.joined_s)}`);
    const end = endOf(life)[2];
    if (life.ended_s !== null) parts.push(`${end} after ${text.duration(life.ended_s)}`);
    else parts.push(isLive ? "runs" : "ran to the end of the job");
    return `Worker ${id}: ${parts.join(", ")}`;
  }

  /** A part of the drawing that can be pointed at and selected. */
  function mark(name, label, data, ...children) {
    const group = dom.svg("g", { "data-mark": name, tabindex: "-1", role: "img" }, ...children);
    group.setAttribute("aria-label", label);
    Object.entries(data).forEach(([key, value]) => { group.dataset[key] = value; });
    const show = () => dom.text(dom.id("detail"), label);
    group.addEventListener("pointerenter", show);
    group.addEventListener("focus", () => { selected = name; show(); });
    return group;
  }

  function bar(row, [id, life], x, endS, isLive) {
    const y = TOP + row * ROW + 3;
    const until = life.ended_s ?? endS;
    const parts = [[life.launched_s, "pale"], [life.connected_s, "teal"], [life.joined_s, "blue"]]
      .filter(([since]) => since !== null);
    const shapes = parts.map(([since, colour], index) => {
      const to = parts[index + 1] ? parts[index + 1][0] : until;
      const width = Math.max(x(to) - x(since), 1);
      return dom.svg("rect", { x: x(since), y, width, height: ROW - 6, class: `f-${colour}` });
    });
    const [colour, sign] = endOf(life);
    if (colour) {
      const at = x(until);
      shapes.push(dom.svg("rect", {
        x: at - 7, y: y - 1, width: 14, height: ROW - 4, rx: 3, class: `f-${colour}`,
      }), dom.svg("text", { x: at, y: y + 11, class: "glyph" }, sign));
    }
    const left = x(life.launched_s);
    shapes.push(dom.svg("rect", {
      x: left - 1,
      y: y - 2,
      width: Math.max(x(until) - left, 2) + 2,
      height: ROW - 2,
      class: "halo",
    }));
    const data = { worker: id, end: life.ended_s === null ? "" : life.end };
    return mark(`worker ${id}`, describeWorker(id, life, isLive), data, ...shapes);
  }

  function line(change, x, bottom, lastLabel) {
    const at = x(change.at_s);
    const [colour] = CAUSES[change.cause] || ["grey"];
    const shapes = [
      dom.svg("rect", { x: at - 5, y: 1, width: 10, height: bottom - 1, class: "halo" }),
      dom.svg("line", {
        x1: at, x2: at, y1: TOP - 5, y2: bottom, class: `s-${colour}`, "stroke-width": 1.5,
      }),
    ];
    if (at - lastLabel > 16) {
      shapes.push(dom.svg("text", { x: at, y: 12, "text-anchor": "middle" },
        `${change.generation}`));
    }
    const data = { generation: change.generation, cause: change.cause };
    return mark(`generation ${change.generation}`, describeChange(change), data, ...shapes);
  }

  function draw() {
    const box = dom.id("timeline");
    const { history, endS, isLive } = known;
    // A part that has the focus is not read again because time has passed.
    const shape = JSON.stringify([history.memberships, isLive, box.clientWidth,
      Object.values(history.workers).map((life) => [life.joined_s, life.ended_s])]);
    const hadFocus = box.contains(document.activeElement);
    if (hadFocus && shape === drawnShape) return;
    drawnShape = shape;
    const lives = Object.entries(history.workers).map(([id, life]) => [Number(id), life])
      .sort(([a], [b]) => a - b);
    const shown = lives.slice(-ROWS_MAX);
    const width = Math.max(box.clientWidth, 240);
    const bottom = TOP + shown.length * ROW;
    const since = Math.min(...shown.map(([, life]) => life.launched_s), endS);
    const scale = (width - LEFT - 12) / Math.max(endS - since, 0.001);
    const x = (seconds) => LEFT + (Math.max(seconds, since) - since) * scale;
    const svg = dom.svg("svg", { width, height: bottom + 20, role: "group" });
    svg.setAttribute("aria-label", "Timeline of memberships. Left and right: generations. " +
      "Up and down: workers. The tables below have the same.");
    shown.forEach((entry, row) => {
      const y = TOP + row * ROW + ROW - 6;
      svg.append(dom.svg("text", { x: LEFT - 10, y, "text-anchor": "end" }, `${entry[0]}`));
      svg.append(bar(row, entry, x, endS, isLive));
    });
    const changes = history.memberships.filter((change) => change.at_s !== null &&
      change.at_s >= since);
    let lastLabel = -100;
    for (const change of changes) {
      svg.append(line(change, x, bottom, lastLabel));
      if (x(change.at_s) - lastLabel > 16) lastLabel = x(change.at_s);
    }
    const axis = { x1: LEFT, x2: width - 12, y1: bottom, y2: bottom, class: "axis" };
    svg.append(dom.svg("line", axis));
    svg.append(dom.svg("text", { x: LEFT, y: bottom + 15 }, text.duration(since)));
    svg.append(dom.svg("text", { x: width - 12, y: bottom + 15, "text-anchor": "end" },
      text.duration(endS)));
    const older = lives.length - shown.length;
    const words = `${older} older workers: see the table`;
    const note = older > 0 ? [dom.make("p", { class: "note" }, words)] : [];
    box.replaceChildren(svg, ...note);
    const marks = [...svg.querySelectorAll("[data-mark]")];
    const current = marks.find((one) => one.dataset.mark === selected) || marks[0];
    if (current) {
      current.setAttribute("tabindex", "0");
      if (hadFocus) current.focus({ preventScroll: true });
    }
  }

  /** Arrow keys: the next or previous generation, or worker. */
  function onKey(event) {
    const steps = { ArrowLeft: ["generation", -1], ArrowRight: ["generation", 1],
      ArrowUp: ["worker", -1], ArrowDown: ["worker", 1] };
    const step = steps[event.key];
    if (!step || !event.target.dataset.mark) return;
    event.preventDefault();
    const [kind, by] = step;
    const marks = [...dom.id("timeline").querySelectorAll(`[data-${kind}]`)];
    const at = marks.indexOf(event.target);
    const next = at < 0 ? marks[by > 0 ? 0 : marks.length - 1] : marks[at + by];
    if (!next) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  function tables(history, isLive) {
    const changes = [...history.memberships].reverse();
    const list = (ids) => ids.join(", ") || "–";
    dom.table(dom.id("memberships"),
      ["generation", "age", "cause", "workers", "step", "pause", "detect", "abort", "agree",
        "connect", "state", "first step", "lost", "left", "joined", "promoted"],
      changes.map((change) => [change.generation, text.duration(change.at_s), change.cause,
        change.world_size, change.at_step, text.milliseconds(change.gap_ms),
        ...PHASES.map((name) => text.milliseconds(change[`${name}_ms`])),
        list(change.lost), list(change.left), list(change.joined), list(change.promoted)]));
    const lives = Object.entries(history.workers).sort(([a], [b]) => b - a);
    dom.table(dom.id("lifetimes"),
      ["worker", "started", "connected", "member", "ended", "end"],
      lives.map(([id, life]) => [Number(id), text.duration(life.launched_s),
        text.duration(life.connected_s), text.duration(life.joined_s),
        text.duration(life.ended_s),
        life.ended_s === null && !isLive ? "ran to the end of the job" : endOf(life)[2]]));
    const seen = new Set(lives.map(([, life]) => life.ended_s === null ? null : life.end));
    const stages = [["pale", "starts"], ["teal", "connected"], ["blue", "member"]];
    dom.fill(dom.id("timeline-legend"), [...seen].sort().join(), () => [
      ...stages.map(([colour, name]) => dom.legendEntry(colour, "", name)),
      ...Object.entries(ENDS).filter(([end]) => seen.has(end))
        .map(([, [colour, sign, name]]) => dom.legendEntry(colour, sign, name)),
    ]);
  }

  /** Shows the memberships of a job that is `endS` seconds old. */
  function show(history, endS, isLive) {
    if (!known) {
      dom.id("timeline").addEventListener("keydown", onKey);
      new ResizeObserver(() => draw()).observe(dom.id("timeline"));
    }
    known = { history, endS, isLive };
    draw();
    tables(history, isLive);
    const newest = history.memberships[history.memberships.length - 1];
    if (newest && dom.id("detail").textContent === "") {
      dom.text(dom.id("detail"), describeChange(newest));
    }
  }

  return { show };
})();
