/**
 * Tree: what is stored, from the events of `/headstart/events`. Pure: it knows no page.
 *
 * Entries become nodes. A run of nodes without branches that are in the same state is one stretch. What a view draws is a tree of
 * stretches, which is made again only when something has changed.
 * @module
 */

/**
 * An entry that is stored: a block or an open tail.
 * @typedef {object} Node
 * @property {string} id
 * @property {string | null} parent
 * @property {string} owner
 * @property {number} start position of its first token
 * @property {number} tokens
 * @property {Tiers} tiers
 * @property {boolean} pinned
 * @property {number} used when it was used last, in seconds since 1970; 0 if unknown
 * @property {number} order its place among its siblings
 * @property {Node[]} children
 * @property {Tiers | null} checkpoint where the checkpoint at its end is
 */

/** Whether an entry is canonical, by the name of the tier. @typedef {Record<string, boolean>} Tiers */

/**
 * A run of nodes in one state.
 * @typedef {object} Stretch
 * @property {string} id of its last node, which names it
 * @property {Node} first
 * @property {Node} last
 * @property {number} count its nodes
 * @property {number} start
 * @property {number} stop
 * @property {number} used the latest use of its nodes
 * @property {Stretch | null} parent
 * @property {Stretch[]} children
 * @property {number} lanes the branches that end in it or below it; at least 1
 * @property {number} lane the first of these
 * @property {number} reach the last position in it or below it
 * @property {number} below nodes in it and below it
 * @property {number} newest the latest use in it or below it
 * @property {number} evicted the first place in the list of what is evicted next, in it or below it; 0 if it is in none
 * @property {number[]} checkpoints positions of checkpoints
 */

/** Why an entry is evicted next. @typedef {{id: string, why: string}} Leaving */

export class CacheTree {
  constructor() {
    /** @type {Map<string, Node>} */
    this.nodes = new Map();
    /** What is evicted next, the first one first. @type {Leaving[]} */
    this.leaving = [];
    /** Counts changes. */
    this.version = 0;
    /** The reader, as an owner. */
    this.owner = "";
    /** Checkpoints by their id: the id of the node at whose end each is. @type {Map<string, string>} */
    this._checkpoints = new Map();
    /** Checkpoints that came before their node. @type {Map<string, Tiers>} */
    this._early = new Map();
    /** Nodes whose parent is not stored (yet), by the id of that. @type {Map<string, Set<Node>>} */
    this._orphans = new Map();
    /** @type {Set<Node>} */
    this._roots = new Set();
    this._order = 0;
    /** @type {Stretch[]} */
    this._stretches = [];
    /** @type {Map<string, Stretch>} */
    this._stretchOf = new Map();
    this._made = -1;
  }

  /**
   * Takes an event. Returns whether the tree has changed.
   * @param {string} name
   * @param {any} data
   */
  apply(name, data) {
    if (name === "snapshot") this._clear(data.owner);
    else if (name === "tree") for (const item of data) this._item(item);
    else if (name === "evicted_next") this.leaving = data;
    else if (name === "requests") {
      const began = data.filter((/** @type {any} */ one) => one.reused);
      if (!began.length) return false;
      for (const one of began) this.use(one.reused, one.at - (one.seconds ? one.seconds.prefill + one.seconds.decode : 0));
    } else return false;
    this.version += 1;
    return true;
  }

  /** @param {string} owner */
  _clear(owner) {
    this.owner = owner;
    this.nodes.clear();
    this.leaving = [];
    this._checkpoints.clear();
    this._early.clear();
    this._orphans.clear();
    this._roots.clear();
  }

  /** @param {any} item */
  _item(item) {
    const now = Date.now() / 1000;
    if ("left" in item) this._leave(item.left);
    else if (this._checkpoints.has(item.id)) this._mark(item.id, this._checkpoints.get(item.id) ?? "", item.tiers);
    else if (item.checkpoint) this._mark(item.id, item.parent, item.tiers);
    else if (this.nodes.has(item.id))
      Object.assign(/** @type {Node} */ (this.nodes.get(item.id)), { tiers: item.tiers, pinned: item.pinned });
    else if ("start" in item) {
      /** @type {Node} */
      const node = {
        id: item.id,
        parent: item.parent,
        owner: item.owner,
        start: item.start,
        tokens: item.tokens,
        tiers: item.tiers,
        pinned: item.pinned,
        used: item.seconds_ago === null ? 0 : now - item.seconds_ago,
        order: (this._order += 1),
        children: [],
        checkpoint: this._early.get(item.id) ?? null,
      };
      this.nodes.set(node.id, node);
      this._early.delete(node.id);
      this._attach(node);
      const waiting = this._orphans.get(node.id);
      this._orphans.delete(node.id);
      for (const child of waiting ?? []) {
        this._roots.delete(child);
        node.children.push(child);
      }
    }
  }

  /** @param {Node} node */
  _attach(node) {
    const parent = node.parent === null ? undefined : this.nodes.get(node.parent);
    if (parent) {
      parent.children.push(node);
      return;
    }
    this._roots.add(node);
    if (node.parent === null) return;
    const waiting = this._orphans.get(node.parent) ?? new Set();
    this._orphans.set(node.parent, waiting.add(node));
  }

