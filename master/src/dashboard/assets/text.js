// Numbers and texts of the page, and elements. Texts from the job are set as text, never as HTML.
"use strict";

const dom = {
  /** The element with this id. */
  id: (id) => document.getElementById(id),

  /** A new element with attributes and children. */
  make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== undefined && value !== null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  },

  /** A new SVG element. */
  svg(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  },

  /** Replaces the text of an element, if it is another one. */
  text(element, text) {
    if (element.textContent !== text) element.textContent = text;
  },

  /** Replaces the children of an element, unless `key` says that they are the same. */
  fill(element, key, children) {
    if (element.dataset.key === key) return;
    element.dataset.key = key;
    element.replaceChildren(...children());
  },

  /**
   * Makes a table of a head and rows, unless it is there. A cell is a text, a number or an element.
   */
  table(element, head, rows) {
    const key = JSON.stringify(rows, (_, value) =>
      value instanceof Element ? [value.textContent, value.getAttribute("aria-label")] : value);
    if (element.shownRows === key) return;
    element.shownRows = key;
    const cell = (tag, value) => {
      const isNumber = typeof value === "number";
      const shown = isNumber ? text.number(value) : value;
      return dom.make(tag, { class: isNumber ? "number" : null }, shown ?? "–");
    };
    const align = (at) => (rows.length && typeof rows[0][at] === "number" ? "number" : null);
    const header = head.map((name, at) =>
      dom.make("th", { scope: "col", class: align(at) }, name));
    const body = rows.map((row) => dom.make("tr", {}, ...row.map((value) => cell("td", value))));
    const parts = [dom.make("thead", {}, dom.make("tr", {}, ...header))];
    element.replaceChildren(...parts, dom.make("tbody", {}, ...body));
  },

  /** An entry of a legend: a coloured square, perhaps with a sign, and a text. */
  legendEntry(colour, sign, name, value) {
    const swatch = dom.make("span", { class: `swatch c-${colour}`, "aria-hidden": "true" }, sign);
    const entry = dom.make("li", {}, swatch, `${name} `);
    if (value !== undefined) entry.append(dom.make("b", {}, value));
    return entry;
  },
};

const text = {
  /** A number, rounded to what can be read at a glance. */
  number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.005 || size >= 1e9)) {
      return `${Number(value.toPrecision(3)).toExponential()}`;
    }
    const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4;
    return value.toLocaleString("en", { maximumFractionDigits: digits });
  },

  percent(part) {
    return Number.isFinite(part) ? `${(part * 100).toFixed(1)} %` : "–";
  },

  /** A number of seconds: `2.5 s`, `3 min 7 s`, `2 h 5 min`, `3 d 4 h`. */
  duration(seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const whole = Math.round(seconds);
    const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    const first = units.findIndex(([, size]) => whole >= size);
    const [[name, size], [next, small]] = [units[first], units[first + 1] || ["", 1]];
    const rest = Math.floor((whole % size) / small);
    return `${Math.floor(whole / size)} ${name}${rest ? ` ${rest} ${next}` : ""}`;
  },

  milliseconds(ms) {
    return ms === null || ms === undefined ? "–" : `${text.number(Math.round(ms * 10) / 10)} ms`;
  },

  count(number, one, many) {
    return `${text.number(number)} ${number === 1 ? one : many}`;
  },
};
