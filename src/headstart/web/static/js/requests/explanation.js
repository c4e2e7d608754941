/**
 * Explanation: why a request computed its tokens, with both texts side by side.
 * @module
 */
import { ApiError, json } from "../api.js";
import { fill, h } from "../dom.js";
import { count, seconds, tokens } from "../format.js";
import { diff } from "./text_diff.js";

export class Explanation {
  /** @param {{close: () => void, signal: AbortSignal}} calls */
  constructor(calls) {
    this.calls = calls;
    this.id = "";
    this.body = h("div", { class: "explanation-body" });
    this.heading = h("h2", { tabindex: "-1" });
    const close = h("button", { type: "button", class: "plain", on: { click: calls.close } }, "Close");
    this.element = h(
      "section",
      { class: "card explanation", "aria-label": "Why it computed its tokens", hidden: true },
      h("div", { class: "row spread" }, this.heading, close),
      this.body,
    );
  }

  /** @param {string} id the `x-request-id` of a request; "" for none */
  async show(id) {
    this.element.hidden = !id;
    if (id === this.id) return;
    this.id = id;
    if (!id) return;
    fill(this.heading, "Request ", h("code", {}, id));
    fill(this.body, h("p", { class: "quiet" }, "Loading …"));
    let found;
    try {
      found = await json(`headstart/explain/${encodeURIComponent(id)}`, { signal: this.calls.signal });
    } catch (error) {
      if (this.id !== id) return;
      const gone = error instanceof ApiError && error.status === 404;
      fill(
        this.body,
        h(
          "p",
          {},
          gone
            ? "The server does not remember it. It keeps the latest 256 requests that have ended, and shows them to their sender only."
            : String(error),
        ),
      );
      return;
    }
    if (this.id === id) fill(this.body, ...content(found));
  }
}

/** @param {any} found */
function content(found) {
  const { explanation: why } = found;
  /** @type {[string, any][]} */
  const facts = [
    ["Prompt", `${tokens(found.prompt)}: ${count(found.cached)} reused, ${count(found.computed)} computed`],
    ["First token", `after ${seconds(found.ttft)}`],
  ];
  if (!why) return [list(facts), h("p", {}, "Only new text was computed.")];
  facts.push(
    ["Cause", why.cause],
    ["Cost", `about ${tokens(why.recomputed)} computed again${why.seconds === null ? "" : `, ${seconds(why.seconds)}`}`],
  );
  if (why.where !== null) facts.push(["Place", `${place(why)}, token ${count(why.token)}`]);
  return [
    h("p", {}, h("strong", {}, why.what)),
    list(facts),
    why.current || why.previous ? texts(why) : null,
    why.hint ? h("p", { class: "advice" }, h("strong", {}, "To avoid it: "), why.hint) : null,
  ];
}

/** @param {any} why */
function place(why) {
  const at = why.message === null ? why.where : `message ${why.message}`;
  return `${at}, character ${count(why.character)}`;
}

/** @param {any} why */
function texts(why) {
  const [previous, current] = diff(why.previous, why.current);
  const ends = [previous.at(-1), current.at(-1)];
  if (
    ends.every((run) => run && !run.same) &&
    (ends[0]?.text.startsWith(ends[1]?.text ?? "") || ends[1]?.text.startsWith(ends[0]?.text ?? ""))
  ) {
    for (const run of ends) if (run) run.same = true; // both texts are cut there
  }
  /** @param {string} title @param {import("./text_diff.js").Run[]} runs @param {"del" | "ins"} mark */
  const side = (title, runs, mark) =>
    h(
      "figure",
      {},
      h("figcaption", {}, title),
      h(
        "pre",
        { tabindex: "0", role: "group", "aria-label": title },
        h("span", { class: "quiet" }, why.before && `… ${why.before}`),
        runs.map((run) => (run.same ? run.text : h("mark", { class: mark }, run.text))),
        runs.length ? " …" : h("span", { class: "quiet" }, "(nothing)"),
      ),
    );
  return h("div", { class: "texts" }, side("Before", previous, "del"), side("This request", current, "ins"));
}

/** @param {[string, any][]} facts */
function list(facts) {
  return h(
    "dl",
    { class: "facts" },
    facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}
