/** Polls the REST interface: one request per path at a time, none while the page is hidden. */

const TOKEN = "kvstore-token";
const LONGEST_WAIT_S = 30;
const TIMEOUT_MS = 8000;

/** Interval of requests for the current state; the history has five times as long. `#every=20ms` is for tests. */
const asked = /^#every=(\d{1,6})ms$/.exec(location.hash);
export const EVERY_MS = asked ? Math.max(5, Number(asked[1])) : 2000;
export const SELDOM_MS = 5 * EVERY_MS;

export class Refused extends Error {
  constructor(status, detail, hint) {
    super(detail);
    this.status = status;
    this.hint = hint;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

/** Returns the answer of a path. Throws Refused for a problem, TypeError or DOMException without an answer. */
export async function ask(path, secret = token.get()) {
  const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const answer = await fetch(path, { headers, signal, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer.json();
  const problem = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, problem.detail ?? `status ${answer.status}`, problem.hint ?? "");
}

const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })).then(seen);
}

/** Polls a path until `wanted()` is false, with exponential backoff on failures. */
export async function poll(path, everyMs, wanted, got, failed) {
  let failures = 0;
  while (wanted()) {
    try {
      const answer = await ask(path);
      if (!wanted()) return;
      failures = 0;
      got(answer);
    } catch (error) {
      if (!wanted()) return;
      failures += 1;
      failed(error);
    }
    await later(Math.min(everyMs * 2 ** Math.min(failures, 10), failures ? LONGEST_WAIT_S * 1000 : everyMs));
    await seen();
  }
}