  /** @param {string} id @param {string} at @param {Tiers | null} tiers */
  _mark(id, at, tiers) {
    const node = this.nodes.get(at);
    if (tiers) this._checkpoints.set(id, at);
    else this._checkpoints.delete(id);
    if (node) node.checkpoint = tiers;
    else if (tiers) this._early.set(at, tiers);
    else this._early.delete(at);
  }

  /** @param {string} id */
  _leave(id) {
    const at = this._checkpoints.get(id);
    if (at !== undefined) this._mark(id, at, null);
    const node = this.nodes.get(id);
    if (!node) return;
    this.nodes.delete(id);
    const parent = node.parent === null ? undefined : this.nodes.get(node.parent);
    if (parent) parent.children.splice(parent.children.indexOf(node), 1);
    this._roots.delete(node);
    const waiting = node.parent === null ? undefined : this._orphans.get(node.parent);
    if (waiting?.delete(node) && !waiting.size) this._orphans.delete(/** @type {string} */ (node.parent));
    if (node.checkpoint) this._early.set(id, node.checkpoint);
    for (const child of node.children) this._attach(child);
  }

  /**
   * A prompt uses a node and all before it.
   * @param {string} id
   * @param {number} at in seconds since 1970
   */
  use(id, at) {
    for (let node = this.nodes.get(id); node; node = node.parent === null ? undefined : this.nodes.get(node.parent)) {
      node.used = Math.max(node.used, at);
    }
  }

  /** Whether the beginning of a node's chain is stored. Without it the node cannot be used. @param {Node} node */
  static isRoot(node) {
    return node.parent === null;
  }

  // ── stretches ─────────────────────────────────────────────────────────────────────────────────────────────────────

  /** The stretches that begin chains, from top to bottom. @returns {Stretch[]} */
  get stretches() {
    if (this._made !== this.version) this._make();
    return this._stretches;
  }

  /** The stretch that contains a node. @param {string} id @returns {Stretch | undefined} */
  stretchOf(id) {
    if (this._made !== this.version) this._make();
    return this._stretchOf.get(id);
  }

  /** The branches of all chains. */
  get lanes() {
    const last = this.stretches.at(-1);
    return last ? last.lane + last.lanes : 0;
  }

  /** The last position of the longest chain. */
  get reach() {
    return this.stretches.reduce((most, one) => Math.max(most, one.reach), 0);
  }

  _make() {
    const leaving = new Map(this.leaving.map((one, number) => [one.id, number + 1]));
    const roots = [...this._roots].sort(
      (a, b) =>
        this._rank(a.owner) - this._rank(b.owner) || (a.owner < b.owner ? -1 : a.owner > b.owner ? 1 : 0) || a.order - b.order,
    );
    this._stretchOf = new Map();
    this._stretches = roots.map((root) => this._run(root, null, leaving));
    /** @type {Stretch[]} parents before children */
    const all = [];
    const open = [...this._stretches];
    while (open.length) {
      const one = /** @type {Stretch} */ (open.pop());
      all.push(one);
      const children = [...one.last.children].sort((a, b) => a.order - b.order);
      one.children = children.map((child) => this._run(child, one, leaving));
      open.push(...one.children);
    }
    for (const one of all.reverse()) {
      one.lanes = one.children.length ? 0 : 1;
      for (const child of one.children) {
        one.lanes += child.lanes;
        one.reach = Math.max(one.reach, child.reach);
        one.below += child.below;
        one.newest = Math.max(one.newest, child.newest);
        if (child.evicted && (!one.evicted || child.evicted < one.evicted)) one.evicted = child.evicted;
      }
    }
    let lane = 0;
    for (const one of this._stretches) {
      one.lane = lane;
      lane += one.lanes;
    }
    for (const one of all.reverse()) {
      let next = one.lane;
      for (const child of one.children) {
        child.lane = next;
        next += child.lanes;
      }
    }
    this._made = this.version;
  }

  /** The reader's own come first. @param {string} owner */
  _rank(owner) {
    return owner === this.owner ? 0 : 1;
  }

  /**
   * The stretch that begins with a node; without what follows it.
   * @param {Node} first
   * @param {Stretch | null} parent
   * @param {Map<string, number>} leaving
   * @returns {Stretch}
   */
  _run(first, parent, leaving) {
    const state = stateOf(first, leaving);
    const checkpoints = first.checkpoint ? [first.start + first.tokens] : [];
    let last = first;
    let count = 1;
    let used = first.used;
    const inside = [first.id];
    while (last.children.length === 1 && stateOf(last.children[0], leaving) === state) {
      last = last.children[0];
      count += 1;
      used = Math.max(used, last.used);
      inside.push(last.id);
      if (last.checkpoint) checkpoints.push(last.start + last.tokens);
    }
    const stop = last.start + last.tokens;
    const evicted = leaving.get(last.id) ?? 0;
    const stretch = {
      id: last.id,
      first,
      last,
      count,
      start: first.start,
      stop,
      used,
      parent,
      children: [],
      lanes: 1,
      lane: 0,
      reach: stop,
      below: count,
      newest: used,
      evicted,
      checkpoints,
    };
    for (const id of inside) this._stretchOf.set(id, stretch);
    return stretch;
  }
}

/** What makes two nodes look different. @param {Node} node @param {Map<string, number>} leaving */
function stateOf(node, leaving) {
  return `${"memory" in node.tiers ? 1 : 0}${"disk" in node.tiers ? 1 : 0}${node.pinned ? 1 : 0}${leaving.has(node.id) ? node.id : ""}`;
}
