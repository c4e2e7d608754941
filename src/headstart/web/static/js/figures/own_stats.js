/**
 * Own stats: the figures of one's own latest requests, in the form of `headstart/stats`. For those who may not see that. Pure.
 * @module
 */

/** @typedef {import("../requests/request_log.js").LoggedRequest} LoggedRequest */

/** How many steps there are at most. */
const STEPS = 60;

/**
 * @param {LoggedRequest[]} rows
 * @param {number} now in seconds since 1970
 */
export function statsOf(rows, now) {
  const done = rows.filter((row) => row.over && row.state !== "cancelled" && row.ttft !== undefined).sort((a, b) => (a.ended ?? 0) - (b.ended ?? 0));
  const began = done[0]?.arrived ?? now;
  const seconds = Math.max(1, now - began);
  const step = Math.max(5, seconds / STEPS);
  const steps = Array.from({ length: Math.floor(seconds / step) + 1 }, () => /** @type {LoggedRequest[]} */ ([]));
  for (const row of done) steps[Math.min(steps.length - 1, Math.floor(((row.ended ?? now) - began) / step))].push(row);
  /** @type {Record<string, number>} */
  const tiers = {};
  /** @type {Record<string, number>} */
  const recomputed = {};
  for (const row of done) {
    for (const name of ["slot", "memory", "disk", "shared"])
      tiers[name === "slot" ? "live" : name] = (tiers[name === "slot" ? "live" : name] ?? 0) + (row.parts[name] ?? 0);
    if (row.cause) recomputed[row.cause] = (recomputed[row.cause] ?? 0) + row.recomputed;
  }
  const [warm, cold] = [done.filter(isWarm), done.filter((row) => !isWarm(row))];
  return {
    seconds,
    requests: done.length,
    prompt: sum(done, "prompt"),
    cached: sum(done, "cached"),
    computed: sum(done, "computed"),
    completion: sum(done, "completion"),
    tiers,
    saved_seconds: null,
    recomputed,
    ttft: { warm: { requests: warm.length, median: median(warm) }, cold: { requests: cold.length, median: median(cold) } },
    decode: speed(done),
    stored: null,
    steps: {
      seconds: step,
      cached: steps.map((some) => sum(some, "cached")),
      computed: steps.map((some) => sum(some, "computed")),
      saved_seconds: null,
      warm: steps.map((some) => average(some.filter(isWarm))),
      cold: steps.map((some) => average(some.filter((row) => !isWarm(row)))),
      decode: steps.map(speed),
    },
  };
}

/** @param {LoggedRequest} row */
function isWarm(row) {
  return 2 * row.cached >= row.prompt;
}

/** @param {LoggedRequest[]} rows @param {"prompt" | "cached" | "computed" | "completion"} name */
function sum(rows, name) {
  return rows.reduce((total, row) => total + row[name], 0);
}

/** @param {LoggedRequest[]} rows */
function median(rows) {
  const times = rows.map((row) => row.ttft ?? 0).sort((a, b) => a - b);
  const middle = times.length >> 1;
  return times.length ? (times.length % 2 ? times[middle] : (times[middle - 1] + times[middle]) / 2) : null;
}

/** @param {LoggedRequest[]} rows */
function average(rows) {
  return rows.length ? rows.reduce((total, row) => total + (row.ttft ?? 0), 0) / rows.length : null;
}

/** Tokens a second. @param {LoggedRequest[]} rows */
function speed(rows) {
  const some = rows.filter((row) => row.completion > 1 && row.decode);
  const seconds = some.reduce((total, row) => total + (row.decode ?? 0), 0);
  return seconds ? some.reduce((total, row) => total + row.completion - 1, 0) / seconds : null;
}
