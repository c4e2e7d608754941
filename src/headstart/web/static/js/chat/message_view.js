/**
 * Message view: one message of a conversation, with what can be done with it.
 * @module
 */
import { branches } from "../conversation.js";
import { fill, h, set } from "../dom.js";
import { count, left } from "../format.js";
import { icon, iconButton } from "../icons.js";
import { costView } from "./cost_view.js";
import { breakable, codeOf, copyFrom, MarkdownView } from "./markdown_view.js";

/** @typedef {import("../conversation.js").Message} Message */
/** @typedef {import("./session.js").Session} Session */

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };
const FRAME = 100; // milliseconds: the least time between two drawings of a reply that grows
const SHARE = 8; // a drawing that takes long is followed by a pause of so many times its own time

export class MessageView {
  #session;
  #message;
  #markdown = new MarkdownView();
  #reasoning = new MarkdownView();
  #thoughts;
  #status = h("div", { class: "status" });
  #calls = h("div", { class: "calls" });
  #cost = h("div");
  #note = h("p", { class: "note small", hidden: true });
  #actions = h("div", { class: "actions row" });
  #body;
  #drawn = 0;
  #pause = FRAME;
  /** @type {ReturnType<typeof setTimeout> | null} */
  #timer = null;
  #editing = false;
  /** what is drawn of what does not change with every token */
  #settled = "";

  /**
   * @param {Session} session
   * @param {Message} message
   */
  constructor(session, message) {
    this.#session = session;
    this.#message = message;
    this.#thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Reasoning"), this.#reasoning.element);
    const text =
      message.role === "assistant" ? this.#markdown.element : h("div", { class: "plain-text" }, breakable(message.content));
    this.#body = h("div", { class: "body" }, this.#thoughts, text, this.#calls, this.#status, this.#note);
    const name = h(
      "h2",
      { class: "who" },
      NAMES[message.role],
      message.edited ? h("span", { class: "quiet small" }, " (edited)") : null,
    );
    this.element = h(
      "article",
      { class: `message ${message.role}`, "data-id": message.id },
      name,
      this.#body,
      this.#cost,
      this.#actions,
    );
    this.draw();
  }

  /** Draws the message soon: at once if it has not been drawn for a while. */
  changed() {
    if (!this.#isRunning) {
      if (this.#timer) clearTimeout(this.#timer);
      this.#timer = null;
      this.draw();
      return;
    }
    this.#timer ??= setTimeout(
      () => {
        this.#timer = null;
        this.draw();
      },
      Math.max(0, this.#drawn + this.#pause - performance.now()),
    );
  }

  get #isRunning() {
    return this.#session.runningHere?.message.id === this.#message.id;
  }

  draw() {
    const began = performance.now();
    const { role, content, reasoning } = this.#message;
    if (role === "assistant") {
      this.#markdown.update(content, !this.#isRunning);
      this.#thoughts.hidden = !reasoning;
      if (reasoning) this.#reasoning.update(reasoning, !this.#isRunning);
      this.#drawCalls();
      this.#drawStatus();
    }
    this.#drawRest();
    this.#drawn = performance.now();
    this.#pause = Math.max(FRAME, SHARE * (this.#drawn - began));
  }

  // ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

