/**
 * Text diff: what differs between two short texts.
 * @module
 */

/** A run of characters; `same`: the other text has it too. @typedef {{text: string, same: boolean}} Run */

/** Characters of a text that are compared. */
const MOST = 400;

/**
 * The longest common subsequence of characters, as runs of both texts.
 * @param {string} one
 * @param {string} other
 * @returns {[Run[], Run[]]}
 */
export function diff(one, other) {
  const [a, b] = [words(one), words(other)];
  const rows = a.length + 1;
  const columns = b.length + 1;
  const lengths = new Uint16Array(rows * columns);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const at = i * columns + j;
      lengths[at] = a[i] === b[j] ? lengths[at + columns + 1] + 1 : Math.max(lengths[at + columns], lengths[at + 1]);
    }
  }
  /** @type {[Run[], Run[]]} */
  const runs = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(runs[0], a[i++], true);
      add(runs[1], b[j++], true);
    } else if (j >= b.length || (i < a.length && lengths[(i + 1) * columns + j] >= lengths[i * columns + j + 1]))
      add(runs[0], a[i++], false);
    else add(runs[1], b[j++], false);
  }
  return runs;
}

/** Words, blanks and single marks. @param {string} text */
function words(text) {
  return text.slice(0, MOST).match(/[\p{L}\p{N}_]+|\s+|[^]/gu) ?? [];
}

/** @param {Run[]} runs @param {string} text @param {boolean} same */
function add(runs, text, same) {
  const last = runs.at(-1);
  if (last?.same === same) last.text += text;
  else runs.push({ text, same });
}
