/** Scales: round ticks, and the displayed time range. */

const HOUR_S = 3600;
const SHORTEST_S = 600;

/** Returns about four ticks from 0 to at least `most`; `base` is 1024 for bytes. */
export function ticks(most, base = 10) {
  if (!(most > 0)) return [0, 1];
  const unit = base === 1024 ? 1024 ** Math.floor(Math.log2(most) / 10) : 1;
  const raw = most / unit / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((n) => n * power >= raw * 0.999) * power * unit;
  const out = [];
  for (let n = 0; n * step < most * 1.0001; n += 1) out.push(n * step);
  if (out.at(-1) < most * 0.999) out.push(out.length * step);
  return out.length > 1 ? out : [0, step];
}

/** Returns the powers of ten around the displayed values. */
export function powers(least, most) {
  if (!(most > 0)) return [1e-4, 1e-3];
  const low = Math.floor(Math.log10(least));
  const high = Math.max(low + 1, Math.ceil(Math.log10(most)));
  return Array.from({ length: high - low + 1 }, (_, n) => 10 ** (low + n));
}

/** Returns the first and the last displayed time. */
export function shown(times) {
  const last = times.at(-1) ?? 0;
  const seconds = Math.min(HOUR_S, Math.max(SHORTEST_S, last - (times[0] ?? last)));
  return [last - seconds, last];
}

/** Returns about five full minutes in between. */
export function minutes(first, last) {
  const step = [60, 120, 300, 600, 900].find((s) => (last - first) / s <= 6) ?? 900;
  const out = [];
  for (let at = Math.ceil(first / step) * step; at <= last; at += step) out.push(at);
  return out;
}
