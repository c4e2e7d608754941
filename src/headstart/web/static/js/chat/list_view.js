/**
 * List view: the conversations of this browser.
 * @module
 */
import { exported, imported } from "../conversation.js";
import { ask, confirmed } from "../dialog.js";
import { fill, h } from "../dom.js";
import { ago } from "../format.js";
import { icon, iconButton } from "../icons.js";

/** @typedef {import("./session.js").Session} Session */

export class ListView {
  #session;
  #say;
  #items = h("ul", { class: "titles" });

  /**
   * @param {Session} session
   * @param {(text: string) => void} say
   */
  constructor(session, say) {
    this.#session = session;
    this.#say = say;
    const file = h("input", {
      type: "file",
      accept: ".json,application/json",
      hidden: true,
      "aria-label": "File with conversations",
    });
    file.addEventListener("change", () => this.#import(file));
    this.element = h(
      "nav",
      { class: "list", "aria-label": "Conversations" },
      h("a", { class: "new", href: "#/chat" }, icon("add"), "New chat"),
      this.#items,
      h(
        "div",
        { class: "row foot" },
        h("button", { type: "button", class: "plain little", on: { click: () => file.click() } }, icon("import"), "Import"),
        h(
          "button",
          { type: "button", class: "plain little", on: { click: () => this.#export() } },
          icon("export"),
          "Export all",
        ),
        file,
      ),
    );
    session.addEventListener("titles", () => this.show());
    session.addEventListener("thread", () => this.show());
    this.show();
  }

  show() {
    const { titles, current, store } = this.#session;
    const items = titles.map(({ id, title, changed }) => {
      const isHere = id === current.id;
      const link = h(
        "a",
        { href: `#/chat/${id}`, "aria-current": isHere && "true" },
        h("span", { class: "title" }, title || "Untitled"),
        h("span", { class: "quiet small" }, ago(changed)),
      );
      const tools = [
        iconButton("edit", "Rename", () => this.#rename(id, title), { class: "plain little" }),
        iconButton("export", "Export", () => this.#export(id), { class: "plain little" }),
        iconButton("delete", "Delete", () => this.#delete(id, title), { class: "plain little" }),
      ];
      return h("li", { class: isHere ? "here" : null }, link, isHere ? h("div", { class: "tools" }, tools) : null);
    });
    const warning = store.lasts
      ? null
      : h("li", { class: "quiet small" }, "This browser keeps nothing for this page: export what you need.");
    fill(this.#items, warning, items);
  }

  /**
   * @param {string} id
   * @param {string} title
   */
  async #rename(id, title) {
    const input = h("input", { value: title, maxlength: 200, required: true, autofocus: true });
    const given = await ask("Rename", [h("label", {}, "Title", input)], { ok: "Rename", read: () => input.value.trim() });
    if (typeof given === "string" && given) await this.#session.rename(id, given);
  }

  /**
   * @param {string} id
   * @param {string} title
   */
  async #delete(id, title) {
    const what = `“${title || "Untitled"}” and all its branches are deleted from this browser.`;
    const text = `${what} What the server has stored of it stays there: see Cache.`;
    if (!(await confirmed("Delete this conversation?", text, "Delete"))) return;
    await this.#session.remove(id);
    location.hash = "#/chat";
  }

  /** @param {string} [id] one conversation; all without it */
  async #export(id) {
    const { store } = this.#session;
    const found = id ? [await store.get(id)].filter((one) => one !== null) : await store.all();
    const address = URL.createObjectURL(new Blob([exported(found)], { type: "application/json" }));
    h("a", { href: address, download: id ? `headstart-${id.slice(0, 8)}.json` : "headstart-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  /** @param {HTMLInputElement} input */
  async #import(input) {
    const [file] = input.files ?? [];
    input.value = "";
    if (!file) return;
    try {
      const found = imported(await file.text());
      await this.#session.take(found);
      this.#say(`${found.length} imported`);
    } catch (error) {
      this.#say(error instanceof Error ? error.message : String(error));
    }
  }
}
