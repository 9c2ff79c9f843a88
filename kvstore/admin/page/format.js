/** Formats numbers. Unknown values are a dash. */

const DASH = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function short(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

export function bytes(value) {
  if (!known(value)) return DASH;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? short(value) : Math.round(value)} ${UNITS[unit]}`;
}

export const rate = (value) => (known(value) ? `${bytes(value)}/s` : DASH);

export function count(value) {
  if (!known(value)) return DASH;
  if (Math.abs(value) >= 1e9) return `${short(value / 1e9)} G`;
  if (Math.abs(value) >= 1e6) return `${short(value / 1e6)} M`;
  return Math.round(value).toLocaleString("en-US");
}

export const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : DASH);

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 1e-3) return `${short(1e6 * seconds)} µs`;
  if (seconds < 1) return `${short(1e3 * seconds)} ms`;
  return `${short(seconds)} s`;
}

export function span(seconds) {
  if (!known(seconds)) return DASH;
  const days = Math.floor(seconds / 86400);
  const hours = Math.floor((seconds % 86400) / 3600);
  const minutes = Math.floor((seconds % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const CLOCK_S = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const clock = (unixS) => (known(unixS) ? CLOCK.format(unixS * 1000) : DASH);
export const clockS = (unixS) => (known(unixS) ? CLOCK_S.format(unixS * 1000) : DASH);
