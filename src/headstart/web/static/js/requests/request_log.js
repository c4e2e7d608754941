/**
 * Request log: the latest requests, from the events of `headstart/events`. Pure: it knows no page.
 * @module
 */

/** Most requests that are kept. */
const MOST = 128;
const OVER = new Set(["stop", "length", "ended", "cancelled", "failed"]);

/**
 * A request. Times are in seconds since 1970; undefined as long as they are not known.
 * @typedef {object} LoggedRequest
 * @property {number} number
 * @property {string} id
 * @property {string} owner
 * @property {number} choice
 * @property {string} state
 * @property {boolean} over
 * @property {number} prompt tokens
 * @property {Record<string, number>} parts tokens of the prompt by where they came from
 * @property {number} [slot]
 * @property {number} arrived
 * @property {number} [began] it got a slot
 * @property {number} [first] its first token came
 * @property {number} [ended]
 * @property {string | null} cause
 * @property {number} cached
 * @property {number} computed
 * @property {number} recomputed
 * @property {number} completion
 * @property {number} [ttft]
 * @property {number} [decode] seconds
 */

export class RequestLog {
  constructor() {
    /** By number. @type {Map<number, LoggedRequest>} */
    this._rows = new Map();
  }

  /** The latest one first. @returns {LoggedRequest[]} */
  get latest() {
    return [...this._rows.values()].sort((a, b) => b.number - a.number);
  }

  /** Takes an event. Returns whether a request has changed. @param {string} name @param {any} data */
  apply(name, data) {
    if (name === "snapshot") this._rows.clear();
    else if (name === "requests") for (const one of data) this._take(one);
    else return false;
    for (const number of this._rows.keys()) {
      if (this._rows.size <= MOST) break;
      this._rows.delete(number);
    }
    return true;
  }

  /** @param {any} one */
  _take(one) {
    const known = this._rows.get(one.number);
    /** @type {LoggedRequest} */
    const row = {
      ...(known ?? { arrived: one.at, cause: null, cached: 0, computed: 0, recomputed: 0, completion: 0, parts: {} }),
      ...{
        number: one.number,
        id: one.id,
        owner: one.owner,
        choice: one.choice,
        state: one.state,
        prompt: one.prompt,
        slot: one.slot,
      },
      over: OVER.has(one.state),
    };
    if (one.state === "prefill") {
      row.began = one.at;
      row.cached = one.cached;
      row.parts = parts(one.prompt, one.cached, one.tiers, 0, 0);
    }
    if (one.seconds) {
      const { ttft, prefill, decode } = one.seconds;
      row.first = one.at - decode;
      row.began = row.first - prefill;
      row.arrived = row.first - ttft;
      Object.assign(row, {
        ttft: one.state === "cancelled" && !one.completion ? undefined : ttft,
        decode,
        cause: one.cause,
        cached: one.cached,
        computed: one.computed,
        recomputed: one.recomputed,
        completion: one.completion,
      });
      row.parts = parts(one.prompt, one.cached, one.tiers, one.computed, one.recomputed);
    }
    if (row.over) row.ended = one.at;
    this._rows.set(row.number, row);
  }
}

/**
 * @param {number} prompt
 * @param {number} cached
 * @param {Record<string, number>} tiers tokens that were restored from each
 * @param {number} computed
 * @param {number} recomputed
 * @returns {Record<string, number>}
 */
function parts(prompt, cached, tiers, computed, recomputed) {
  const restored = Object.values(tiers).reduce((sum, one) => sum + one, 0);
  const again = Math.min(recomputed, computed);
  return {
    slot: Math.max(0, cached - restored),
    ...tiers,
    computed: computed - again,
    again,
    waiting: Math.max(0, prompt - cached - computed),
  };
}

// ── the time line ───────────────────────────────────────────────────────────────────────────────────────────────────

/** Seconds without any request that are left out of a time line, and how many are shown in their place. */
const IDLE = 1.5;

/** A phase of a request, from 0 to 1 of the time line. @typedef {{name: string, from: number, to: number}} Phase */

export class Timeline {
  /**
   * One time line for requests. Times in which there was none are cut short.
   * @param {LoggedRequest[]} rows
   * @param {number} now
   */
  constructor(rows, now) {
    const spans = rows.map((row) => ({ from: row.arrived, to: endOf(row, now) })).sort((a, b) => a.from - b.from);
    /** Where each busy time begins, and the seconds before it on the line. @type {{from: number, to: number, at: number}[]} */
    this._busy = [];
    let at = 0;
    for (const { from, to } of spans) {
      const last = this._busy.at(-1);
      if (last && from - last.to <= IDLE) last.to = Math.max(last.to, to);
      else {
        if (last) at = last.at + (last.to - last.from) + IDLE / 2;
        this._busy.push({ from, to, at });
      }
    }
    const last = this._busy.at(-1);
    /** Seconds on the line. */
    this.length = last ? Math.max(0.001, last.at + last.to - last.from) : 1;
    /** Where time was cut, from 0 to 1. */
    this.cuts = this._busy.slice(1).map((one) => (one.at - IDLE / 4) / this.length);
    this._now = now;
  }

  /** @param {number} time */
  _place(time) {
    const busy = this._busy.findLast((one) => one.from <= time) ?? { from: time, to: time, at: 0 };
    return (busy.at + Math.min(time, busy.to) - busy.from) / this.length;
  }

  /** @param {LoggedRequest} row @returns {Phase[]} */
  phases(row) {
    const end = endOf(row, this._now);
    /** @type {[string, number | undefined, number | undefined][]} */
    const found = [
      ["queue", row.arrived, row.began ?? end],
      ["prefill", row.began, row.first ?? end],
      ["decode", row.first, end],
    ];
    return found.flatMap(([name, from, to]) =>
      from === undefined || to === undefined || to <= from ? [] : [{ name, from: this._place(from), to: this._place(to) }],
    );
  }
}

/** @param {LoggedRequest} row @param {number} now */
function endOf(row, now) {
  return row.ended ?? Math.max(now, row.arrived);
}
