/** Decisions: blocks evicted or refused in the last hour, and the reasons. */

import { byId, el, Rows, say, style } from "./dom.js";
import { count } from "./format.js";
import { Chart } from "./charts.js";
import { nameOf } from "./tiers.js";

const MINUTE_S = 60;
const WHY = {
  evicted: "The copy was evicted; another tier keeps one.",
  demoted: "The copy was evicted after it was written to a lower tier.",
  dropped: "The last copy was evicted; the next request is a miss.",
  refused: "Admission refused the block, or stored blocks are worth more.",
  denied: "There was no room for the block.",
  unwritten: "The device's queue was full, so the block was not written.",
  invalidated: "A client invalidated the block.",
  expired: "The block's time to live ended.",
  quarantined: "The checksum was wrong; the slot is retired.",
};
const KNOWN = Object.keys(WHY);

const colour = (what) => (KNOWN.includes(what) ? `--d-${what}` : "--other");

export class Decisions {
  constructor(chart, host) {
    const note = "blocks per minute, by decision";
    this.chart = new Chart(chart, { title: "Evicted and refused", note, kind: "bars", format: count });
    this.rows = new Rows(host, () => {
      const [what, where, why, blocks] = [el("strong"), el("span", { class: "where" }), el("p"), el("span", { class: "blocks" })];
      const bar = el("span", { class: "part" });
      const swatch = el("span", { class: "swatch" });
      const head = el("div", { class: "line" }, swatch, what, where, blocks);
      return { root: el("li", {}, head, el("span", { class: "track" }, bar), why), what, where, why, blocks, bar };
    });
  }

  update({ at_s: at, decisions }) {
    const starts = [...new Set(at.map((second) => Math.floor(second / MINUTE_S)))];
    const slot = new Map(starts.map((minute, n) => [minute, n]));
    const byWhat = new Map();
    const rows = [];
    for (const { what, tier, blocks } of decisions) {
      if (!byWhat.has(what)) byWhat.set(what, starts.map(() => null));
      const sums = byWhat.get(what);
      let total = 0;
      blocks.forEach((n, k) => {
        if (n === null) return;
        sums[slot.get(Math.floor(at[k] / MINUTE_S))] += n;
        total += n;
      });
      if (total) rows.push({ what, tier, total });
    }
    const order = (what) => (KNOWN.indexOf(what) + KNOWN.length + 1) % (KNOWN.length + 1);
    const series = [...byWhat].sort((a, b) => order(a[0]) - order(b[0]));
    this.chart.update(
      starts.map((minute) => minute * MINUTE_S),
      series.map(([what, values]) => ({ name: what, colour: colour(what), values })),
    );
    rows.sort((a, b) => b.total - a.total);
    const most = rows[0]?.total ?? 1;
    this.rows.update(
      rows,
      ({ what, tier }) => `${what} ${tier}`,
      (row, { what, tier, total }) => {
        style(row.root, "--c", `var(${colour(what)})`);
        say(row.what, what);
        say(row.where, tier ? nameOf(tier) : "all tiers");
        say(row.why, WHY[what] ?? "");
        say(row.blocks, count(total));
        style(row.bar, "width", `${((100 * total) / most).toFixed(1)}%`);
      },
    );
    byId("no-reasons").hidden = rows.length > 0;
  }
}
