/**
 * Cache: the tree of what is stored, as it changes.
 * @module
 */
import { Captions } from "../cache/captions.js";
import { ChainPanel } from "../cache/chain_panel.js";
import { fill, h } from "../dom.js";
import { watch } from "../feed.js";
import { bytes, count, tokens } from "../format.js";
import { IcicleCanvas } from "../cache/icicle_canvas.js";
import { describe, Outline } from "../cache/outline.js";
import { SlotStrip } from "../cache/slot_strip.js";
import { WHY } from "../tiers.js";
import { CacheTree } from "../cache/tree.js";

/** @typedef {import("../cache/tree.js").Stretch} Stretch */

/** @type {IcicleCanvas | null} */
let picture = null;

/**
 * @param {HTMLElement} element
 * @param {import("../main.js").Context} context
 */
export function mount(element, { say, signal }) {
  const tree = new CacheTree();
  const canvas = h("canvas", { class: "icicle", "aria-hidden": "true" });
  const hint = h("div", { class: "hint", hidden: true });
  const sizes = h("p", { class: "quiet small number" });
  const empty = h("p", { class: "empty", hidden: true }, "Nothing is stored yet. Chat, and watch it grow.");
  const evicted = h("ol", { class: "evicted small" });
  const evictedNext = h(
    "details",
    { class: "card", hidden: true },
    h("summary", {}, "Evicted next, when memory is full"),
    evicted,
  );
  const slots = new SlotStrip();

  const drawn = new IcicleCanvas(canvas, tree, {
    caption: (stretch) => (stretch.last.owner === tree.owner ? captions.of(stretch) : ""),
    selected: (stretch) => select(stretch),
    hovered(box, x, y) {
      hint.hidden = !box;
      if (!box) return;
      hint.textContent = box.group ? `${count(box.group)} branches. Click to zoom in.` : describe(box.stretch, tree);
      const left = Math.min(x + 14, Math.max(0, canvas.clientWidth - hint.offsetWidth));
      Object.assign(hint.style, { left: `${left}px`, top: `${y + 18}px` });
    },
  });
  const captions = new Captions(() => drawn.invalidate(), signal);
  picture = drawn;
  const outline = new Outline(tree, (stretch) => select(stretch, true), h("div", { class: "picture" }, canvas, hint));
  const panel = new ChainPanel(tree, { say, close: () => select(undefined), signal });

  /** @param {Stretch | undefined} stretch @param {boolean} [reveal] */
  function select(stretch, reveal = false) {
    drawn.selected = stretch?.first.id ?? ""; // its end may move
    outline.show(stretch);
    panel.show(stretch);
    if (stretch && reveal) drawn.reveal(stretch);
    drawn.invalidate();
  }

  /** @param {string} text @param {string} label @param {() => void} click */
  const button = (text, label, click) =>
    h("button", { type: "button", class: "little", "aria-label": label, title: label, on: { click } }, text);
  fill(
    element,
    h(
      "div",
      { class: "view cache" },
      h("div", { class: "row spread" }, h("h1", {}, "Cache"), sizes),
      slots.element,
      h(
        "div",
        { class: "row spread" },
        legend(),
        h(
          "div",
          { class: "row", role: "group", "aria-label": "Zoom" },
          button("−", "Zoom out", () => drawn.zoom(1 / 1.6)),
          button("+", "Zoom in", () => drawn.zoom(1.6)),
          button("All", "Show all", () => drawn.fit()),
        ),
      ),
      outline.element,
      empty,
      panel.element,
      evictedNext,
    ),
  );
  outline.element.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") drawn.zoom(1.6);
    else if (event.key === "-") drawn.zoom(1 / 1.6);
    else if (event.key === "0") drawn.fit();
    else if (event.key === "Escape") select(undefined);
  });
  drawn.show();

  /** The last node of the beginning that a request reused, by the number of the request. @type {Map<number, string>} */
  const reused = new Map();
  /** @type {import("../cache/slot_strip.js").Slot[]} */
  let now = [];

  function flags() {
    drawn.flags = now.flatMap((slot) => {
      const id = slot.request === undefined ? undefined : reused.get(slot.request);
      return id && slot.state !== "idle" ? [{ id, text: `slot ${slot.slot}` }] : [];
    });
  }

  /** @param {string} name @param {any} data */
  function take(name, data) {
    if (name === "slots") {
      slots.show((now = data));
      flags();
      drawn.invalidate();
    } else if (name === "requests") {
      for (const one of data) if (one.reused) reused.set(one.number, one.reused);
      for (const number of reused.keys()) if (reused.size > 256) reused.delete(number);
    } else if (name === "sizes") {
      sizes.textContent = sizesText(data);
    }
    if (name === "snapshot") captions.clear();
    if (tree.apply(name, data)) changed = true;
    if (name === "mark" && changed) {
      changed = false;
      empty.hidden = tree.nodes.size > 0;
      outline.element.hidden = !empty.hidden;
      const selected = tree.stretchOf(drawn.selected);
      outline.show(selected);
      if (panel.id) panel.show(selected);
      evictedNext.hidden = !tree.leaving.length;
      fill(
        evicted,
        tree.leaving.map(({ id, why }) => leavingRow(id, why)),
      );
      drawn.invalidate();
    }
  }
  let changed = false;

  /** @param {string} id @param {string} why */
  function leavingRow(id, why) {
    const stretch = tree.stretchOf(id);
    const text = stretch ? tokens(stretch.stop - stretch.start) : "a checkpoint";
    const show = h(
      "button",
      {
        type: "button",
        class: "plain little",
        disabled: !stretch,
        on: { click: () => stretch && select(tree.stretchOf(id), true) },
      },
      text,
    );
    return h("li", {}, show, " ", WHY[why] ?? why);
  }

  watch({ signal, say }, take);
}

/** @param {any} sizes */
function sizesText({ yours, others, tiers }) {
  const parts = [`${tokens(yours.tokens)} of yours`];
  if (others.tokens) parts.push(`${tokens(others.tokens)} of others`);
  for (const [name, tier] of Object.entries(tiers ?? {}))
    if (tier.budget) parts.push(`${name} ${bytes(tier.used)} of ${bytes(tier.budget)}`);
  return parts.join(" · ");
}

function legend() {
  /** @param {string} mark @param {string} text */
  const item = (mark, text) => h("li", {}, h("span", { class: `swatch ${mark}` }), text);
  return h(
    "ul",
    { class: "legend small", "aria-label": "Legend" },
    item("memory", "memory"),
    item("disk", "disk"),
    item("both", "both"),
    item("pinned", "pinned"),
    item("leaving", "evicted next"),
    item("checkpoint", "checkpoint"),
    h("li", { class: "quiet" }, "bright: used lately"),
  );
}

export function unmount() {
  picture?.hide();
  picture = null;
}
