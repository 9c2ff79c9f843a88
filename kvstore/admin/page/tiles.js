/** Tiles: the main figures, each with a sparkline of the last hour. */

import { el, put, Rows, say, style, svg } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";
import { lately } from "./tiers.js";

const WIDE = 120;
const TALL = 30;
const MINUTE = 6;
const HIT_RATIO =
  "Share of all whole blocks that prompts requested, each counted once. Found: stored at that time. Delivered: handed to an engine. Last five minutes.";

export class Tiles {
  constructor(host) {
    this.rows = new Rows(host, ({ name }) => {
      const [value, note] = [el("span", { class: "number" }), el("span", { class: "note" })];
      const line = svg("path");
      const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", "aria-hidden": "true" }, line);
      return { root: el("div", { class: "tile" }, el("dt", { text: name }), el("dd", {}, value, note), picture), value, note, line };
    });
  }

  update(status, history) {
    const recent = history && lately(history);
    const served = history ? served_(history) : [];
    const p99 = history?.acquire_p99_s ?? [];
    const acquires = history ? history.acquires.map((n, k) => (n === null ? null : n / history.seconds[k])) : [];
    const last = (values) => mean(values.slice(-MINUTE));
    const tiles = [
      {
        name: "Hit ratio",
        about: HIT_RATIO,
        value: percent(recent?.hit ?? null),
        note: `${percent(recent?.delivered ?? null)} delivered`,
        line: history?.hit_ratio ?? [],
        colour: "--dram",
      },
      { name: "Served", value: rate(last(served)), note: "from all tiers", line: served, colour: "--dram" },
      { name: "Acquire, p99", value: duration(last(p99)), note: `p50 ${duration(last(history?.acquire_p50_s ?? []))}`, line: p99, colour: "--nvme" },
      { name: "Acquires", value: last(acquires) === null ? "–" : `${count(last(acquires))}/s`, note: `${count(status.connections)} clients`, line: acquires, colour: "--network" },
      { name: "Blocks", value: count(status.blocks), note: `${count(status.namespaces)} namespaces`, line: [], colour: "--network" },
      {
        name: "Waiting",
        value: count(status.queued_requests),
        note: `${count(status.copies_under_way)} copies running`,
        line: [],
        colour: "--network",
      },
    ];
    this.rows.update(
      tiles,
      (tile) => tile.name,
      (row, tile) => {
        say(row.value, tile.value);
        say(row.note, tile.note);
        put(row.root, "title", tile.about ?? "");
        style(row.root, "--c", `var(${tile.colour})`);
        put(row.line, "d", spark(tile.line));
      },
    );
  }
}

/** Bytes per second from all tiers at each point. */
function served_(history) {
  return history.seconds.map((seconds, k) =>
    seconds === null ? null : history.tiers.reduce((total, tier) => total + (tier.served_bytes[k] ?? 0), 0) / seconds,
  );
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((total, value) => total + value, 0) / known.length : null;
}

function spark(values) {
  const most = values.reduce((most_, value) => Math.max(most_, value ?? 0), 0) || 1;
  let path = "";
  let down = false;
  values.forEach((value, n) => {
    if (value === null) down = false;
    else {
      const x = values.length > 1 ? (WIDE * n) / (values.length - 1) : 0;
      path += `${down ? "L" : "M"}${x.toFixed(1)} ${(TALL - 2 - ((TALL - 4) * value) / most).toFixed(1)}`;
      down = true;
    }
  });
  return path;
}
