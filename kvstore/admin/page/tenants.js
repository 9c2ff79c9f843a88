/** Tenants: usage of each tenant in every tier, with its floor and limit. */

import { byId, el, put, Rows, say, style } from "./dom.js";
import { bytes } from "./format.js";
import { colourOf, nameOf } from "./tiers.js";

export class Tenants {
  constructor(host) {
    this.rows = new Rows(host, makeRow);
  }

  update({ tenants, next }, tiers) {
    const limits = new Map(tiers.map((tier) => [tier.name, tier.limit_bytes]));
    const used = (tenant) => tenant.tiers.reduce((total, tier) => total + tier.used_bytes, 0);
    const sorted = [...tenants].sort((a, b) => used(b) - used(a) || (a.name < b.name ? -1 : 1));
    this.rows.update(
      sorted,
      (tenant) => tenant.name,
      (row, tenant) => fillRow(row, tenant, limits),
    );
    const more = byId("tenant-more");
    more.hidden = !next;
    if (next) say(more, `The first ${tenants.length} by name; /v1/tenants lists all.`);
  }
}

function makeRow(tenant) {
  const share = el("span", { class: "weight" });
  const name = el("span", { class: "tenant", role: "rowheader" }, el("bdi", { text: tenant.name }), share);
  const cells = el("div", { class: "cells", role: "presentation" });
  const root = el("div", { class: "row", role: "row" }, name, cells);
  const list = new Rows(cells, ({ name: tier }) => {
    const [value, bar, fill] = [el("span", { class: "value" }), el("span", { class: "bullet" }), el("span", { class: "fill" })];
    const [floor, limit] = [el("span", { class: "floor" }), el("span", { class: "limit" })];
    bar.append(fill, floor, limit);
    const head = el("span", { class: "of" }, el("span", { class: "in", text: nameOf(tier) }), value);
    return { root: el("div", { class: "cell", role: "cell" }, head, bar), value, bar, fill, floor, limit };
  });
  return { root, share, list };
}

function fillRow(row, tenant, limits) {
  say(row.share, `weight ${tenant.share}`);
  row.list.update(
    tenant.tiers,
    (tier) => tier.name,
    (cell, tier) => {
      const whole = limits.get(tier.name) || tier.limit_bytes || 1;
      const part = (value) => `${Math.min(100, (100 * value) / whole).toFixed(2)}%`;
      style(cell.root, "--c", `var(${colourOf(tier.name)})`);
      style(cell.fill, "width", part(tier.used_bytes));
      style(cell.floor, "left", part(tier.floor_bytes));
      cell.floor.hidden = !tier.floor_bytes;
      style(cell.limit, "left", part(tier.limit_bytes ?? whole));
      cell.limit.hidden = tier.limit_bytes === null;
      const over = tier.limit_bytes !== null && tier.used_bytes >= 0.95 * tier.limit_bytes;
      put(cell.bar, "data-near", over);
      const bounds = [];
      if (tier.floor_bytes) bounds.push(`floor ${bytes(tier.floor_bytes)}`);
      if (tier.limit_bytes !== null) bounds.push(`limit ${bytes(tier.limit_bytes)}`);
      say(cell.value, [bytes(tier.used_bytes), ...bounds].join(" · "));
    },
  );
}
