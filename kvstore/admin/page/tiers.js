/** Tiers: a flow diagram from requested blocks to the tiers that had them; the rest is recomputed. */

import { el, put, Rows, say, style, svg } from "./dom.js";
import { bytes, count, percent, rate } from "./format.js";

const LATELY = 30;
const SHOWN = 5;
const ROW = 112;
const NAMES = { hbm: "HBM", dram: "DRAM", nvme: "NVMe", network: "Network" };

/** Names of additional NVMe devices begin with nvme, names of GPU pools with hbm. */
export const nameOf = (tier) => {
  const kind = ["hbm", "nvme"].find((name) => tier.startsWith(name));
  return NAMES[tier] ?? (kind ? `${NAMES[kind]} ${tier.slice(kind.length)}` : tier);
};
export const isMemory = (tier) => tier === "dram" || tier.startsWith("hbm");
export const colourOf = (tier) => (tier in NAMES ? `--${tier}` : tier.startsWith("hbm") ? "--hbm" : "--other");

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** Share of requested blocks found in each tier at the latest points, and bytes per second. */
export function lately(history) {
  const from = -LATELY;
  const seconds = sum(history.seconds.slice(from));
  const found = new Map(history.tiers.map((tier) => [tier.name, sum(tier.found_blocks.slice(from))]));
  const delivered = sum(history.tiers.map((tier) => sum(tier.served_blocks.slice(from))));
  const requested = sum(history.requested_blocks.slice(from));
  const share = (blocks) => (requested ? blocks / requested : null);
  const hits = sum([...found.values()]);
  return {
    hit: share(hits),
    // Deliveries are counted when leases end, so some blocks were found before these points.
    delivered: share(Math.min(delivered, hits)),
    missed: share(Math.max(0, requested - hits)),
    missedRate: seconds ? sum(history.missed_bytes.slice(from)) / seconds : null,
    share: (tier) => share(found.get(tier) ?? 0),
    rate: (tier) => {
      const one = history.tiers.find((each) => each.name === tier);
      return one && seconds ? sum(one.served_bytes.slice(from)) / seconds : null;
    },
  };
}

