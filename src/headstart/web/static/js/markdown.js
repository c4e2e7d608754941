/**
 * Markdown: reads the Markdown that models write, as values; `chat/markdown_view.js` makes elements of them. HTML is text.
 *
 * Every text is Markdown: what is incomplete or wrong is text too. The time grows with the length of the text only, also for
 * texts that are made to be slow.
 *
 * @typedef {string | {kind: "strong" | "em" | "del", children: Inline[]} | {kind: "code", text: string}
 *   | {kind: "link", href: string, children: Inline[]}} Inline
 * @typedef {"" | "left" | "center" | "right"} Align
 * @typedef {{kind: "paragraph", children: Inline[]} | {kind: "heading", level: number, children: Inline[]}
 *   | {kind: "code", language: string, text: string} | {kind: "quote", blocks: Block[]} | {kind: "rule"}
 *   | {kind: "list", ordered: boolean, start: number, items: Block[][]}
 *   | {kind: "table", align: Align[], head: Inline[][], rows: Inline[][][], left: number}} Block
 *   `left`: rows that are left out
 * @module
 */

const DEEPEST = 6; // quotes and lists in each other
const MOST_INLINE = 5000; // pieces of one paragraph; what follows is plain text
const MOST_CELLS = 10_000; // of a table
const MOST_COLUMNS = 64;
const LONGEST_MARK = 1000; // characters of a line that can be a rule, a fence or the line below a table's head

const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)| *$)/;

/**
 * The blocks of a text.
 * @param {string} text
 * @returns {Block[]}
 */
export function parse(text) {
  return parseOpen(text).blocks;
}

/**
 * The blocks of a text that may go on, and the position where the last of them begins: what comes before it is complete.
 * @param {string} text
 * @returns {{blocks: Block[], last: number}}
 */
export function parseOpen(text) {
  const lines = text.split("\n");
  /** @type {number[]} */
  const starts = [];
  const blocks = blocksOf(lines, 0, starts);
  let last = 0;
  for (let line = 0; line < (starts.at(-1) ?? 0); line++) last += lines[line].length + 1;
  return { blocks, last };
}

/**
 * @param {string[]} lines
 * @param {number} depth
 * @param {number[]} [starts] receives the number of each block's first line
 * @returns {Block[]}
 */
function blocksOf(lines, depth, starts = []) {
  /** @type {Block[]} */
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    starts.push(at);
    const { block, end } =
      fence(lines, at) ??
      heading(lines, at) ??
      rule(lines, at) ??
      quote(lines, at, depth) ??
      list(lines, at, depth) ??
      table(lines, at) ??
      paragraph(lines, at, depth);
    found.push(block);
    at = end;
  }
  return found;
}

/** @typedef {{block: Block, end: number} | null} Found */

/** @param {string} line */
function isBlank(line) {
  return line.trim() === "";
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {Found}
 */
function fence(lines, at) {
  const opened = FENCE.exec(lines[at].slice(0, LONGEST_MARK));
  if (!opened || (opened[1][0] === "`" && opened[2].includes("`"))) return null;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], opened[1])) end++;
  const language = opened[2].trim().split(/\s/, 1)[0];
  return { block: { kind: "code", language, text: lines.slice(at + 1, end).join("\n") }, end: end + 1 };
}

/**
 * @param {string} line
 * @param {string} mark
 */
