/**
 * Tiers: where the tokens of a prompt come from, and the words for it.
 * @module
 */
import { count, seconds } from "./format.js";

/**
 * Parts of a prompt, in the order in which bars show them. The style sheets have a class for each.
 * @typedef {object} Part
 * @property {string} name
 * @property {string} label
 */

/** @type {Part[]} */
export const PARTS = [
  { name: "slot", label: "in the slot" },
  { name: "memory", label: "from memory" },
  { name: "disk", label: "from the disk" },
  { name: "shared", label: "from the shared store" },
  { name: "computed", label: "computed" },
  { name: "again", label: "computed again" },
  { name: "waiting", label: "not computed yet" },
];

/** What `why` in the list of what is evicted next means. @type {Record<string, string>} */
export const WHY = {
  expired: "Its time is over.",
  over_quota: "Its owner holds more than the quota of memory.",
  least_value: "Keeping it is expected to save the fewest seconds a byte.",
};

/**
 * How bright a stretch is, by the seconds since its last use: 1 just now, 0.35 after hours.
 * @param {number} used in seconds since 1970; 0 if unknown
 * @param {number} now
 */
export function brightness(used, now) {
  if (!used) return 0.35;
  return Math.max(0.35, 1 - Math.log10(1 + Math.max(0, now - used) / 15) / 5);
}

/** Words for the tiers of an entry. @param {Record<string, boolean>} tiers */
export function where(tiers) {
  const found = [];
  if ("memory" in tiers) found.push("in memory");
  if ("disk" in tiers) found.push("on disk");
  return found.join(" and ") || "nowhere";
}

/** Words for the last use. @param {number} used in seconds since 1970; 0 if unknown @param {number} now */
export function age(used, now) {
  if (!used) return "unknown";
  const past = now - used;
  return past < 1 ? "now" : past < 90 ? `${Math.round(past)} s ago` : `${seconds(past)} ago`;
}

/** A part of a whole. @param {number} part @param {number} all */
export function percent(part, all) {
  if (!all) return "–";
  const value = (100 * part) / all;
  const fine = (value > 0 && value < 10) || (value > 99 && value < 100);
  return `${fine ? Math.min(99.9, value).toFixed(1) : count(value)} %`;
}
