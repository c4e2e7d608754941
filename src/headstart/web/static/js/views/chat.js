/**
 * Chat: talk to the model. The view stays as it is while another one is open, because replies go on.
 * @module
 */
import { ListView } from "../chat/list_view.js";
import { MessageView } from "../chat/message_view.js";
import { Session } from "../chat/session.js";
import { SettingsView } from "../chat/settings_view.js";
import { path } from "../conversation.js";
import { fill, h, set } from "../dom.js";
import { icon, iconButton } from "../icons.js";

/** @typedef {import("../main.js").Context} Context */

const NEAR = 80; // pixels from the end: the view stays at the end of a reply that grows

class Chat {
  session = new Session();
  /** @type {Context | null} */
  context = null;
  #messages = h("div", { class: "messages", role: "log", "aria-live": "off" });
  #hello = h("div", { class: "hello" });
  #scroll;
  #input = h("textarea", { class: "input", rows: 1, "aria-label": "Message", placeholder: "Message", enterkeyhint: "send" });
  #button = h("button", { class: "primary icon send" });
  #spoken = h("p", { class: "sr", role: "status" });
  #model = h("span", { class: "quiet small" });
  /** @type {Map<string, MessageView>} */
  #views = new Map();
  #place = 0;

  constructor() {
    const { session } = this;
    this.settings = new SettingsView(session);
    this.list = new ListView(session, (text) => this.context?.say(text));
    this.#scroll = h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Conversation" },
      h("div", { class: "column" }, this.#hello, this.#messages),
    );
    const composer = h(
      "form",
      { class: "composer", on: { submit: (/** @type {Event} */ event) => this.#submit(event) } },
      h("div", { class: "box" }, this.#input, this.#button),
    );
    this.element = h("div", { class: "chat" });
    const lists = iconButton("menu", "Conversations", () => this.#toggle("with-list", lists), { "aria-expanded": "false" });
    const settings = iconButton("settings", "Settings", () => this.#toggle("with-settings", settings), {
      "aria-expanded": "false",
    });
    const head = h("div", { class: "head" }, lists, this.#model, settings);
    fill(
      this.element,
      this.list.element,
      h("div", { class: "middle" }, head, this.#scroll, composer, this.#spoken),
      this.settings.element,
    );
    this.#input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!session.runningHere) composer.requestSubmit();
    });
    this.list.element.addEventListener("click", (event) => {
      if (event.target instanceof Element && event.target.closest("a")) this.#close("with-list", lists);
    });
    session.addEventListener("thread", () => this.#draw());
    session.addEventListener("reply", (event) => this.#replied(/** @type {CustomEvent} */ (event).detail));
    const wide = matchMedia("(min-width: 60rem)");
    if (wide.matches) this.#toggle("with-list", lists);
    wide.addEventListener("change", () => this.#close("with-list", lists)); // it would cover the chat
    this.#drawButton();
  }

  /**
   * @param {string} name
   * @param {HTMLElement} button
   */
  #toggle(name, button) {
    set(button, { "aria-expanded": String(this.element.classList.toggle(name)) });
  }

  /**
   * Closes what covers the conversation on a narrow screen.
   * @param {string} name
   * @param {HTMLElement} button
   */
  #close(name, button) {
    if (matchMedia("(min-width: 60rem)").matches || !this.element.classList.contains(name)) return;
    this.#toggle(name, button);
  }

  async open() {
    await this.session.open();
    this.askServer();
  }

  async askServer() {
    try {
      this.#model.textContent = await this.settings.ask();
    } catch {
      this.#model.textContent = ""; // the banner says why
    }
  }

  /** @param {string[]} where */
  async navigate([id]) {
    const { session } = this;
    if (id && !(await session.show(id))) this.context?.go(["chat"], true);
    else if (!id && Object.keys(session.current.messages).length) session.begin();
    this.#input.focus({ preventScroll: true });
  }

  // ── the conversation ──────────────────────────────────────────────────────────────────────────────────────────────

  #draw() {
    const { session } = this;
    const shown = path(session.current);
    const isOther = !shown.length || !this.#views.has(shown[0].id);
    const views = new Map(
      shown.map((message) => [message.id, this.#views.get(message.id) ?? new MessageView(session, message)]),
    );
    this.#views = views;
    const elements = [...views.values()].map((view) => view.element);
    const same =
      elements.length === this.#messages.children.length &&
      elements.every((one, place) => one === this.#messages.children[place]);
    if (!same) this.#messages.replaceChildren(...elements);
    for (const view of views.values()) view.changed();
    this.#drawHello(shown.length === 0);
    this.#drawButton();
    if (isOther) this.settings.show();
    const { id, messages } = session.current;
    if (Object.keys(messages).length && this.context && !this.context.signal.aborted) this.context.go(["chat", id], true);
    if (isOther || session.runningHere) this.#toEnd();
  }

  /** @param {boolean} isEmpty */
  #drawHello(isEmpty) {
    this.element.classList.toggle("is-empty", isEmpty);
    this.#hello.hidden = !isEmpty;
    if (!isEmpty || this.#hello.firstChild) return;
    fill(
      this.#hello,
      h("h1", {}, "Say something"),
      h("p", { class: "quiet" }, "The bar under each reply shows what the server did not have to compute again."),
    );
  }

  /** @param {import("../conversation.js").Message} message */
  #replied(message) {
    const isNear = this.#scroll.scrollHeight - this.#scroll.scrollTop - this.#scroll.clientHeight < NEAR;
    this.#views.get(message.id)?.changed();
    this.#drawButton();
    if (isNear) requestAnimationFrame(() => this.#toEnd());
    const said = { done: "The reply is complete.", failed: "The reply failed.", stopped: "Stopped.", running: "" };
    const words = this.session.runningHere ? "" : said[message.state ?? "done"];
    if (this.#spoken.textContent !== words) this.#spoken.textContent = words;
  }

  #drawButton() {
    const running = Boolean(this.session.runningHere);
    const label = running ? "Stop" : "Send";
    if (this.#button.getAttribute("aria-label") === label) return;
    set(this.#button, { "aria-label": label, title: label });
    fill(this.#button, icon(running ? "stop" : "send"));
  }

  #toEnd() {
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
  }

  /** @param {Event} event */
  #submit(event) {
    event.preventDefault();
    const text = this.#input.value;
    if (this.session.runningHere) {
      this.session.stop();
    } else if (text.trim()) {
      this.#input.value = "";
      this.session.send(text);
      this.#toEnd();
    }
  }

  // ── while another view is open ────────────────────────────────────────────────────────────────────────────────────

  leave() {
    this.#place = this.#scroll.scrollTop;
  }

  comeBack() {
    this.#scroll.scrollTop = this.#place;
  }
}

/** @type {Chat | null} */
let chat = null;
/** @type {Promise<void> | null} */
let opened = null;

/**
 * @param {HTMLElement} element
 * @param {Context} context
 */
export async function mount(element, context) {
  const isFirst = chat === null;
  chat ??= new Chat();
  chat.context = context;
  opened ??= chat.open();
  await opened; // what is typed earlier would go into a conversation that is not kept
  if (context.signal.aborted) return;
  element.append(chat.element);
  chat.comeBack();
  const shown = chat.session.current;
  if (isFirst || context.path.length) await chat.navigate(context.path);
  else if (Object.keys(shown.messages).length) context.go(["chat", shown.id], true);
}

/** @param {string[]} path */
export function navigate(path) {
  chat?.navigate(path);
}

export function unmount() {
  chat?.leave();
}
