/**
 * Chart: lines and bars over time, drawn by hand as SVG.
 * @module
 */
import { h, s } from "../dom.js";

/** Values over time, null where there is none. `name` is also a class. @typedef {{name: string, label: string, values: (number | null)[]}} Series */

const [WIDTH, HEIGHT, TOP] = [600, 150, 8];

/**
 * A chart from 0 to the largest value: lines, or bars on each other.
 * @param {string} title
 * @param {Series[]} series
 * @param {{format: (value: number) => string, span: string, bars?: boolean}} how `span`: words for the time at the left
 * @returns {HTMLElement}
 */
export function chart(title, series, { format, span, bars = false }) {
  const length = Math.max(1, ...series.map((one) => one.values.length));
  const tops = bars ? stack(series) : series.map((one) => one.values);
  const most = nice(Math.max(0, ...tops.flatMap((values) => values.map((value) => value ?? 0))));
  /** @param {number} value */
  const height = (value) => round(HEIGHT - (value / most) * (HEIGHT - TOP));
  const step = WIDTH / length;
  const shapes = series.map((one, number) => {
    const values = tops[number];
    if (bars) {
      const below = number ? tops[number - 1] : values.map(() => 0);
      const wide = round(Math.max(0.5, step - (step > 6 ? 2 : 0)));
      const rects = values.flatMap((value, at) => {
        const [top, bottom] = [height(value ?? 0), height(below[at] ?? 0)];
        return bottom > top ? [s("rect", { x: round(at * step), y: top, width: wide, height: round(bottom - top) })] : [];
      });
      return s("g", { class: `bars ${one.name}-paint` }, ...rects);
    }
    /** @type {[number, number][]} */
    const known = values.flatMap((value, at) => (value === null ? [] : [[round((at + 0.5) * step), height(value)]]));
    const line = s("polyline", { class: `trend ${one.name}-paint`, points: known.map((pair) => pair.join(",")).join(" ") });
    // A line without length has a round end: a dot that is no ellipse, although the picture is stretched.
    const dots =
      known.length > 40
        ? []
        : known.map(([x, y]) => s("line", { class: `dot ${one.name}-paint`, x1: x, y1: y, x2: x + 0.01, y2: y }));
    return s("g", {}, line, ...dots);
  });
  const words = series.map((one) => {
    const last = one.values.findLast((value) => value !== null);
    return `${one.label}: ${last === undefined || last === null ? "no value" : format(last)}`;
  });
  const lines = [0, 0.5, 1].map((part) =>
    s("line", { class: "grid", x1: 0, x2: WIDTH, y1: height(part * most), y2: height(part * most) }),
  );
  const picture = s(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${title}, from ${span} to now. Latest: ${words.join(", ")}`,
    },
    ...lines,
    ...shapes,
  );
  const legend =
    series.length < 2
      ? null
      : h(
          "ul",
          { class: "legend small" },
          series.map((one) => h("li", {}, h("span", { class: `swatch ${one.name}` }), one.label)),
        );
  return h(
    "figure",
    { class: "plot" },
    h("figcaption", { class: "row spread small" }, h("span", { class: "quiet" }, title), legend),
    h(
      "div",
      { class: "plot-area" },
      h("div", { class: "scale quiet small number", "aria-hidden": "true" }, h("span", {}, format(most)), h("span", {}, "0")),
      picture,
    ),
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
