/**
 * Format: numbers as people read them.
 * @module
 */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export function count(value) {
  return WHOLE.format(value);
}

/**
 * @param {number} value
 * @param {string} [one]
 */
export function tokens(value, one = "token") {
  return `${count(value)} ${one}${value === 1 ? "" : "s"}`;
}

/**
 * A time: `0.15 s`, `12 s`, `3 min`.
 * @param {number} value seconds
 */
export function seconds(value) {
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(value < 20 ? 1 : 0)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

/**
 * A time that is still to come, without false precision.
 * @param {number} value seconds
 */
export function left(value) {
  return value < 1 ? "less than a second" : value < 100 ? `${Math.ceil(value)} s` : `${Math.ceil(value / 60)} min`;
}

/** @param {number} value */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power === 0 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)} ${units[power]}`;
}

/**
 * How long ago something was: `now`, `5 min ago`, or its day.
 * @param {number} then milliseconds since 1970
 * @param {number} [now]
 */
export function ago(then, now = Date.now()) {
  const minutes = Math.floor((now - then) / 60_000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(then).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });
}
