/**
 * Chain panel: one stretch of the tree: its text, its figures, and what can be done with it.
 * @module
 */
import { ApiError, json } from "../api.js";
import { confirmed } from "../dialog.js";
import { fill, h } from "../dom.js";
import { count, seconds, tokens } from "../format.js";
import { age, where, WHY } from "../tiers.js";

/** @typedef {import("./tree.js").CacheTree} CacheTree */
/** @typedef {import("./tree.js").Stretch} Stretch */

/** Characters of a text that are shown. */
const LONGEST = 20_000;

export class ChainPanel {
  /**
   * @param {CacheTree} tree
   * @param {{say: (text: string) => void, close: () => void, signal: AbortSignal}} calls
   */
  constructor(tree, calls) {
    this.tree = tree;
    this.calls = calls;
    this.id = "";
    this._first = "";
    this.facts = h("dl", { class: "facts" });
    this.text = h("pre", { class: "chain-text", tabindex: "0", role: "group", "aria-label": "Text of the stretch" });
    this.note = h("p", { class: "quiet small" });
    this.buttons = h("div", { class: "row" });
    this.heading = h("h2", {});
    const close = h("button", { type: "button", class: "plain", on: { click: calls.close } }, "Close");
    this.element = h(
      "section",
      { class: "card chain", "aria-label": "The selected stretch", hidden: true },
      h("div", { class: "row spread" }, this.heading, close),
      this.facts,
      this.buttons,
      h("h3", {}, "Its text"),
      this.note,
      this.text,
    );
    /** What the server knows beside the events. @type {any} */
    this._more = null;
  }

  /** @param {Stretch | undefined} stretch */
  show(stretch) {
    this.element.hidden = !stretch;
    if (!stretch) {
      this.id = this._first = "";
      return;
    }
    if (stretch.first.id !== this._first) {
      this._first = stretch.first.id;
      fill(this.text);
      this.text.hidden = true;
      fill(this.note, "Loading …");
    }
    if (stretch.id !== this.id) {
      this.id = stretch.id;
      this._more = null;
      this._load(stretch);
    }
    this._facts(stretch);
    this._actions(stretch);
  }

  /** @param {Stretch} stretch */
  async _load(stretch) {
    const { signal } = this.calls;
    const mine = () => this.id === stretch.id;
    const more = json(`headstart/cache/${stretch.id}`, { signal }).catch(() => null);
    try {
      const { text } = await json(`headstart/cache/${stretch.id}/text?start=${stretch.start}&tokens=${LONGEST}`, { signal });
      if (!mine()) return;
      fill(this.text, text.slice(0, LONGEST));
      this.text.hidden = false;
      fill(this.note, text.length > LONGEST ? `The first ${count(LONGEST)} characters.` : "");
    } catch (error) {
      if (!mine()) return;
      const foreign = error instanceof ApiError && error.status === 404 && this.tree.nodes.has(stretch.id);
      fill(this.note, foreign ? "Only its owner can read it." : messageOf(error));
    }
    const found = await more;
    const now = mine() ? this.tree.stretchOf(stretch.id) : undefined;
    if (!now) return;
    this._more = found;
    this._facts(now);
  }

  /** @param {Stretch} stretch */
  _facts(stretch) {
    const now = Date.now() / 1000;
    const { first, last } = stretch;
    const leaving = this.tree.leaving.findIndex((one) => one.id === stretch.id);
    const canonical = Object.values(last.tiers).some(Boolean);
    /** @type {[string, string | null][]} */
    const facts = [
      ["Tokens", `${count(stretch.start)} – ${count(stretch.stop)}`],
      ["Where", where(last.tiers)],
      ["Last use", age(stretch.used, now)],
      ["Uses", this._more?.uses ? count(this._more.uses) : null],
      [
        "Saves",
        this._more?.saves_seconds ? `${seconds(this._more.saves_seconds)} of prefill for a prompt that continues here` : null,
      ],
      ["Numbers", canonical ? "canonical: those of a computed prompt" : "derived: made while replying"],
      ["Checkpoints", stretch.checkpoints.length ? `at ${stretch.checkpoints.map(count).join(", ")}` : null],
      ["Pinned", last.pinned ? "yes" : null],
      [
        "Continued by",
        stretch.children.length ? `${count(stretch.children.length)} branches, ${count(stretch.lanes)} ends` : null,
      ],
      ["Evicted next", leaving < 0 ? null : `number ${leaving + 1}. ${WHY[this.tree.leaving[leaving].why] ?? ""}`],
      ["Owner", last.owner === this.tree.owner ? null : last.owner],
      ["Beginning", first.parent === null || stretch.parent ? null : "gone, so it cannot be used"],
    ];
    fill(this.heading, tokens(stretch.stop - stretch.start));
    fill(
      this.facts,
      facts.filter(([, value]) => value !== null).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    );
  }

  /** @param {Stretch} stretch */
  _actions(stretch) {
    const { pinned } = stretch.last;
    const state = `${stretch.id} ${pinned} ${stretch.children.length > 0}`;
    if (this.buttons.dataset.state === state) return; // else the focus would be lost
    const focused = this.buttons.contains(document.activeElement);
    this.buttons.dataset.state = state;
    const pin = h(
      "button",
      { type: "button", on: { click: () => this._post(pinned ? "unpin" : "pin") } },
      pinned ? "Unpin" : "Pin",
    );
    const remove = h(
      "button",
      {
        type: "button",
        class: "danger",
        disabled: stretch.children.length > 0 || pinned,
        on: { click: () => this._delete(stretch) },
      },
      "Delete …",
    );
    const why = pinned
      ? "Unpin it before you delete it."
      : stretch.children.length
        ? "Other chains continue it, so it cannot be deleted."
        : null;
    fill(this.buttons, pin, remove, why && h("span", { class: "quiet small" }, why));
    if (focused) pin.focus();
  }

  /** @param {"pin" | "unpin"} what */
  async _post(what) {
    try {
      await json(`headstart/cache/${this.id}/${what}`, { body: {}, signal: this.calls.signal });
      this.calls.say(what === "pin" ? "Pinned: it is not evicted." : "Unpinned.");
    } catch (error) {
      this.calls.say(messageOf(error));
    }
  }

  /** @param {Stretch} stretch */
  async _delete(stretch) {
    const text =
      "All that only this chain has is deleted, in memory and on disk. It is computed again when it is needed. This cannot be undone.";
    if (!(await confirmed(`Delete a chain of ${tokens(stretch.stop)}?`, text, "Delete"))) return;
    try {
      const gone = await json(`headstart/cache/${stretch.id}`, { method: "DELETE", signal: this.calls.signal });
      this.calls.say(`Deleted: ${tokens(gone.tokens)}.`);
      this.calls.close();
    } catch (error) {
      this.calls.say(messageOf(error));
    }
  }
}

/** @param {unknown} error */
function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}
