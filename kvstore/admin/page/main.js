/** The page: asks for a token if one is needed, then keeps all parts up to date. */

import { ask, EVERY_MS, poll, Refused, SELDOM_MS, token } from "./api.js";
import { Chart } from "./charts.js";
import { Decisions } from "./decisions.js";
import { byId, el, put, Rows, say } from "./dom.js";
import { bytes, clockS, duration, percent, rate, span } from "./format.js";
import { Tenants } from "./tenants.js";
import { Tiers, colourOf, nameOf } from "./tiers.js";
import { Tiles } from "./tiles.js";
import { Wear } from "./wear.js";

const latest = { status: null, tiers: null, tenants: null, history: null };
let moved = null;
let before = null;
let awaySince = null;
let who = "daemon";
let watching = 0;

const parts = {
  tiles: new Tiles(byId("tiles")),
  tiers: new Tiers(byId("picture")),
  tenants: new Tenants(byId("tenant-rows")),
  decisions: new Decisions(byId("chart-decisions"), byId("reasons")),
  wear: new Wear(byId("chart-written"), byId("devices")),
  hits: new Chart(byId("chart-hits"), {
    title: "Hit ratio",
    note: "found blocks, of the requested blocks of prompts, by tier",
    kind: "stack",
    format: percent,
    most: 1,
  }),
  latency: new Chart(byId("chart-latency"), {
    title: "Acquire latency",
    note: "time from a request's arrival to its answer",
    format: duration,
    log: true,
  }),
  served: new Chart(byId("chart-served"), { title: "Served", note: "bytes per second, by tier", kind: "stack", format: rate, base: 1024 }),
  used: new Chart(byId("chart-used"), { title: "Usage", note: "share of each tier's limit", format: percent, most: 1 }),
};
const problems = new Rows(byId("problems"), () => ({ root: el("li") }));

function drawHistory(history) {
  const { at_s: at, seconds, tiers } = history;
  const ofTier = (values) => tiers.map((tier) => ({ name: nameOf(tier.name), colour: colourOf(tier.name), values: values(tier) }));
  // A block can be found in the interval after the one that requested it: the larger count is 100 %.
  const requested = history.requested_blocks.map((n, k) => Math.max(n ?? 0, tiers.reduce((found, tier) => found + (tier.found_blocks[k] ?? 0), 0)));
  parts.hits.update(at, ofTier((tier) => tier.found_blocks.map((n, k) => (n === null || !requested[k] ? null : n / requested[k]))));
  parts.served.update(at, ofTier((tier) => tier.served_bytes.map((n, k) => (n === null ? null : n / seconds[k]))));
  parts.used.update(at, ofTier((tier) => tier.used_bytes.map((n, k) => (n === null || !tier.limit_bytes[k] ? null : n / tier.limit_bytes[k]))));
  parts.latency.update(at, [
    { name: "p50", colour: "--dram", values: history.acquire_p50_s },
    { name: "p99", colour: "--nvme", values: history.acquire_p99_s },
  ]);
  parts.decisions.update(history);
  parts.wear.update(history);
}

function drawNow() {
  const { status, tiers, tenants, history } = latest;
  if (!status || !tiers) return;
  parts.tiles.update(status, history);
  parts.tiers.update({ tiers: tiers.tiers, tenants, history, moved });
  if (tenants) parts.tenants.update(tenants, tiers.tiers);
  problems.update(status.problems, (text) => text, (row, text) => say(row.root, text));
  byId("problems").hidden = !status.problems.length;
  say(byId("facts"), `${status.version} · up ${span(status.uptime_s)}`);
  const io = status.nvme_io ? `, NVMe by ${status.nvme_io}` : "";
  const pages = status.huge_pages ? "huge pages" : "pages of 4 KiB";
  say(byId("foot"), `process ${status.pid}, ${pages}${io}, index uses ${bytes(status.core_ram_bytes)}`);
}

