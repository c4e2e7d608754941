/**
 * Icicle: where the stretches of a tree are drawn. Pure: it knows no page.
 *
 * A chain goes from left to right: a token is as wide as any other. Branches are below each other, each on its lane. What would be
 * smaller than a few pixels is one group.
 * @module
 */

/** @typedef {import("./tree.js").Stretch} Stretch */
/** @typedef {import("./tree.js").CacheTree} CacheTree */

/**
 * What is seen of the tree.
 * @typedef {object} Window
 * @property {number} x the first token that is seen
 * @property {number} y the first lane
 * @property {number} token pixels a token
 * @property {number} lane pixels a lane
 * @property {number} width pixels
 * @property {number} height pixels
 */

/**
 * A rectangle to draw: a stretch, or a group of what is too small.
 * @typedef {object} Box
 * @property {number} x
 * @property {number} y
 * @property {number} width
 * @property {number} height
 * @property {Stretch} stretch of a group, its first one
 * @property {number} group how many branches a group has; 0 for a stretch
 */

/** Pixels below which branches are a group. */
export const SMALL = 4;
/** Most pixels of a lane. */
export const TALL = 34;

/**
 * The window that shows all.
 * @param {CacheTree} tree
 * @param {number} width
 * @param {number} height
 * @returns {Window}
 */
export function whole(tree, width, height) {
  const lane = Math.min(TALL, height / Math.max(1, tree.lanes));
  return { x: 0, y: 0, token: width / Math.max(1, tree.reach), lane, width, height };
}

/**
 * Changes the scale of a window. The place at `x`, `y` stays where it is.
 * @param {Window} window
 * @param {CacheTree} tree
 * @param {number} x
 * @param {number} y
 * @param {number} wider
 * @param {number} taller
 * @returns {Window}
 */
export function zoomed(window, tree, x, y, wider, taller) {
  const all = whole(tree, window.width, window.height);
  const token = Math.min(Math.max(window.token * wider, all.token), Math.max(all.token, 8));
  const lane = Math.min(Math.max(window.lane * taller, all.lane), TALL);
  const at = { x: window.x + x / window.token, y: window.y + y / window.lane };
  return inside({ ...window, token, lane, x: at.x - x / token, y: at.y - y / lane }, tree);
}

/**
 * A window that does not leave the tree.
 * @param {Window} window
 * @param {CacheTree} tree
 * @returns {Window}
 */
export function inside(window, tree) {
  const x = Math.min(window.x, tree.reach - window.width / window.token);
  const y = Math.min(window.y, tree.lanes - window.height / window.lane);
  return { ...window, x: Math.max(0, x), y: Math.max(0, y) };
}

/**
 * The boxes in a window, parents before children. It looks only at what is seen, and not below groups.
 * @param {CacheTree} tree
 * @param {Window} window
 * @returns {Box[]}
 */
export function layout(tree, window) {
  /** @type {Box[]} */
  const boxes = [];
  siblings(tree.stretches, window, boxes);
  return boxes;
}

/** @param {Stretch[]} stretches @param {Window} window @param {Box[]} boxes */
function siblings(stretches, window, boxes) {
  const top = window.y;
  const bottom = window.y + window.height / window.lane;
  for (let at = firstBelow(stretches, top); at < stretches.length && stretches[at].lane < bottom; at += 1) {
    const one = stretches[at];
    if (one.lanes * window.lane >= SMALL || stretches.length === 1) {
      stretch(one, window, boxes);
      continue;
    }
    let lanes = 0;
    let [reach, start] = [0, Infinity];
    let end = at;
    for (; end < stretches.length && stretches[end].lanes * window.lane < SMALL && lanes * window.lane < SMALL; end += 1) {
      lanes += stretches[end].lanes;
      reach = Math.max(reach, stretches[end].reach);
      start = Math.min(start, stretches[end].start);
    }
    const x = (start - window.x) * window.token;
    const right = (reach - window.x) * window.token;
    if (right > 0 && x < window.width) {
      boxes.push({
        x,
        y: (one.lane - window.y) * window.lane,
        width: right - x,
        height: lanes * window.lane,
        stretch: one,
        group: lanes,
      });
    }
    at = end - 1;
  }
}

/** @param {Stretch} one @param {Window} window @param {Box[]} boxes */
function stretch(one, window, boxes) {
  const x = (one.start - window.x) * window.token;
  const right = (one.reach - window.x) * window.token;
  if (right <= 0 || x >= window.width) return;
  const y = (one.lane - window.y) * window.lane;
  const height = one.lanes * window.lane;
  if (one.children.length && (right - x < SMALL || height < SMALL)) {
    boxes.push({ x, y, width: right - x, height, stretch: one, group: one.lanes });
    return;
  }
  const width = (one.stop - one.start) * window.token;
  if (x + width > 0) boxes.push({ x, y, width, height, stretch: one, group: 0 });
  siblings(one.children, window, boxes);
}

/** The first of siblings that ends below a lane. @param {Stretch[]} stretches @param {number} lane */
function firstBelow(stretches, lane) {
  let [low, high] = [0, stretches.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stretches[middle].lane + stretches[middle].lanes <= lane) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The box at a place, the deepest one.
 * @param {Box[]} boxes
 * @param {number} x
 * @param {number} y
 * @returns {Box | undefined}
 */
export function boxAt(boxes, x, y) {
  return boxes.findLast((box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height);
}
