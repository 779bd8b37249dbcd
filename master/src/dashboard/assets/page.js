// The page of a job: asks the master for the job's state every second, or shows the state that a
// report contains.
"use strict";

(() => {
  const KINDS = [
    ["compute_us", "blue", "compute"],
    ["input_us", "orange", "input"],
    ["network_us", "teal", "network"],
    ["recovery_us", "red", "recovery"],
    ["checkpoint_us", "purple", "checkpoint"],
  ];
  const POLL_MS = 250;
  const RETRY_MS = 2000;
  let key = "";
  let isFirst = true;
  /** Workers that share memory wait for each other; nothing is transferred. */
  let network = "network";
  let limits = null;

  function figures(status, summary, history, ageS, isEnded) {
    const value = history.goodput.value;
    const eta = status.eta_s === null ? "–" : text.duration(status.eta_s);
    const epoch = Math.min(status.epoch + 1, Math.max(status.epochs, 1));
    const isMember = (worker) => worker.rank !== null && !worker.serves_tables;
    const members = status.workers.filter(isMember).length;
    const size = summary ? `${summary.workers.peak} at most`
      : `${members} of ${status.workers_desired}`;
    const spares = status.spares;
    const speed = summary ? summary.throughput.records_per_s : status.records_per_s;
    // A job that evaluates or predicts has shards and no group.
    const trains = status.shards === null;
    const best = status.evaluated_best;
    const shown = [
      [trains ? "Step" : "Shards done", text.number(status.step)],
      ...(trains ? [["Epoch", `${epoch} of ${status.epochs}`]] : []),
      ["Done", text.percent(status.progress)],
      ...(isEnded ? [] : [["Time left", eta]]),
      [isEnded ? "Time" : "Age", text.duration(ageS)],
      ...(trains && value !== null ? [["Goodput", text.percent(value)]] : []),
      ["Records/s", text.number(Math.round(speed))],
      ...(trains ? [["Loss", text.number(summary ? summary.loss.last : status.loss)]] : []),
      ["Workers", size],
      ...(spares ? [["Spares", `${spares.caught_up} of ${spares.desired} caught up, ` +
        `${spares.promoted} promoted`]] : []),
      ...(trains ? [["Generation", text.number(status.generation)]] : []),
    ];
    if (best) {
      shown.push([`Best ${best.metric}`,
        `${text.number(best.value)} at step ${text.number(best.step)}`]);
    }
    if (!trains && status.evaluated) {
      for (const [name, mean] of Object.entries(status.evaluated.metrics)) {
        shown.push([name, mean === null ? "not finite" : text.number(mean)]);
      }
    }
    if (status.checkpoints) {
      const newest = status.checkpoints.newest;
      const what = newest && best && newest.step === best.step ? " (the best)" : "";
      shown.push(["Newest checkpoint",
        newest ? `step ${text.number(newest.step)}${what}` : isEnded ? "none" : "none yet"]);
    }
    if (history.began_s) {
      const date = (ageOf) => new Date((history.began_s + ageOf) * 1000).toLocaleString();
      shown.push(["Started", date(0)]);
      if (isEnded) shown.push(["Ended", date(ageS)]);
    }
    if (status.steps_skipped > 0) {
      shown.push(["Steps skipped", text.number(status.steps_skipped)]);
    }
    if (status.tables) {
      const held = status.workers.reduce((sum, one) => sum + (one.table_bytes ?? 0), 0);
      shown.push(["Rows of tables", text.number(status.tables.rows)]);
      shown.push(["Memory of rows", `${text.number(held / 1e6)} MB`]);
      shown.push(["Row touches", text.number(status.tables.touches)]);
      shown.push(["Shards at risk", text.number(status.tables.shards_at_risk)]);
    }
    if (status.allreduce_transport) shown.push(["All-reduce", status.allreduce_transport]);
    const list = dom.id("figures");
    if (list.children.length !== shown.length) {
      list.replaceChildren(...shown.map(() =>
        dom.make("div", {}, dom.make("dt"), dom.make("dd"))));
    }
    shown.forEach(([name, shownValue], index) => {
      const [term, description] = list.children[index].children;
      dom.text(term, name);
      dom.text(description, shownValue);
      description.dataset.name = name;
    });
  }

  /** The options of the job and its program. */
  function options(history) {
    const all = history.options ?? [];
    dom.id("options-section").hidden = all.length === 0;
    dom.fill(dom.id("options"), JSON.stringify(all), () => all.map(([name, value]) =>
      dom.make("div", {}, dom.make("dt", {}, name), dom.make("dd", {}, value))));
  }

  /** A bar of parts: `[amount, colour, name]`. */
  function bar(element, parts, label) {
    const whole = parts.reduce((sum, [amount]) => sum + amount, 0);
    const spans = parts.filter(([amount]) => amount > 0).map(([amount, colour, name]) => {
      const span = dom.make("span", { class: `c-${colour}`, title: name });
      span.style.width = `${(amount / whole) * 100}%`;
      return span;
    });
    element.replaceChildren(...spans);
    element.setAttribute("aria-label", label);
    return element;
  }

  function ledger(status, summary) {
    const counted = summary ? summary.records.counted : status.records_counted;
    const expected = summary ? summary.records.expected : status.records_expected;
    const repeated = summary ? summary.records.repeated : status.records_repeated;
    const isEnded = summary !== null;
    const notTrained = summary ? summary.records.not_trained ?? 0 : 0;
    const missing = Math.max(expected - counted - notTrained, 0);
    const leased = status.workers.reduce((sum, one) => sum + (one.leased_records ?? 0), 0);
    const rest = Math.max(missing - leased, 0);
    const name = isEnded ? "missing" : "to do";
    const box = dom.id("ledger");
    Object.assign(box.dataset, { counted, expected, missing, repeated });
    bar(box, [[counted - Math.min(repeated, counted), "green", "counted"],
      [Math.min(repeated, counted), "red", "repeated"], [leased, "blue", "leased"],
      [rest, isEnded ? "red" : "pale", name], [notTrained, "pale", "not trained"]],
      `${text.number(counted)} of ${text.number(expected)} records counted, ` +
      `${text.number(missing)} ${name}, ${text.number(repeated)} repeated` +
      (notTrained > 0 ? `, ${text.number(notTrained)} not trained` : ""));
    const entries = [["none", "expected", expected], ["green", "counted", counted],
      [isEnded ? "red" : "pale", name, missing], ["red", "repeated", repeated]];
    if (notTrained > 0) entries.push(["pale", "not trained", notTrained]);
    if (leased > 0) entries.push(["blue", "leased", leased]);
    dom.id("ledger-legend").replaceChildren(...entries.map(([colour, label, amount]) =>
      dom.legendEntry(colour, "", label, text.number(amount))));
  }

  function times(history) {
    const lives = Object.entries(history.workers)
      .filter(([, life]) => KINDS.some(([kind]) => life.times[kind] > 0))
      .sort(([a, one], [b, other]) =>
        (one.ended_s !== null) - (other.ended_s !== null) || a - b);
    const sum = (kind) => lives.reduce((all, [, life]) => all + (life.times[kind] ?? 0), 0);
    const kinds = KINDS.map(([kind, colour, name]) =>
      [kind, colour, name === "network" ? network : name]);
    const totals = kinds.map(([kind, colour, name]) => [sum(kind), colour, name])
      .filter(([amount], index) => amount > 0 || index < 4);
    const whole = totals.reduce((all, [amount]) => all + amount, 0);
    dom.id("time-legend").replaceChildren(...totals.map(([amount, colour, name]) =>
      dom.legendEntry(colour, "", name, text.percent(whole ? amount / whole : NaN))));
    const row = (name, of) => {
      const parts = kinds.map(([kind, colour, label]) => [of(kind) ?? 0, colour, label]);
      const all = parts.reduce((sumOfParts, [amount]) => sumOfParts + amount, 0);
      const share = ([amount, , label]) => `${label} ${text.percent(all ? amount / all : 0)}`;
      const label = parts.filter(([amount]) => amount > 0).map(share).join(", ");
      const box = bar(dom.make("div", { class: "bar", role: "img", title: label }), parts, label);
      return [name, text.duration(all / 1e6), box];
    };
    dom.table(dom.id("times"), ["worker", "time", "share"], [
      row("all", sum),
      ...lives.slice(0, 100).map(([id, life]) =>
        row(life.ended_s === null ? id : `${id} (ended)`, (kind) => life.times[kind])),
    ]);
  }

  /** What a worker without contact shows of its work. */
  const NOTHING = Array(6).fill("–");

  /** Which link limits the steps, as a sentence; empty if none does. */
  function slowLink(link) {
    if (!link) return "";
    const on = (host) => (host ? ` on ${host}` : "");
    const what = link.host ? `The links of host ${link.host} limit`
      : `The link from worker ${link.from}${on(link.from_host)} to worker ${link.to}` +
        `${on(link.to_host)} limits`;
    return `${what} the steps: the network delivers ${(link.bytes_per_s / 1e6).toFixed(1)} MB/s.`;
  }

  function workers(status) {
    const slow = status.workers.filter((worker) => worker.straggler);
    dom.text(dom.id("stragglers"), slow.length === 0 ? "No worker is a straggler."
      : slow.map((worker) => `Worker ${worker.worker} is a straggler, limited by ` +
        `${worker.limited_by ?? "an unknown cause"}.`).join(" "));
    dom.text(dom.id("slow-link"), slowLink(status.limiting_link));
    const ms = (us) => text.milliseconds(us / 1000);
    const away = new Map(status.workers_disconnected.map((one) => [one.worker, one]));
    const rows = status.workers.map((worker) => [
      `${worker.worker}${worker.node ? ` on ${worker.node}` : ""}`,
      worker.rank === null ? "–" : worker.rank,
      worker.rank === null && worker.step !== null
        ? `${worker.state} at step ${text.number(worker.step)}`
        : worker.straggler ? dom.make("span", { class: "straggler" }, `${worker.state}, straggler`)
        : worker.state,
      worker.share === null ? "–" : text.percent(worker.share),
      ms(worker.compute_us), ms(worker.input_us), worker.limited_by ?? "–",
      worker.cpu === undefined ? "–" : text.number(Math.round(worker.cpu * 100) / 100),
      worker.memory_bytes === undefined ? "–"
        : `${text.number(Math.round(worker.memory_bytes / 1e6))} MB`,
    ]);
    for (const worker of status.workers) away.delete(worker.worker);
    for (const one of away.values()) {
      rows.push([`${one.worker}`, one.rank ?? "–",
        `disconnected for ${text.duration(one.disconnected_s)}`, ...NOTHING]);
    }
    for (const one of status.workers_pending) {
      const why = one.reason ? `${one.state}: ${one.reason}` : one.state;
      rows.push([`${one.launch}`, "–", why, ...NOTHING]);
    }
    dom.table(dom.id("workers"),
      ["worker", "rank", "state", "share", "compute", "input", "limited by", "cores", "memory"],
      rows);
  }

  function events(history) {
    const newest = history.events[history.events.length - 1];
    const id = `${history.events.length} ${newest ? newest.at_s + newest.text : ""}`;
    dom.fill(dom.id("events"), id, () => [...history.events].reverse().map((event) =>
      dom.make("li", {}, dom.make("time", {}, text.duration(event.at_s)), event.text)));
  }

  function show(page) {
    const { status, summary, history } = page;
    const state = summary ? summary.state : status.state;
    const ageS = summary ? summary.wall_s : page.at_s;
    network = status.allreduce_transport === "shared memory" ? "waiting for others" : "network";
    dom.text(dom.id("job"), status.job);
    dom.text(dom.id("state"), state);
    dom.id("state").dataset.state = state;
    document.title = `${status.job}: ${state}`;
    dom.id("progress").value = status.progress;
    const error = summary && summary.error;
    dom.id("error").hidden = !error;
    dom.text(dom.id("error"), error || "");
    figures(status, summary, history, ageS, !page.live);
    options(history);
    charts.show(history, !page.live);
    // What a job without groups, or without workers, does not have.
    const isEmpty = { curves: history.curves.points.length === 0,
      memberships: history.memberships.length === 0 && Object.keys(history.workers).length === 0,
      times: Object.values(history.workers).every((life) =>
        KINDS.every(([kind]) => !(life.times[kind] > 0))),
      workers: !page.live };
    Object.entries(isEmpty).forEach(([name, hidden]) => {
      dom.id(`${name}-section`).hidden = hidden;
    });
    timeline.show(history, ageS, page.live);
    times(history);
    workers(status);
    ledger(status, summary);
    events(history);
    limits = page.scale;
    dom.id("controls").hidden = !(page.live && limits);
    dom.id("inspect").hidden = !(page.live && limits);
    const input = dom.id("num-workers");
    if (limits) {
      Object.assign(input, { min: limits.min, max: limits.max, step: limits.step });
      if (input.value === "") input.value = status.workers_desired;
    }
    document.body.dataset.shown = `${page.version}`;
  }

  function connection(message, isTrouble) {
    dom.text(dom.id("connection"), message);
    dom.id("connection").classList.toggle("trouble", isTrouble);
  }

  async function request(path, body) {
    const headers = { authorization: `Bearer ${key}` };
    if (body === undefined) return fetch(path, { headers, cache: "no-store" });
    headers["content-type"] = "application/json";
    return fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  }

  async function post(path, body, done) {
    const answer = dom.id("answer");
    let message = "The master does not answer.";
    let isDone = false;
    try {
      const response = await request(path, body);
      isDone = response.ok;
      message = isDone ? done : await response.text();
    } catch { /* The message says so. */ }
    dom.text(answer, message);
    answer.classList.toggle("trouble", !isDone);
  }

  /** Asks the workers what they do, which takes some seconds if one of them hangs. */
  async function inspect() {
    const [button, shown] = [dom.id("inspect"), dom.id("inspection")];
    button.disabled = true;
    dom.id("inspection-section").hidden = false;
    dom.text(shown, "The workers are asked …");
    try {
      dom.text(shown, await (await request("api/inspect", {})).text());
    } catch {
      dom.text(shown, "The master does not answer.");
    }
    button.disabled = false;
  }

  async function poll() {
    let wait = POLL_MS;
    try {
      // The master answers the later requests after a second, or when the job has ended.
      const response = await request(isFirst ? "api/job" : "api/job?wait");
      if (response.status === 401 || response.status === 403) {
        connection("This link does not open this job. `elasticdl dashboard JOB` prints the one " +
          "that does.", true);
        return;
      }
      if (response.ok) {
        const page = await response.json();
        isFirst = false;
        show(page);
        connection(page.live ? "Live" : "The job has ended.", false);
        if (!page.live) return;
      } else {
        connection(await response.text(), response.status !== 503);
        wait = RETRY_MS;
      }
    } catch {
      connection("The master does not answer; trying again. After the job's end " +
        "`elasticdl report JOB --html FILE` writes this page.", true);
      wait = RETRY_MS;
    }
    setTimeout(poll, wait);
  }

  function start() {
    const report = dom.id("report");
    if (report) {
      show(JSON.parse(report.textContent));
      connection("Report of a job that has ended", false);
      return;
    }
    // The key is in the fragment, which no browser sends or logs, and leaves the address bar.
    const given = location.hash.slice(1);
    key = given || sessionStorage.getItem("key") || "";
    if (given) {
      sessionStorage.setItem("key", given);
      history.replaceState(null, "", location.pathname);
    }
    if (!key) {
      connection("The address has no key. `elasticdl dashboard JOB` prints the whole link.", true);
      return;
    }
    dom.id("scale").addEventListener("submit", (event) => {
      event.preventDefault();
      const workersWanted = Number(dom.id("num-workers").value);
      post("api/scale", { num_workers: workersWanted },
        `The job is scaled to ${text.count(workersWanted, "worker", "workers")}.`);
    });
    dom.id("inspect").addEventListener("click", inspect);
    dom.id("stop").addEventListener("click", () => dom.id("confirm").showModal());
    dom.id("confirm").addEventListener("close", () => {
      if (dom.id("confirm").returnValue !== "stop") return;
      dom.id("confirm").returnValue = "";
      post("api/stop", {}, "The job stops at the end of its step.");
    });
    poll();
  }

  start();
})();