export class Tiers {
  constructor(host) {
    this.ribbons = svg("svg", { class: "ribbons", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.rows = el("div", { class: "rows" });
    host.append(el("p", { class: "source", text: "Requested blocks" }), this.ribbons, this.rows);
    this.list = new Rows(this.rows, makeRow);
    this.flows = new Rows(this.ribbons, () => {
      const [band, stream] = [svg("path", { class: "band" }), svg("path", { class: "stream" })];
      return { root: svg("g", {}, band, stream), band, stream };
    });
  }

  update({ tiers, tenants, history, moved }) {
    const recent = history && lately(history);
    const items = tiers.map((tier, n) => ({
      key: tier.name,
      tier,
      moved: n ? moved : null,
      share: recent?.share(tier.name) ?? null,
      rate: recent?.rate(tier.name) ?? null,
      device: history?.devices.find((device) => device.tier === tier.name),
      holders: holdersOf(tenants, tier.name),
    }));
    items.push({ key: "(missed)", share: recent?.missed ?? null, rate: recent?.missedRate ?? null });
    this.list.update(items, (item) => item.key, fillRow);
    this.drawFlows(items);
  }

  drawFlows(items) {
    const tall = items.length * ROW;
    put(this.ribbons, "viewBox", `0 0 100 ${tall}`);
    style(this.ribbons, "height", `${tall}px`);
    const full = Math.min(140, tall * 0.42);
    let from = (tall - full) / 2;
    const flows = items.map((item, n) => {
      const thick = full * (item.share ?? 0);
      const flow = { key: item.key, y0: from, y1: n * ROW + ROW / 2 - thick / 2, thick, colour: item.tier, rate: item.rate };
      from += thick;
      return flow;
    });
    this.flows.update(
      flows,
      (flow) => flow.key,
      ({ root, band, stream }, { y0, y1, thick, colour, rate: speed }) => {
        style(root, "--c", `var(${colour ? colourOf(colour.name) : "--missed"})`);
        const curve = (a, b) => `C50 ${a} 50 ${b}`;
        put(band, "d", `M0 ${y0}${curve(y0, y1)} 100 ${y1}V${y1 + thick}${curve(y1 + thick, y0 + thick)} 0 ${y0 + thick}z`);
        const [a, b] = [y0 + thick / 2, y1 + thick / 2];
        put(stream, "d", `M0 ${a}${curve(a, b)} 100 ${b}`);
        put(stream, "stroke-width", Math.max(1.5, Math.min(5, thick * 0.2)));
        put(stream, "visibility", thick > 0.5 && speed ? "visible" : "hidden");
        // Ten times the bytes doubles the speed of the animation.
        const lap = Math.max(0.6, 6 / 2 ** Math.max(0, Math.log10((speed || 1) / 1e5))).toFixed(1);
        style(stream, "animation-duration", `${lap}s`);
      },
    );
  }
}

function holdersOf(tenants, tier) {
  const held = (tenants?.tenants ?? [])
    .map((tenant) => [tenant.name, tenant.tiers.find((one) => one.name === tier)?.used_bytes ?? 0])
    .filter(([, used]) => used > 0)
    .sort((a, b) => b[1] - a[1]);
  const first = held.slice(0, SHOWN).map(([name, used]) => ({ name, used }));
  const rest = sum(held.slice(SHOWN).map(([, used]) => used));
  return rest ? [...first, { name: "others", used: rest }] : first;
}

function makeRow({ key, tier }) {
  const nodes = { name: el("h3"), share: el("span", { class: "share" }), rate: el("span", { class: "rate" }) };
  const left = el("div", { class: "what" }, nodes.name, nodes.share, nodes.rate);
  if (!tier) {
    nodes.name.textContent = "Missed";
    nodes.about = el("p", { class: "about", text: "in no tier: recomputed" });
    nodes.root = el("div", { class: "tier missed" }, left, el("div", { class: "held" }, nodes.about));
    return nodes;
  }
  nodes.name.textContent = nameOf(key);
  nodes.state = el("span", { class: "badge" });
  nodes.sizes = el("span", { class: "sizes" });
  nodes.full = el("strong", { class: "full" });
  nodes.bar = el("div", { class: "tank", role: "img" });
  nodes.more = el("span", { class: "device" });
  nodes.up = el("span", { class: "up" });
  nodes.down = el("span", { class: "down" });
  nodes.moves = el("p", { class: "moves" }, nodes.up, nodes.down);
  const above = el("p", { class: "above" }, nodes.full, nodes.sizes, nodes.state);
  const below = el("div", { class: "below" }, nodes.more, nodes.moves);
  nodes.root = el("div", { class: "tier" }, left, el("div", { class: "held" }, above, nodes.bar, below));
  nodes.parts = new Rows(nodes.bar, () => {
    const label = el("span");
    return { root: el("div", { class: "part" }, label), label };
  });
  return nodes;
}

function fillRow(row, { key, tier, share, rate: speed, moved, device, holders }) {
  say(row.share, percent(share));
  say(row.rate, speed === null ? "" : rate(speed));
  style(row.root, "--c", `var(${tier ? colourOf(key) : "--missed"})`);
  if (!tier) return;
  const full = tier.limit_bytes ? tier.used_bytes / tier.limit_bytes : 0;
  say(row.full, percent(full));
  say(row.sizes, `${bytes(tier.used_bytes)} of ${bytes(tier.limit_bytes)}, ${count(tier.blocks)} blocks`);
  const state = tier.fenced ? "no response" : !tier.readable ? "reads fail" : !tier.writable ? "writes fail" : "";
  say(row.state, state);
  row.state.hidden = !state;
  const known = holders.reduce((total, holder) => total + holder.used, 0);
  const items = [...holders];
  if (tier.used_bytes > known) items.push({ name: "", used: tier.used_bytes - known });
  row.parts.update(
    items.map((item, n) => ({ ...item, n })),
    (item) => `tenant ${item.name}`,
    (part, { name, used, n }) => {
      style(part.root, "width", `${((100 * used) / tier.limit_bytes).toFixed(2)}%`);
      put(part.root, "data-n", n);
      put(part.root, "title", `${name || "not loaded yet"}: ${bytes(used)}`);
      say(part.label, used / tier.limit_bytes > 0.06 ? name : "");
    },
  );
  const who = holders.map((holder) => `${holder.name} ${bytes(holder.used)}`).join(", ");
  put(row.bar, "aria-label", `${nameOf(key)} ${percent(full)} full${who ? `: ${who}` : ""}`);
  const queued = device ? Object.values(device.queued_bytes).reduce((total, n) => total + n, 0) : 0;
  const parts = [];
  if (tier.bandwidth_bytes_per_s) parts.push(`device ${rate(tier.bandwidth_bytes_per_s)}`);
  if (queued) parts.push(`${bytes(queued)} queued`);
  if (tier.retired_slots) parts.push(`${count(tier.retired_slots)} slots retired`);
  say(row.more, parts.join(", "));
  row.moves.hidden = !moved;
  if (moved) {
    say(row.up, `▲ ${rate(moved.up)} promoted`);
    say(row.down, `▼ ${rate(moved.down)} written`);
    put(row.up, "data-on", moved.up > 0);
    put(row.down, "data-on", moved.down > 0);
  }
}