  #drawStatus() {
    const running = this.#session.runningHere;
    if (!running || running.message.id !== this.#message.id) {
      fill(this.#status);
      return;
    }
    const { progress, ttft } = running.reply;
    if (ttft !== null) {
      fill(this.#status, h("span", { class: "typing", role: "img", "aria-label": "The reply goes on" }));
    } else if (progress) {
      const { done, total, left: rest } = progress;
      const time = rest === null ? "" : `, ${left(rest)} left`;
      const words = `Reading the prompt: ${count(done)} of ${count(total)} tokens${time}`;
      fill(
        this.#status,
        h("progress", { value: done, max: total, "aria-label": "Prompt" }),
        h("span", { class: "number" }, words),
      );
    } else {
      fill(this.#status, h("span", { class: "typing", role: "img", "aria-label": "Waiting" }), "Waiting for the server");
    }
  }

  #drawCalls() {
    const calls = this.#message.calls ?? [];
    const known = this.#calls.querySelectorAll("code");
    if (known.length === calls.length && calls.every((call, place) => known[place].textContent === pretty(call.arguments)))
      return;
    fill(
      this.#calls,
      calls.map((call) =>
        h("div", { class: "call" }, h("h3", {}, "Calls ", h("b", {}, call.name)), codeOf("arguments", pretty(call.arguments))),
      ),
    );
  }

  /** Draws what changes only when the reply ends or the conversation changes. */
  #drawRest() {
    const message = this.#message;
    const current = this.#session.current;
    const all = branches(current, message.id);
    const place = all.findIndex((one) => one.id === message.id);
    const isLast = !Object.values(current.messages).some((one) => one.parent === message.id);
    const settled = JSON.stringify([
      this.#isRunning,
      message.state,
      message.error,
      message.finish,
      message.cost,
      all.length,
      place,
      isLast,
    ]);
    if (settled === this.#settled || this.#editing) return;
    this.#settled = settled;
    const isRunning = this.#isRunning;
    set(this.element, { "aria-busy": isRunning ? "true" : null });
    const note = isRunning ? "" : noteOf(message);
    this.#note.hidden = !note;
    this.#note.textContent = note;
    this.#note.classList.toggle("bad", message.state === "failed");
    fill(this.#cost, message.cost && !isRunning ? costView(message.cost) : null);
    const session = this.#session;
    const copy = h(
      "button",
      { type: "button", class: "plain little", title: "Copy the text", on: { click: () => copyFrom(copy, message.content) } },
      icon("copy"),
      "Copy",
    );
    const change = action("edit", "Edit", () => this.#edit());
    const again =
      message.role === "assistant"
        ? action("repeat", message.state === "failed" ? "Try again" : "Regenerate", () => session.again(message))
        : null;
    fill(this.#actions, all.length > 1 ? this.#switcher(place, all.length) : null, isRunning ? null : [copy, change, again]);
    const waits = message.calls?.length && isLast && !isRunning && message.state === "done";
    if (waits) this.#actions.before(this.#results());
    else this.element.querySelector(".results")?.remove();
  }

  /**
   * @param {number} place
   * @param {number} of
   */
  #switcher(place, of) {
    /** @type {(name: "left" | "right", label: string, step: number, disabled: boolean) => HTMLElement} */
    const button = (name, label, step, disabled) => {
      const more = { class: "plain little", disabled };
      return iconButton(name, label, () => this.#session.turn(this.#message, step), more);
    };
    return h(
      "div",
      { class: "branches", role: "group", "aria-label": "Branches" },
      button("left", "Previous branch", -1, place === 0),
      h("span", { class: "number small" }, `${place + 1} / ${of}`),
      button("right", "Next branch", 1, place === of - 1),
    );
  }

  #edit() {
    const message = this.#message;
    const text = h("textarea", {
      "aria-label": "Text of the message",
      rows: Math.min(20, message.content.split("\n").length + 1),
    });
    text.value = message.content;
    const isUser = message.role === "user";
    const save = async () => {
      const value = text.value;
      end();
      if (value !== message.content || isUser) await this.#session.edit(message, value);
    };
    const end = () => {
      this.#editing = false;
      form.replaceWith(this.#body);
      this.#actions.hidden = false;
    };
    /** @param {KeyboardEvent} event */
    const keydown = (event) => {
      if (event.key === "Escape") end();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      else return;
      event.preventDefault();
    };
    const form = h(
      "form",
      { class: "edit", on: { keydown, submit: (/** @type {Event} */ event) => (event.preventDefault(), save()) } },
      text,
      h(
        "div",
        { class: "row" },
        h("button", { class: "primary" }, isUser ? "Send as a branch" : "Save as a branch"),
        h("button", { type: "button", on: { click: end } }, "Cancel"),
      ),
    );
    this.#editing = true;
    this.#actions.hidden = true;
    this.#body.replaceWith(form);
    text.focus();
  }

  /** A form for the results of the tools that the reply calls: the page itself runs no tools. */
  #results() {
    this.element.querySelector(".results")?.remove();
    const calls = this.#message.calls ?? [];
    const fields = calls.map(() => h("textarea", { class: "mono", rows: 2, required: true }));
    /** @param {Event} event */
    const submit = (event) => {
      event.preventDefault();
      this.#session.giveResults(
        this.#message,
        fields.map((field) => field.value),
      );
    };
    return h(
      "form",
      { class: "results", on: { submit } },
      calls.map((call, place) => h("label", {}, `Result of ${call.name}`, fields[place])),
      h("div", {}, h("button", {}, "Send the results")),
    );
  }
}

/**
 * @param {"edit" | "repeat"} name
 * @param {string} label
 * @param {() => void} click
 */
function action(name, label, click) {
  return h("button", { type: "button", class: "plain little", on: { click } }, icon(name), label);
}

/** @param {Message} message */
function noteOf(message) {
  if (message.role !== "assistant") return "";
  if (message.state === "failed") return message.error ?? "The reply failed.";
  if (message.state === "stopped") return "Stopped.";
  if (message.state === "running") return "The page was closed before the reply was complete.";
  return message.finish === "length" ? "The reply reached its limit of tokens." : "";
}

/**
 * JSON with one member a line; other text as it is.
 * @param {string} text
 */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
