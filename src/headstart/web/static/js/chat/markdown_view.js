/**
 * Markdown view: makes elements of Markdown. Text only ever becomes text nodes.
 * @module
 */
import { fill, h } from "../dom.js";
import { icon } from "../icons.js";
import { parse, parseOpen } from "../markdown.js";

/** @typedef {import("../markdown.js").Block} Block */
/** @typedef {import("../markdown.js").Inline} Inline */

const LONG_WORD = 250; // characters
const SPACE = /\s/;

/** Markdown that may grow. Only its last block is made anew. */
export class MarkdownView {
  element = h("div", { class: "markdown" });
  #text = "";
  #done = 0; // characters whose elements stay
  #kept = 0; // number of these elements

  /**
   * Shows a text.
   * @param {string} text
   * @param {boolean} complete whether it will not grow any more
   */
  update(text, complete) {
    if (complete || !text.startsWith(this.#text)) {
      this.#text = text;
      this.#done = this.#kept = 0;
      fill(this.element, parse(text).map(blockOf));
      return;
    }
    this.#text = text;
    const { blocks, last } = parseOpen(text.slice(this.#done));
    while (this.element.children.length > this.#kept) this.element.lastElementChild?.remove();
    for (const block of blocks) this.element.append(blockOf(block));
    this.#done += last;
    this.#kept += Math.max(0, blocks.length - 1);
  }
}

/**
 * @param {Block} block
 * @returns {HTMLElement}
 */
function blockOf(block) {
  switch (block.kind) {
    case "heading": // the page has its own first and second
      return h(/** @type {"h3"} */ (`h${Math.min(6, block.level + 2)}`), {}, block.children.map(inlineOf));
    case "code":
      return codeOf(block.language, block.text);
    case "quote":
      return h("blockquote", {}, block.blocks.map(blockOf));
    case "rule":
      return h("hr");
    case "list": {
      const items = block.items.map((item) => h("li", {}, item.map(blockOf)));
      return block.ordered ? h("ol", { start: block.start }, items) : h("ul", {}, items);
    }
    case "table":
      return tableOf(block);
    default:
      return h("p", {}, block.children.map(inlineOf));
  }
}

/**
 * A text that may be broken in its longest words too. Without these places a browser looks through a long word for each of its lines.
 * @param {string} text
 * @returns {import("../dom.js").Child}
 */
export function breakable(text) {
  if (text.length <= LONG_WORD) return text;
  /** @type {import("../dom.js").Child[]} */
  const found = [];
  let from = 0;
  let length = 0; // of the word so far
  for (let at = 0; at < text.length; at++) {
    const isLow = (text.charCodeAt(at) & 0xfc00) === 0xdc00; // the second half of a character
    if (SPACE.test(text[at])) {
      length = 0;
    } else if (++length > LONG_WORD && !isLow) {
      found.push(text.slice(from, at), h("wbr"));
      from = at;
      length = 1;
    }
  }
  return [...found, text.slice(from)];
}

/**
 * @param {Inline} piece
 * @returns {import("../dom.js").Child}
 */
function inlineOf(piece) {
  if (typeof piece === "string") return breakable(piece);
  if (piece.kind === "code") return h("code", {}, piece.text);
  const children = piece.children.map(inlineOf);
  if (piece.kind !== "link") return h(piece.kind, {}, children);
  return h("a", { href: piece.href, title: piece.href, target: "_blank", rel: "noopener noreferrer" }, children);
}

/**
 * A piece of code, with a button that copies it.
 * @param {string} language
 * @param {string} text
 */
export function codeOf(language, text) {
  const button = h(
    "button",
    { type: "button", class: "plain little", on: { click: () => copyFrom(button, text) } },
    icon("copy"),
    "Copy",
  );
  const head = h("div", { class: "code-head" }, h("span", {}, language.slice(0, 40) || "text"), button);
  const label = `Code: ${language.slice(0, 40) || "text"}`;
  return h("div", { class: "code" }, head, h("pre", { tabindex: 0, role: "region", "aria-label": label }, h("code", {}, text)));
}

/**
 * Copies a text, and says so on the button.
 * @param {HTMLButtonElement} button
 * @param {string} text
 */
export async function copyFrom(button, text) {
  const before = [...button.childNodes];
  const done = await copy(text);
  fill(button, done ? "Copied" : "Not allowed");
  setTimeout(() => button.replaceChildren(...before), 1500);
}

/** @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS browsers have the clipboard on this machine only; the old way works everywhere.
    const area = h("textarea", { class: "sr", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** @param {Extract<Block, {kind: "table"}>} block */
function tableOf({ align, head, rows, left }) {
  /** @type {(tag: "th" | "td", cells: Inline[][]) => HTMLElement} */
  const row = (tag, cells) =>
    h(
      "tr",
      {},
      cells.map((cell, column) => h(tag, { class: align[column] || null, scope: tag === "th" && "col" }, cell.map(inlineOf))),
    );
  const table = h(
    "table",
    {},
    h("thead", {}, row("th", head)),
    h(
      "tbody",
      {},
      rows.map((one) => row("td", one)),
    ),
  );
  const rest = left > 0 ? h("p", { class: "quiet small" }, `${left} more rows are not shown. The button Copy has all.`) : null;
  return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table, rest);
}
