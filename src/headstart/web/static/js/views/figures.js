/**
 * Figures: what reuse has saved, since the server started and over time.
 * @module
 */
import { json, sleep } from "../api.js";
import { chart } from "../figures/chart.js";
import { fill, h } from "../dom.js";
import { bytes, count, seconds, tokens } from "../format.js";
import { percent } from "../tiers.js";

/** Milliseconds between two looks. */
const PERIOD = 2500;
/** Tiers as the server names them, with classes and words. */
const TIERS = [
  ["live", "slot", "in a slot"],
  ["memory", "memory", "in memory"],
  ["disk", "disk", "on the disk"],
  ["shared", "shared", "in the shared store"],
];

/**
 * @param {HTMLElement} element
 * @param {import("../main.js").Context} context
 */
export async function mount(element, { signal }) {
  const note = h("p", { class: "quiet small" });
  // It can have the focus, so that keys scroll.
  const body = h("div", { class: "figures", tabindex: "0", role: "group", "aria-label": "Figures" });
  fill(
    element,
    h("div", { class: "view figures-view" }, h("div", { class: "row spread" }, h("h1", {}, "Figures"), note), body),
  );
  let before = "";
  while (!signal.aborted) {
    try {
      if (!document.hidden) {
        const found = await json("headstart/stats", { signal });
        const now = JSON.stringify(found);
        if (now !== before) draw(found);
        before = now;
      }
    } catch (error) {
      if (signal.aborted) return;
      note.textContent = error instanceof Error ? error.message : String(error);
    }
    await sleep(PERIOD, signal);
  }

  /** @param {any} stats */
  function draw(stats) {
    note.textContent = "running" in stats
      ? `All requests since the server started, ${time(stats.seconds)} ago`
      : `Your requests, for ${time(stats.seconds)}. The figures of all are the operator's.`;
    fill(body, ...cards(stats));
  }
}

/** @param {any} stats */
function cards(stats) {
  const { steps } = stats;
  const span = `${time(steps.seconds * steps.cached.length)} ago`;
  const warm = stats.ttft.warm.median;
  const cold = stats.ttft.cold.median;
  return [
    card(
      "Prompt tokens that were not computed",
      h(
        "div",
        { class: "big" },
        count(stats.cached),
        h("small", {}, ` of ${count(stats.prompt)}, ${percent(stats.cached, stats.prompt)}`),
      ),
      tiers(stats),
      chart(
        `Prompt tokens each ${time(steps.seconds)}`,
        series(steps, [
          ["cached", "not computed", "memory"],
          ["computed", "computed", "computed"],
        ]),
        { format: count, span, bars: true },
      ),
    ),
    card(
      "Seconds of prefill saved",
      h("div", { class: "big" }, stats.saved_seconds === null ? "not measured yet" : seconds(stats.saved_seconds), h("small", {}, ` in ${count(stats.requests)} requests`)),
      chart("Seconds saved since the start", [{ name: "slot", label: "saved", values: sums(steps.saved_seconds) }], {
        format: seconds,
        span,
      }),
    ),
    card(
      "Time to the first token",
      h(
        "div",
        { class: "pair" },
        h("div", { class: "big" }, time(warm), h("small", {}, ` warm, ${count(stats.ttft.warm.requests)} requests`)),
        h("div", { class: "big" }, time(cold), h("small", {}, ` cold, ${count(stats.ttft.cold.requests)} requests`)),
      ),
      chart(
        "Time to the first token",
        series(steps, [
          ["warm", "warm", "slot"],
          ["cold", "cold", "computed"],
        ]),
        { format: seconds, span },
      ),
      h("p", { class: "quiet small" }, "Medians. Warm: at least half of the prompt was cached."),
    ),
    card(
      "Speed of replies",
      h("div", { class: "big" }, stats.decode === null ? "–" : stats.decode.toFixed(1), h("small", {}, " tokens a second")),
      chart("Tokens a second", series(steps, [["decode", "tokens a second", "slot"]]), {
        format: (value) => `${count(value)}/s`,
        span,
      }),
    ),
    "running" in stats && card("What is stored", ...Object.entries(stats.stored).map(([name, tier]) => budget(name, tier))),
    card("Computed again, by cause", causes(stats.recomputed)),
  ];
}

/** @param {any} steps @param {string[][]} rows @returns {import("../figures/chart.js").Series[]} */
function series(steps, rows) {
  return rows.map(([field, label, name]) => ({ name, label, values: steps[field] }));
}

/** @param {string} title @param {...import("../dom.js").Child} content */
function card(title, ...content) {
  return h("section", { class: "card figure" }, h("h2", {}, title), ...content);
}

/** @param {any} stats */
function tiers(stats) {
  const found = TIERS.filter(([field]) => stats.tiers[field]);
  const words = found.map(([field, , label]) => `${count(stats.tiers[field])} ${label}`).join(", ");
  return h(
    "div",
    { class: "tiers" },
    h(
      "div",
      { class: "origins", role: "img", "aria-label": `Found: ${words || "nothing yet"}` },
      found.map(([field, name]) => h("span", { class: name, style: { "--share": stats.tiers[field] } })),
    ),
    h(
      "ul",
      { class: "legend small" },
      found.map(([field, name, label]) =>
        h("li", {}, h("span", { class: `swatch ${name}` }), `${count(stats.tiers[field])} ${label}`),
      ),
    ),
  );
}

/** @param {string} name @param {any} tier */
function budget(name, tier) {
  const text = `${bytes(tier.used)} of ${bytes(tier.budget)}, ${percent(tier.used, tier.budget)}`;
  return h(
    "div",
    { class: "budget" },
    h("div", { class: "row spread" }, h("strong", {}, name), h("span", { class: "number" }, text)),
    h(
      "div",
      { class: "origins", role: "img", "aria-label": `${name}: ${text}` },
      h("span", { class: name, style: { "--share": tier.used } }),
      h("span", { class: "rest", style: { "--share": Math.max(0, tier.budget - tier.used) } }),
    ),
    h("p", { class: "quiet small" }, `${count(tier.entries)} entries`),
  );
}

/** @param {Record<string, number>} found */
function causes(found) {
  const rows = Object.entries(found).sort(([, a], [, b]) => b - a);
  const most = Math.max(1, ...rows.map(([, value]) => value));
  if (!rows.length) return h("p", { class: "quiet" }, "Nothing was computed twice.");
  return h(
    "ul",
    { class: "causes" },
    rows.map(([cause, value]) =>
      h(
        "li",
        {},
        h("span", { class: "cause" }, cause),
        h("span", { class: "number" }, tokens(value)),
        h(
          "div",
          { class: "origins", "aria-hidden": "true" },
          h("span", { class: "again", style: { "--share": value } }),
          h("span", { class: "rest", style: { "--share": most - value } }),
        ),
      ),
    ),
  );
}

/** @param {number[]} values */
function sums(values) {
  let total = 0;
  return values.map((value) => (total += value));
}

/** @param {number | null} value */
function time(value) {
  return value === null ? "–" : value >= 5 && value < 100 ? `${Math.round(value)} s` : seconds(value);
}

export function unmount() {}