function closes(line, mark) {
  if (line.length > LONGEST_MARK) return false;
  const bare = line.trim();
  return bare.length >= mark.length && bare[0] === mark[0] && bare === mark[0].repeat(bare.length);
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {Found}
 */
function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = (found[2] ?? "").trimEnd().replace(/[ \t]#{1,6}$/, "");
  return { block: { kind: "heading", level: found[1].length, children: inline(text.trim()) }, end: at + 1 };
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {Found}
 */
function rule(lines, at) {
  if (lines[at].length > LONGEST_MARK || /^ {4}/.test(lines[at])) return null;
  const bare = lines[at].replaceAll(" ", "").trim();
  const isRule = bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
  return isRule ? { block: { kind: "rule" }, end: at + 1 } : null;
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {Found}
 */
function quote(lines, at, depth) {
  if (depth >= DEEPEST || !QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { block: { kind: "quote", blocks: blocksOf(inner, depth + 1) }, end };
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {Found}
 */
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (depth >= DEEPEST || !first) return null;
  const kind = kindOf(first[2]);
  /** @type {Block[][]} */
  const items = [];
  let end = at;
  for (;;) {
    const opened = end < lines.length ? ITEM.exec(lines[end]) : null;
    if (!opened || kindOf(opened[2]) !== kind || rule(lines, end)) break;
    const indent = opened[1].length + opened[2].length + (opened[3]?.length ?? 1);
    const inner = [lines[end].slice(indent)];
    end++;
    while (end < lines.length) {
      const line = lines[end];
      if (isBlank(line)) {
        let next = end;
        while (next < lines.length && isBlank(lines[next])) next++;
        if (next === lines.length || indentOf(lines[next]) < Math.min(indent, 2)) break;
        for (; end < next; end++) inner.push("");
      } else if (indentOf(line) >= Math.min(indent, 2)) {
        inner.push(line.slice(Math.min(indent, indentOf(line))));
        end++;
      } else if (ITEM.test(line) || startsBlock(lines, end, depth)) {
        break;
      } else {
        inner.push(line); // a paragraph goes on without indent
        end++;
      }
    }
    items.push(blocksOf(inner, depth + 1));
    let next = end;
    while (next < lines.length && isBlank(lines[next])) next++;
    if (next < lines.length && ITEM.test(lines[next])) end = next; // blank lines between items
  }
  const ordered = kind !== "-" && kind !== "*" && kind !== "+";
  return { block: { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items }, end };
}

/** @param {string} marker */
function kindOf(marker) {
  return /** @type {string} */ (marker.at(-1));
}

/** @param {string} line */
function indentOf(line) {
  let count = 0;
  while (line[count] === " ") count++;
  return count;
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {Found}
 */
function table(lines, at) {
  const align = alignOf(lines[at + 1]);
  if (!align || !lines[at].includes("|")) return null;
  const head = cells(lines[at]);
  if (head.length !== align.length) return null;
  const most = Math.ceil(MOST_CELLS / align.length);
  /** @type {Inline[][][]} */
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|") && !isBlank(lines[end]); end++) {
    if (rows.length < most) rows.push(padded(cells(lines[end]), align.length).map((cell) => inline(cell)));
  }
  return {
    block: { kind: "table", align, head: head.map((cell) => inline(cell)), rows, left: end - at - 2 - rows.length },
    end,
  };
}

/**
 * The columns of the line below a table's head; null if it is no such line.
 * @param {string | undefined} line
 * @returns {Align[] | null}
 */
function alignOf(line) {
  if (line === undefined || line.length > LONGEST_MARK || !line.includes("-") || !/^[-:| \t\r]+$/.test(line)) return null;
  const found = cells(line);
  if (!found.length || found.length > MOST_COLUMNS || (found.length === 1 && !line.includes("|"))) return null;
  if (!found.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return found.map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : "";
  });
}

/** @param {string} line */
function cells(line) {
  const found = line
    .trim()
    .split(/(?<!\\)\|/)
    .map((cell) => cell.replaceAll("\\|", "|").trim());
  if (found.length > 1 && found[0] === "") found.shift();
  if (found.length > 1 && found.at(-1) === "") found.pop();
  return found;
}

/**
 * @param {string[]} row
 * @param {number} length
 */
function padded(row, length) {
  return Array.from({ length }, (_, column) => row[column] ?? "");
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 */
function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end, depth)) end++;
  const text = lines
    .slice(at, end)
    .map((line) => line.trim())
    .join("\n");
  return { block: /** @type {Block} */ ({ kind: "paragraph", children: inline(text) }), end };
}

/**
 * Whether a line ends a paragraph. A number begins a list there only if it is 1: texts have years at the beginning of lines.
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 */
function startsBlock(lines, at, depth) {
  const line = lines[at];
  const item = depth < DEEPEST ? ITEM.exec(line) : null;
  if (item?.[3] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1)) return true;
  const isQuote = depth < DEEPEST && QUOTE.test(line);
  const isTable = line.includes("|") && alignOf(lines[at + 1])?.length === cells(line).length;
  return isQuote || isTable || HEADING.test(line) || fence(lines.slice(at, at + 1), 0) !== null || rule(lines, at) !== null;
}

