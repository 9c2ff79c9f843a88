/**
 * One chart over time. Its legend says the latest values, or those under the cursor, which all charts share:
 * the mouse moves it, and on a focused chart the arrow keys do.
 */

import { el, put, Rows, say, style, svg } from "./dom.js";
import { clock, clockS } from "./format.js";
import { minutes, powers, shown, ticks } from "./scale.js";

const LEFT = 66;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;
const HEIGHT = 190;

const charts = new Set();
let cursorS = null;

function moveCursor(atS) {
  cursorS = atS;
  for (const chart of charts) chart.point();
}

let made = 0;

export class Chart {
  /** `kind` is "stack", "lines" or "bars"; `log`, `base` and `most` describe the vertical axis. */
  constructor(host, { title, note = "", kind = "lines", format, log = false, base = 10, most = 0 }) {
    this.kind = kind;
    this.format = format;
    this.log = log;
    this.base = base;
    this.most = most;
    this.title = title;
    this.times = [];
    this.series = [];
    this.width = 0;
    made += 1;
    const name = `chart-${made}`;
    this.when = el("p", { class: "when" });
    this.desc = svg("desc", { id: `${name}-d` });
    this.grid = svg("g", { class: "grid" });
    this.lines = svg("g", { class: "series" });
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.picture = svg(
      "svg",
      { role: "img", tabindex: 0, class: "chart", "aria-labelledby": `${name}-t ${name}-d`, height: HEIGHT },
      svg("title", { id: `${name}-t`, text: title }),
      this.desc,
      this.grid,
      this.lines,
      this.cursor,
    );
    this.legend = el("ul", { class: "legend" });
    this.spoken = el("p", { class: "unseen", "aria-live": "polite" });
    const head = el("div", { class: "head" }, el("h3", { text: title }), this.when);
    host.append(head, el("p", { class: "note", text: note }), this.picture, this.legend, this.spoken);
    this.keys = new Rows(this.legend, () => {
      const name = el("span", { class: "name" });
      const value = el("span", { class: "value" });
      return { root: el("li", {}, el("span", { class: "swatch" }), name, value), name, value };
    });
    this.paths = new Rows(this.lines, () => ({ root: svg("path") }));
    this.rules = new Rows(this.grid, () => {
      const line = svg("line");
      const text = svg("text");
      return { root: svg("g", {}, line, text), line, text };
    });
    this.picture.addEventListener("pointermove", (event) => moveCursor(this.timeAt(event)));
    this.picture.addEventListener("pointerdown", (event) => moveCursor(this.timeAt(event)));
    this.picture.addEventListener("pointerleave", () => moveCursor(null));
    this.picture.addEventListener("blur", () => moveCursor(null));
    this.picture.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.picture);
    charts.add(this);
  }

  /** Each series has a name, a colour (custom property) and one value per time; null is a gap. */
  update(times, series) {
    this.times = times;
    this.series = series;
    this.draw();
  }

  draw() {
    if (!this.width) return;
    put(this.picture, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const stacked = this.kind === "lines" ? this.series.map((one) => [null, one.values]) : stack(this.series);
    this.scale(stacked);
    const step = this.kind === "bars" ? this.barWidth() : 0;
    const parts = this.series.map((one, n) => ({ ...one, low: stacked[n][0], high: stacked[n][1] }));
    this.paths.update(
      parts,
      (one) => one.name,
      (row, one) => {
        put(row.root, "class", this.kind);
        style(row.root, "--c", `var(${one.colour})`);
        put(row.root, "d", this.path(one, step));
      },
    );
    this.keys.update(
      this.series,
      (one) => one.name,
      (row, one) => {
        style(row.root, "--c", `var(${one.colour})`);
        say(row.name, one.name);
      },
    );
    this.point();
  }

  scale(stacked) {
    let most = this.most;
    let least = Infinity;
    for (const [, high] of stacked) {
      for (const value of high) {
        if (value === null) continue;
        if (value > most) most = value;
        if (value > 0 && value < least) least = value;
      }
    }
    const marks = this.log ? powers(least, most) : ticks(most, this.base);
    const [low, high] = [marks[0], marks.at(-1)];
    const tall = HEIGHT - TOP - BOTTOM;
    this.y = this.log
      ? (v) => TOP + tall * (1 - Math.log10(Math.max(v, low) / low) / Math.log10(high / low))
      : (v) => TOP + tall * (1 - v / high);
    [this.first, this.last] = shown(this.times);
    const wide = this.width - LEFT - RIGHT;
    this.x = (at) => LEFT + (wide * (at - this.first)) / (this.last - this.first || 1);
    const rules = marks.map((mark) => ({ key: `y${mark}`, y: this.y(mark), text: brief(this.format(mark)) }));
    if (this.times.length) {
      for (const at of minutes(this.first, this.last)) {
        const x = this.x(at);
        if (x > LEFT + 8 && x < this.width - 16) rules.push({ key: `x${at}`, x, text: clock(at) });
      }
    }
    this.rules.update(
      rules,
      (rule) => rule.key,
      ({ line, text }, rule) => {
        const upright = rule.x !== undefined;
        const bottom = HEIGHT - BOTTOM;
        put(line, "x1", upright ? rule.x.toFixed(1) : LEFT);
        put(line, "x2", upright ? rule.x.toFixed(1) : this.width - RIGHT);
        put(line, "y1", upright ? bottom : rule.y.toFixed(1));
        put(line, "y2", upright ? bottom + 4 : rule.y.toFixed(1));
        put(text, "x", upright ? rule.x.toFixed(1) : LEFT - 8);
        put(text, "y", upright ? HEIGHT - 5 : (rule.y + 4).toFixed(1));
        put(text, "text-anchor", upright ? "middle" : "end");
        say(text, rule.text);
      },
    );
  }

  barWidth() {
    const gap = this.times.length > 1 ? this.x(this.times[1]) - this.x(this.times[0]) : 12;
    return Math.max(1.5, Math.min(14, 0.72 * gap));
  }

  path({ low, high }, step) {
    const at = (n) => `${this.x(this.times[n]).toFixed(1)} ${this.y(high[n]).toFixed(1)}`;
    const parts = [];
    if (this.kind === "bars") {
      for (let n = 0; n < high.length; n += 1) {
        if (high[n] === null || high[n] === low[n]) continue;
        const [x, top, bottom] = [this.x(this.times[n]) - step / 2, this.y(high[n]), this.y(low[n])];
        parts.push(`M${x.toFixed(1)} ${bottom.toFixed(1)}V${top.toFixed(1)}h${step.toFixed(1)}V${bottom.toFixed(1)}z`);
      }
      return parts.join("");
    }
    for (let n = 0; n < high.length; n += 1) {
      if (high[n] === null) continue;
      const start = n;
      while (n + 1 < high.length && high[n + 1] !== null) n += 1;
      const along = [];
      for (let k = start; k <= n; k += 1) along.push(at(k));
      parts.push(`M${along.join("L")}`);
      if (this.kind === "stack") {
        for (let k = n; k >= start; k -= 1) {
          parts.push(`L${this.x(this.times[k]).toFixed(1)} ${this.y(low[k]).toFixed(1)}`);
        }
        parts.push("z");
      } else if (n === start) parts.push("h.1");
    }
    return parts.join("");
  }

  /** Shows the values at the cursor, or the latest ones. */
  point() {
    if (!this.width) return;
    const n = cursorS === null ? this.times.length - 1 : this.nearest(cursorS);
    const on = cursorS !== null && n >= 0;
    put(this.cursor, "visibility", on ? "visible" : "hidden");
    if (on) {
      put(this.cursor, "x1", this.x(this.times[n]).toFixed(1));
      put(this.cursor, "x2", this.x(this.times[n]).toFixed(1));
    }
    say(this.when, on ? clockS(this.times[n]) : n >= 0 ? "now" : "no data yet");
    put(this.when, "data-on", on);
    this.keys.update(
      this.series,
      (one) => one.name,
      (row, one) => say(row.value, this.format(one.values[n] ?? null)),
    );
    say(this.desc, on ? this.reading(n) : `Latest: ${this.reading(n)} Arrow keys move through the hour.`);
  }

  reading(n) {
    if (n < 0) return "no data yet.";
    const values = this.series.map((one) => `${one.name} ${this.format(one.values[n] ?? null)}`);
    return `${clockS(this.times[n])}: ${values.join(", ") || "no data"}.`;
  }

  nearest(atS) {
    let best = this.times.length - 1;
    for (let n = best - 1; n >= 0; n -= 1) {
      if (Math.abs(this.times[n] - atS) >= Math.abs(this.times[best] - atS)) break;
      best = n;
    }
    return best;
  }

  timeAt(event) {
    const box = this.picture.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    return this.first + Math.min(1, Math.max(0, part)) * (this.last - this.first);
  }

  press(event) {
    const last = this.times.length - 1;
    if (last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const n = cursorS === null ? last : this.nearest(cursorS);
    const to = {
      ArrowLeft: Math.max(0, n - (event.shiftKey ? 10 : 1)),
      ArrowRight: Math.min(last, n + (event.shiftKey ? 10 : 1)),
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") moveCursor(null);
    else if (to === undefined) return;
    else {
      moveCursor(this.times[to]);
      say(this.spoken, this.reading(to));
    }
    event.preventDefault();
  }
}

/** Removes trailing zeros. */
const brief = (text) => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, "");

/** Stacks the series: returns lower and upper bounds. */
function stack(series) {
  let below = null;
  return series.map((one) => {
    const low = one.values.map((value, n) => (value === null ? null : (below?.[n] ?? 0)));
    const high = one.values.map((value, n) => (value === null ? null : low[n] + value));
    below = high.map((value, n) => value ?? below?.[n] ?? 0);
    return [low, high];
  });
}