/** Bytes per second promoted and written between tiers, since the previous answer. */
function countMoves(status) {
  const now = { pid: status.pid, atS: status.uptime_s, ...status.counters };
  const seconds = before && before.pid === now.pid ? now.atS - before.atS : 0;
  const more = (name) => Math.max(0, (now[name] ?? 0) - (before[name] ?? 0)) / seconds;
  if (seconds > 0) moved = { up: more("promoted_bytes"), down: more("written_bytes") };
  if (seconds !== 0 || !before || before.pid !== now.pid) before = now;
}

function showState() {
  const state = byId("state");
  const { tiers, status } = latest;
  const away = awaySince !== null;
  document.body.classList.toggle("away", away);
  const told = tiers?.tiers.find((tier) => tier.state !== "serving");
  const fails = tiers?.tiers.some((tier) => tier !== told && (tier.fenced || !tier.readable || !tier.writable));
  put(state, "data-state", away ? "away" : !status ? "wait" : fails || told ? "fails" : "well");
  if (away) say(state, `${who} away since ${clockS(awaySince)}`);
  else say(state, !status ? "connecting" : fails ? "a tier fails" : told ? `${nameOf(told.name)} is ${told.state}` : "serving");
}

function got(kind) {
  return (answer) => {
    latest[kind] = answer;
    if (kind !== "history") awaySince = null;
    if (kind === "status") countMoves(answer);
    if (kind === "history") drawHistory(answer);
    drawNow();
    showState();
  };
}

function failed(error) {
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
    leave(reason(error));
    return;
  }
  // A 429 does not mean that the daemon is down.
  if (error instanceof Refused && error.status === 429) return;
  awaySince ??= Date.now() / 1000;
  who = error instanceof Refused ? "daemon" : "interface";
  showState();
}

function watch() {
  watching += 1;
  const mine = watching;
  const wanted = () => watching === mine;
  byId("login").hidden = true;
  byId("board").hidden = false;
  byId("parts").hidden = false;
  byId("leave").hidden = !token.get();
  poll("/v1/status", EVERY_MS, wanted, got("status"), failed);
  poll("/v1/tiers", EVERY_MS, wanted, got("tiers"), failed);
  poll("/v1/tenants?limit=100", EVERY_MS, wanted, got("tenants"), failed);
  poll("/v1/history", SELDOM_MS, wanted, got("history"), failed);
}

/** Why a sign-in failed. The hint of a 401 addresses programs, so it is replaced. */
function reason(error) {
  const hint = error.status === 401 ? "admin.tokens in the configuration lists the valid tokens" : error.hint;
  return `${error.message[0].toUpperCase()}${error.message.slice(1)}: ${hint}.`;
}

/** Returns to the form and clears everything that the token showed. */
function leave(why) {
  watching += 1;
  awaySince = null;
  showState();
  token.forget();
  for (const kind of Object.keys(latest)) latest[kind] = null;
  byId("board").hidden = true;
  byId("parts").hidden = true;
  byId("leave").hidden = true;
  byId("login").hidden = false;
  say(byId("facts"), "");
  say(byId("foot"), "kvstore");
  const state = byId("state");
  put(state, "data-state", "wait");
  say(state, "signed out");
  say(byId("why"), why);
  byId("token").focus();
}

async function signIn(event) {
  event.preventDefault();
  const field = byId("token");
  const secret = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(secret)) {
    say(byId("why"), "This is not a token: tokens have letters, digits and signs, no spaces.");
    return;
  }
  try {
    await ask("/v1/status", secret);
  } catch (error) {
    if (!(error instanceof Refused)) {
      say(byId("why"), "kvstore admin does not answer. Is it running?");
      return;
    }
    if (error.status !== 503) {
      say(byId("why"), reason(error));
      field.select();
      return;
    }
  }
  field.value = "";
  say(byId("why"), "");
  token.set(secret);
  watch();
  byId("main").focus();
}

/** Tries without a token first, because root needs none over the socket. */
async function start() {
  byId("login").addEventListener("submit", signIn);
  byId("leave").addEventListener("click", () => leave(""));
  try {
    await ask("/v1/status");
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      leave(token.get() ? reason(error) : "");
      return;
    }
  }
  watch();
}

start();
