/**
 * Cost view: the thin bar under a reply. It shows where the tokens of the prompt came from, and why some were computed again.
 * @module
 */
import { h } from "../dom.js";
import { count, seconds, tokens } from "../format.js";

/** @typedef {import("../reply.js").Cost} Cost */

const TIERS = [
  ["memory", "memory"],
  ["disk", "disk"],
  ["shared", "shared store"],
];

/**
 * The parts of a prompt by where they came from.
 * @param {Cost} cost
 * @returns {{kind: string, name: string, tokens: number}[]}
 */
export function parts(cost) {
  const found = [
    { kind: "slot", name: "slot", tokens: cost.live },
    ...TIERS.map(([kind, name]) => ({ kind, name, tokens: cost.tiers[kind] ?? 0 })),
    { kind: "computed", name: "computed", tokens: cost.computed },
  ];
  return found.filter((part) => part.tokens > 0);
}

/**
 * @param {Cost} cost
 * @returns {HTMLElement}
 */
export function costView(cost) {
  const all = parts(cost);
  const words = [
    `prompt ${count(cost.prompt)}`,
    ...all.map(({ kind, name, tokens: some }) => [h("span", { class: `swatch ${kind}` }), `${name} ${count(some)}`]),
    cost.ttft === null ? null : `first token ${seconds(cost.ttft)}`,
    cost.completion ? `reply ${count(cost.completion)}` : null,
    cost.rate === null ? null : `${cost.rate < 10 ? cost.rate.toFixed(1) : count(cost.rate)} tokens/s`,
    cost.request ? h("a", { href: `#/requests/${encodeURIComponent(cost.request)}` }, "details") : null,
  ];
  const share = all.map(({ kind, tokens: some }) => h("span", { class: kind, style: { "--share": some } }));
  return h(
    "div",
    { class: "cost" },
    h("div", { class: "origins", "aria-hidden": "true" }, share),
    h(
      "ul",
      { class: "words number", "aria-label": "Cost of this reply, in tokens" },
      words.filter(Boolean).map((word) => h("li", {}, word)),
    ),
    cost.recomputed > 0 ? h("p", { class: "again" }, reason(cost)) : null,
  );
}

/**
 * Why tokens were computed again, and how to avoid it, in one sentence.
 * @param {Cost} cost
 */
export function reason({ recomputed, seconds: spent, what, cause, hint }) {
  const time = spent === null ? "" : `, ${seconds(spent)}`;
  const why = what ? joined(what) : cause.replaceAll("_", " ");
  return `Computed again: ${tokens(recomputed)}${time}, because ${why}${hint ? `; to avoid it, ${joined(hint)}` : ""}.`;
}

/**
 * Sentences as a part of another one.
 * @param {string} text
 */
function joined(text) {
  const parts = text.trim().replace(/\.$/, "").split(/\. (?=[A-Za-z])/);
  return parts.map((part) => part[0]?.toLowerCase() + part.slice(1)).join(", and ");
}
