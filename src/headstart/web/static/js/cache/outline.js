/**
 * Outline: the tree of stretches for keyboards and screen readers. Of a large tree it has the selected stretch, those before it, its
 * neighbours and its branches.
 * @module
 */
import { fill, h, set } from "../dom.js";
import { count, tokens } from "../format.js";
import { age, where, WHY } from "../tiers.js";

/** @typedef {import("./tree.js").CacheTree} CacheTree */
/** @typedef {import("./tree.js").Stretch} Stretch */

/** Most neighbours on a side. */
const NEAR = 8;

export class Outline {
  /**
   * @param {CacheTree} tree
   * @param {(stretch: Stretch) => void} select
   * @param {HTMLElement} picture what it stands for; it gets the keys
   */
  constructor(tree, select, picture) {
    this.tree = tree;
    this.select = select;
    this.list = h("div", { class: "sr", role: "group" });
    this.element = h(
      "div",
      {
        class: "outline",
        role: "tree",
        tabindex: "0",
        "aria-label": "Tree of what is stored",
        on: { keydown: (/** @type {KeyboardEvent} */ event) => this._key(event) },
      },
      picture,
      this.list,
    );
    /** @type {Stretch | undefined} */
    this.current = undefined;
  }

  /** Shows what surrounds a stretch. @param {Stretch | undefined} stretch */
  show(stretch) {
    this.current = stretch;
    /** @type {[Stretch, Stretch[], number][]} with its siblings and its level */
    const rows = [];
    const path = [];
    for (let one = stretch; one; one = one.parent ?? undefined) path.unshift(one);
    if (!stretch) for (const one of this.tree.stretches.slice(0, NEAR)) rows.push([one, this.tree.stretches, 1]);
    path.forEach((one, depth) => {
      const siblings = this._siblings(one);
      const at = siblings.indexOf(one);
      const near = one === stretch ? siblings.slice(Math.max(0, at - NEAR), at + NEAR + 1) : [one];
      for (const sibling of near) {
        rows.push([sibling, siblings, depth + 1]);
        if (sibling === stretch)
          for (const child of stretch.children.slice(0, NEAR)) rows.push([child, stretch.children, depth + 2]);
      }
    });
    fill(
      this.list,
      rows.map(([one, siblings, level]) => this._row(one, siblings, level)),
    );
    set(this.element, { "aria-activedescendant": stretch ? rowId(stretch) : null });
  }

  /** @param {Stretch} one @param {Stretch[]} siblings @param {number} level */
  _row(one, siblings, level) {
    return h(
      "div",
      {
        role: "treeitem",
        id: rowId(one),
        "aria-level": level,
        "aria-setsize": siblings.length,
        "aria-posinset": siblings.indexOf(one) + 1,
        "aria-selected": one === this.current ? "true" : "false",
        "aria-expanded": one.children.length ? (one === this.current ? "true" : "false") : null,
      },
      describe(one, this.tree),
    );
  }

  /** @param {Stretch} one */
  _siblings(one) {
    return one.parent ? one.parent.children : this.tree.stretches;
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const next = this._next(event.key);
    if (!next) return;
    event.preventDefault();
    this.select(next);
  }

  /** @param {string} key @returns {Stretch | undefined} */
  _next(key) {
    const one = this.current;
    if (!one) return ["ArrowRight", "ArrowDown", "Home", "Enter"].includes(key) ? this.tree.stretches[0] : undefined;
    const siblings = this._siblings(one);
    const at = siblings.indexOf(one);
    if (key === "ArrowRight") return one.children[0];
    if (key === "ArrowLeft") return one.parent ?? undefined;
    if (key === "ArrowDown") return siblings[at + 1] ?? this._beside(one, 1);
    if (key === "ArrowUp") return siblings[at - 1] ?? this._beside(one, -1);
    if (key === "Home") return siblings[0];
    if (key === "End") return siblings.at(-1);
    return key === "Enter" ? one : undefined;
  }

  /** The stretch below or above the branches of a stretch's parents. @param {Stretch} one @param {number} step */
  _beside(one, step) {
    for (let above = one.parent; above; above = above.parent) {
      const siblings = this._siblings(above);
      const next = siblings[siblings.indexOf(above) + step];
      if (next) return next;
    }
    return undefined;
  }
}

/** @param {Stretch} stretch */
function rowId(stretch) {
  return `stretch-${stretch.id}`;
}

/** One sentence about a stretch. @param {Stretch} stretch @param {CacheTree} tree */
export function describe(stretch, tree) {
  const { last } = stretch;
  const parts = [
    `${tokens(stretch.stop - stretch.start)} from ${count(stretch.start)} on`,
    where(last.tiers),
    `used: ${age(stretch.used, Date.now() / 1000)}`,
  ];
  if (last.pinned) parts.push("pinned");
  if (stretch.checkpoints.length)
    parts.push(stretch.checkpoints.length === 1 ? "1 checkpoint" : `${stretch.checkpoints.length} checkpoints`);
  if (stretch.children.length > 1) parts.push(`${count(stretch.children.length)} branches follow`);
  const leaving = tree.leaving.find((one) => one.id === stretch.id);
  if (leaving) parts.push(`evicted next. ${WHY[leaving.why] ?? ""}`);
  return parts.join(", ");
}