// ── within a paragraph ──────────────────────────────────────────────────────────────────────────────────────────────

const MARK = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~~|!?\[|\]|https?:\/\//g;
const TARGET = /\(<?([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: {1,4}"[^"\n]*")? ?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`|[\]\\]+/y;
const WORD = /[\p{L}\p{N}_]/u;

/** @typedef {{kind: "" | "[" | "strong" | "em" | "del", mark: string, children: Inline[]}} Open what is not closed yet */

/**
 * @param {string} text
 * @param {number} [most] pieces; the rest is plain text
 * @returns {Inline[]}
 */
export function inline(text, most = MOST_INLINE) {
  /** @type {Open[]} */
  const stack = [{ kind: "", mark: "", children: [] }]; // at most: all emphasis in a link, so it is never deep
  const ticks = runs(text);
  const marks = new RegExp(MARK);
  let done = 0; // all before it is in the stack
  let pieces = 0;
  const top = () => /** @type {Open} */ (stack.at(-1));

  /** @param {Inline} piece */
  const put = (piece) => {
    const { children } = top();
    const before = children.length - 1;
    if (typeof piece !== "string") children.push(piece);
    else if (typeof children[before] === "string") children[before] += piece;
    else if (piece) children.push(piece);
  };
  /** @param {number} end */
  const putTextUntil = (end) => {
    if (end > done) put(text.slice(done, end));
    done = end;
  };
  /** What is open from a place on was never closed: its mark is text. @param {number} from */
  const giveUp = (from) => {
    while (stack.length > from) {
      const { mark, children } = /** @type {Open} */ (stack.pop());
      put(mark);
      for (const child of children) put(child);
    }
  };

  for (let found = marks.exec(text); found && pieces < most; found = marks.exec(text)) {
    const [mark] = found;
    const at = found.index;
    const end = at + mark.length;
    putTextUntil(at);
    done = end;
    if (mark[0] === "\\") {
      put(mark[1]);
    } else if (mark[0] === "`") {
      const close = ticks.after(mark.length, at);
      if (close < 0) {
        put(mark);
      } else {
        put({ kind: "code", text: codeOf(text.slice(end, close)) });
        done = marks.lastIndex = close + mark.length;
        pieces++;
      }
    } else if (mark.endsWith("[")) {
      // an image is a link too: the page loads nothing from elsewhere
      const before = stack.findIndex((one) => one.kind === "[");
      if (before >= 0) giveUp(before); // a link is in no link
      stack.push({ kind: "[", mark, children: [] });
    } else if (mark === "]") {
      const opened = stack.findIndex((one) => one.kind === "[");
      TARGET.lastIndex = end;
      const target = opened < 0 ? null : TARGET.exec(text);
      const href = target && safeAddress(target[1]);
      if (!target || !href) {
        if (opened >= 0) giveUp(opened);
        put("]");
      } else {
        giveUp(opened + 1);
        const { children } = /** @type {Open} */ (stack.pop());
        put({ kind: "link", href, children: children.length ? withoutLinks(children) : [href] });
        done = marks.lastIndex = TARGET.lastIndex;
        pieces++;
      }
    } else if (mark.startsWith("http")) {
      ADDRESS.lastIndex = at;
      const whole = ADDRESS.exec(text)?.[0] ?? mark;
      const address = trimmed(whole);
      const href = safeAddress(address);
      put(href ? { kind: "link", href, children: [address] } : whole);
      done = marks.lastIndex = at + (href ? address : whole).length;
      pieces++;
    } else {
      pieces += emphasis(mark, text[at - 1] ?? " ", text[end] ?? " ");
    }
  }
  putTextUntil(text.length);
  giveUp(1);
  return stack[0].children;

  /**
   * Closes and opens emphasis.
   * @param {string} run
   * @param {string} before the character before it
   * @param {string} after
   * @returns {number} how many pieces were closed
   */
  function emphasis(run, before, after) {
    const inWord = run[0] === "_" && WORD.test(before) && WORD.test(after);
    const opens = !/\s/.test(after) && !inWord;
    const shuts = !/\s/.test(before) && !inWord;
    let left = run.length;
    let closed = 0;
    while (shuts && left > 0) {
      const place = stack.findLastIndex((one) => one.mark[0] === run[0] && one.kind !== "[" && one.mark.length <= left);
      if (place < 0 || (stack[place].children.length === 0 && place === stack.length - 1)) break;
      giveUp(place + 1);
      const { kind, mark, children } = /** @type {Open} */ (stack.pop());
      put({ kind: /** @type {"em"} */ (kind), children });
      left -= mark.length;
      closed++;
    }
    while (opens && left > 0) {
      const length = run[0] === "~" || left >= 2 ? 2 : 1;
      const kind = run[0] === "~" ? "del" : length === 2 ? "strong" : "em";
      if (stack.some((one) => one.kind === kind)) break;
      stack.push({ kind, mark: run[0].repeat(length), children: [] });
      left -= length;
    }
    put(run[0].repeat(left));
    return closed;
  }
}

/**
 * The places of backticks, by the length of their run.
 * @param {string} text
 */
function runs(text) {
  /** @type {Map<number, {places: number[], next: number}>} */
  const known = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!known.has(run.length)) known.set(run.length, { places: [], next: 0 });
    known.get(run.length)?.places.push(index);
  }
  return {
    /**
     * The first run of a length after a place; -1 if there is none. Places are asked for in their order.
     * @param {number} length
     * @param {number} place
     */
    after(length, place) {
      const row = known.get(length);
      if (!row) return -1;
      while (row.next < row.places.length && row.places[row.next] <= place) row.next++;
      return row.places[row.next] ?? -1;
    },
  };
}

/** @param {string} text */
function codeOf(text) {
  const flat = text.replaceAll("\n", " ");
  return flat.length > 2 && flat.startsWith(" ") && flat.endsWith(" ") && flat.trim() ? flat.slice(1, -1) : flat;
}

/**
 * An address that a link may have, or "": of the web or of mail. All others are text, those that run a script among them.
 * @param {string} address
 */
export function safeAddress(address) {
  return /^(?:https?:\/\/|mailto:)./i.test(address) && address.length < 4000 && URL.canParse(address) ? address : "";
}

/**
 * An address in a text, without the punctuation behind it.
 * @param {string} address
 */
function trimmed(address) {
  let end = address.length;
  const opens = address.includes("(");
  while (end > 0 && (".,;:!?*_~".includes(address[end - 1]) || (address[end - 1] === ")" && !opens))) end--;
  return address.slice(0, end);
}

/**
 * @param {Inline[]} pieces
 * @returns {Inline[]}
 */
function withoutLinks(pieces) {
  return pieces.flatMap((piece) => {
    if (typeof piece === "string" || piece.kind === "code") return [piece];
    const children = withoutLinks(piece.children);
    return piece.kind === "link" ? children : [{ ...piece, children }];
  });
}
