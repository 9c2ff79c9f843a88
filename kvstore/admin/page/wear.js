/** Wear: bytes written to devices today, the write rate, and the daily write budget. */

import { byId, el, put, Rows, say, style } from "./dom.js";
import { bytes, clock, count, percent, rate } from "./format.js";
import { Chart } from "./charts.js";
import { colourOf, isMemory, nameOf } from "./tiers.js";

const DAY_S = 86400;
const FACTS = ["Written today", "Rate of the last hour", "Drive writes per day", "Write budget", "Admission", "Refused by admission"];

export class Wear {
  constructor(chart, host) {
    this.chart = new Chart(chart, { title: "Written to devices", note: "bytes per second", kind: "stack", format: rate, base: 1024 });
    this.rows = new Rows(host, makeDevice);
  }

  update(history) {
    const devices = history.devices.filter((device) => !isMemory(device.tier));
    byId("no-devices").hidden = devices.length > 0;
    const tiers = history.tiers.filter((tier) => !isMemory(tier.name));
    this.chart.update(
      history.at_s,
      tiers.map((tier) => ({
        name: nameOf(tier.name),
        colour: colourOf(tier.name),
        values: tier.written_bytes.map((n, k) => (n === null ? null : n / history.seconds[k])),
      })),
    );
    this.rows.update(
      devices,
      (device) => device.tier,
      (row, device) => fillDevice(row, device, history),
    );
  }
}

function makeDevice({ tier }) {
  const values = FACTS.map(() => el("dd"));
  const facts = el("dl", { class: "figures" });
  FACTS.forEach((name, n) => facts.append(el("div", {}, el("dt", { text: name }), values[n])));
  const fill = el("span", { class: "fill" });
  const gauge = el("div", { class: "gauge", role: "img" }, fill);
  const said = el("p", { class: "note" });
  return { root: el("div", { class: "device" }, el("h4", { text: nameOf(tier) }), gauge, said, facts), values, fill, gauge, said };
}

function fillDevice(row, device, history) {
  const tier = history.tiers.find((one) => one.name === device.tier);
  const known = tier ? tier.written_bytes.map((n, k) => [n, history.seconds[k]]).filter(([n]) => n !== null) : [];
  const seconds = known.reduce((total, [, s]) => total + s, 0);
  const aDay = seconds ? (known.reduce((total, [n]) => total + n, 0) / seconds) * DAY_S : null;
  const limit = tier?.limit_bytes.findLast((value) => value !== null) ?? null;
  const { admission, written_today_bytes: today } = device;
  const budget = admission.bytes_a_day;
  const turns = aDay !== null && limit ? aDay / limit : null;
  const values = [
    `${bytes(today)} since ${clock(history.today_since_s)}`,
    aDay === null ? "–" : `${bytes(aDay)} per day`,
    turns === null ? "–" : `${turns.toFixed(2)} × the limit`,
    budget ? `${bytes(budget)} per day${admission.spent ? ", used up" : ""}` : "none",
    `${admission.mode}${admission.threshold > 0 ? `, probability ≥ ${percent(admission.threshold)}` : ""}`,
    `${count(admission.refused_blocks)} blocks`,
  ];
  values.forEach((text, n) => say(row.values[n], text));
  const part = budget ? today / budget : null;
  row.gauge.hidden = part === null;
  row.said.hidden = part === null;
  if (part !== null) {
    const text = `${percent(part)} of the daily budget written today`;
    style(row.fill, "width", `${Math.min(100, 100 * part).toFixed(1)}%`);
    put(row.gauge, "aria-label", text);
    put(row.gauge, "data-near", admission.spent || part > 0.9);
    say(row.said, text);
  }
}
