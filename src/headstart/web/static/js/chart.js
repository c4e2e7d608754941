/**
 * Chart: lines and areas over time, drawn by hand as SVG.
 * @module
 */
import { h, s } from "./dom.js";

/** Values over time, null where there is none. `name` is also a class. @typedef {{name: string, label: string, values: (number | null)[]}} Series */

const [WIDTH, HEIGHT, TOP] = [600, 150, 8];

/**
 * A chart from 0 to the largest value.
 * @param {string} title
 * @param {Series[]} series
 * @param {{format: (value: number) => string, span: string, stacked?: boolean}} how `span`: words for the time from left to right
 * @returns {HTMLElement}
 */
export function chart(title, series, { format, span, stacked = false }) {
  const length = Math.max(2, ...series.map((one) => one.values.length));
  const tops = stacked ? stack(series) : series.map((one) => one.values);
  const most = nice(Math.max(0, ...tops.flatMap((values) => values.map((value) => value ?? 0))));
  /** @param {number} at @param {number} value @returns {[number, number]} */
  const point = (at, value) => [round((at / (length - 1)) * WIDTH), round(HEIGHT - (value / most) * (HEIGHT - TOP))];
  const shapes = series.map((one, number) => {
    const values = tops[number];
    if (stacked) {
      const below = number ? tops[number - 1] : values.map(() => 0);
      const ring = [...values.map((value, at) => point(at, value ?? 0)), ...below.map((value, at) => point(at, value ?? 0)).reverse()];
      return s("polygon", { class: `area ${one.name}-paint`, points: ring.map((pair) => pair.join(",")).join(" ") });
    }
    const known = values.flatMap((value, at) => (value === null ? [] : [point(at, value)]));
    const line = s("polyline", { class: `trend ${one.name}-paint`, points: known.map((pair) => pair.join(",")).join(" ") });
    const dots = known.length > 40 ? [] : known.map(([cx, cy]) => s("circle", { class: `dot ${one.name}-paint`, cx, cy, r: 3 }));
    return s("g", {}, line, ...dots);
  });
  const words = series.map((one) => {
    const last = one.values.findLast((value) => value !== null);
    return `${one.label}: ${last === undefined || last === null ? "no value" : format(last)}`;
  });
  const picture = s(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, ${span}. Last values: ${words.join(", ")}` },
    ...[0, 0.5, 1].map((part) => s("line", { class: "grid", x1: 0, x2: WIDTH, y1: point(0, part * most)[1], y2: point(0, part * most)[1], "vector-effect": "non-scaling-stroke" })),
    ...shapes,
  );
  const legend = series.length < 2 ? null : h("ul", { class: "legend small" }, series.map((one) => h("li", {}, h("span", { class: `swatch ${one.name}` }), one.label)));
  return h(
    "figure",
    { class: "plot" },
    h("figcaption", { class: "row spread small" }, h("span", { class: "quiet" }, title), legend),
    h("div", { class: "plot-area" }, picture, h("span", { class: "scale quiet small number", "aria-hidden": "true" }, format(most))),
    h("div", { class: "row spread quiet small", "aria-hidden": "true" }, h("span", {}, span), h("span", {}, "now")),
  );
}

/** @param {Series[]} series @returns {number[][]} */
function stack(series) {
  /** @type {number[][]} */
  const sums = [];
  for (const { values } of series) sums.push(values.map((value, at) => (value ?? 0) + (sums.at(-1)?.[at] ?? 0)));
  return sums;
}

/** The next number with one digit that is not 0. @param {number} value */
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return Math.ceil(value / power) * power;
}

/** @param {number} value */
function round(value) {
  return Math.round(10 * value) / 10;
}
