/**
 * Requests: the latest ones as rows, on one time line.
 * @module
 */
import { fill, h } from "../dom.js";
import { Explanation } from "../requests/explanation.js";
import { watch } from "../feed.js";
import { count, seconds, tokens } from "../format.js";
import { RequestLog, Timeline } from "../requests/request_log.js";
import { PARTS, percent } from "../tiers.js";

/** @typedef {import("../requests/request_log.js").LoggedRequest} LoggedRequest */

/** Milliseconds between two looks at the clock while a request runs. */
const TICK = 500;
/** How many rows can be shown. */
const SIZES = [20, 50, 128];
/** Words for the states. @type {Record<string, string>} */
const STATES = {
  queued: "waits",
  prefill: "computes the prompt",
  reply: "replies",
  stop: "done",
  ended: "done",
  length: "cut at the limit",
  cancelled: "cancelled",
  failed: "failed",
};

/** @type {Explanation | null} */
let explanation = null;
/** @type {(id: string) => void} */
let open = () => {};

/**
 * @param {HTMLElement} element
 * @param {import("../main.js").Context} context
 */
export function mount(element, { path, go, say, signal }) {
  const log = new RequestLog();
  let most = SIZES[0];
  const rows = h("tbody", {});
  const empty = h("p", { class: "empty", hidden: true }, "No request has come yet.");
  const span = h("span", { class: "quiet" });
  const table = h(
    "table",
    { class: "requests", "aria-label": "The latest requests, the newest first" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["Request", "Prompt", "Time line", "First token", "Cause"].map((title) =>
          h("th", { scope: "col" }, title, title === "Time line" ? span : null),
        ),
      ),
    ),
    rows,
  );
  const size = h(
    "select",
    { "aria-label": "Rows", on: { change: () => draw((most = Number(size.value))) } },
    SIZES.map((value) => h("option", { value }, `${value} rows`)),
  );
  explanation = new Explanation({ close: () => go(["requests"]), signal });
  fill(
    element,
    h(
      "div",
      { class: "view requests-view" },
      h("div", { class: "row spread" }, h("h1", {}, "Requests"), h("div", { class: "sizes" }, size)),
      legend(),
      explanation.element,
      h("div", { class: "scroll" }, table),
      empty,
    ),
  );

  /** @type {Map<number, {row: LoggedRequest, element: HTMLElement, line: HTMLElement, button: HTMLElement}>} */
  const drawn = new Map();
  let frame = 0;

  function draw(_ = most) {
    frame = 0;
    const shown = log.latest.slice(0, most);
    const line = new Timeline(shown, Date.now() / 1000);
    span.textContent = shown.length ? ` (${seconds(line.length)})` : "";
    empty.hidden = shown.length > 0;
    const wanted = shown.map((row) => {
      let one = drawn.get(row.number);
      if (one?.row !== row) {
        const focused = one?.button === document.activeElement;
        one = rowOf(row, () => go(["requests", row.id]));
        drawn.set(row.number, one);
        if (focused) setTimeout(() => one?.button.focus());
      }
      phases(one.line, line, row);
      return one.element;
    });
    for (const number of drawn.keys()) if (!shown.some((row) => row.number === number)) drawn.delete(number);
    if (wanted.length !== rows.children.length || wanted.some((one, at) => one !== rows.children[at]))
      rows.replaceChildren(...wanted);
    mark();
  }

  function mark() {
    for (const { row, element: one } of drawn.values()) {
      if (row.id === explanation?.id) one.setAttribute("aria-current", "true");
      else one.removeAttribute("aria-current");
    }
  }

  function later() {
    if (!frame) frame = requestAnimationFrame(() => draw());
  }

  open = (id) => {
    explanation?.show(id);
    mark();
    if (id) explanation?.heading.focus({ preventScroll: false });
  };
  if (path[0]) open(path[0]);
  const clock = setInterval(() => log.latest.some((row) => !row.over) && later(), TICK);
  signal.addEventListener("abort", () => {
    clearInterval(clock);
    cancelAnimationFrame(frame);
  });
  watch({ signal, say }, (name, data) => log.apply(name, data) && later(), ["tree"]);
}

/**
 * @param {LoggedRequest} row
 * @param {() => void} click
 */
function rowOf(row, click) {
  const time = new Date(1000 * row.arrived).toLocaleTimeString(undefined, {
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });
  const line = h("div", { class: "line" });
  const name = row.id || `number ${row.number}`;
  const button = h(
    "button",
    { type: "button", class: "plain little", disabled: !row.id || !row.over, "aria-label": `Explain ${name}`, on: { click } },
    time,
  );
  const cached = percent(row.cached, row.prompt);
  const element = h(
    "tr",
    { "data-number": row.number },
    h(
      "td",
      { class: "who" },
      button,
      h("span", { class: "quiet small" }, row.choice ? `choice ${row.choice}, ` : "", STATES[row.state] ?? row.state),
    ),
    h("td", { class: "prompt" }, bar(row), h("span", { class: "small number" }, `${tokens(row.prompt)}, ${cached} reused`)),
    h("td", { class: "time" }, line),
    h("td", { class: "number" }, row.ttft === undefined ? "" : seconds(row.ttft)),
    h(
      "td",
      {},
      row.cause
        ? h("span", { class: "cause" }, row.cause, row.recomputed ? h("span", { class: "quiet small" }, ` ${count(row.recomputed)} again`) : "")
        : h("span", { class: "quiet" }, row.ttft === undefined ? "" : "none"),
    ),
  );
  return { row, element, line, button };
}

/** @param {LoggedRequest} row */
function bar(row) {
  const parts = PARTS.filter(({ name }) => row.parts[name]);
  const words = parts.map(({ name, label }) => `${count(row.parts[name])} ${label}`).join(", ");
  return h(
    "div",
    { class: "origins", role: "img", "aria-label": `Prompt: ${words}`, title: words },
    parts.map(({ name }) => h("span", { class: name, style: { "--share": row.parts[name] } })),
  );
}

/** @param {HTMLElement} element @param {Timeline} line @param {LoggedRequest} row */
function phases(element, line, row) {
  const found = line.phases(row);
  const words = found.map(({ name, from, to }) => `${name} ${seconds((to - from) * line.length)}`).join(", ");
  const bars = found.map(({ name, from, to }) =>
    h("span", { class: name, style: { left: `${100 * from}%`, width: `${100 * (to - from)}%` } }),
  );
  const cuts = line.cuts.map((at) => h("i", { style: { left: `${100 * at}%` } }));
  fill(element, cuts, h("span", { class: "sr" }, words), bars);
  element.title = words;
}

function legend() {
  const parts = PARTS.map(({ name, label }) => h("li", {}, h("span", { class: `swatch ${name}` }), label));
  const times = ["queue", "prefill", "decode"].map((name) => h("li", {}, h("span", { class: `swatch ${name}` }), name));
  return h(
    "div",
    { class: "row spread small" },
    h("ul", { class: "legend", "aria-label": "Origins of the tokens of a prompt" }, parts),
    h("ul", { class: "legend", "aria-label": "The time line" }, times),
  );
}

/** @param {string[]} path */
export function navigate(path) {
  open(path[0] ?? "");
}

export function unmount() {
  explanation = null;
  open = () => {};
}
