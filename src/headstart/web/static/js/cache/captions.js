/**
 * Captions: the first words of stretches, asked for when they are seen.
 * @module
 */
import { json } from "../api.js";

/** @typedef {import("./tree.js").Stretch} Stretch */

/** Tokens of a caption. */
const LENGTH = 40;
/** Most captions that are kept, and most that are asked for at a time. */
const [KEPT, AT_ONCE] = [400, 3];

export class Captions {
  /**
   * @param {() => void} arrived called when there is a new one
   * @param {AbortSignal} signal
   */
  constructor(arrived, signal) {
    this.arrived = arrived;
    this.signal = signal;
    /** By the id of the first node; "" where there is none (yet). @type {Map<string, string>} */
    this._texts = new Map();
    /** @type {Stretch[]} */
    this._wanted = [];
    this._asking = 0;
  }

  /** The caption of a stretch, "" if it is not known yet. Then it is asked for. @param {Stretch} stretch */
  of(stretch) {
    const known = this._texts.get(stretch.first.id);
    if (known !== undefined) return known;
    this._texts.set(stretch.first.id, "");
    this._wanted.push(stretch);
    this._ask();
    return "";
  }

  /** Nothing of it is kept. */
  clear() {
    this._texts.clear();
    this._wanted = [];
  }

  async _ask() {
    if (this._asking >= AT_ONCE) return;
    this._asking += 1;
    for (let one = this._wanted.pop(); one && !this.signal.aborted; one = this._wanted.pop()) {
      try {
        const { text } = await json(`headstart/cache/${one.id}/text?start=${one.start}&tokens=${LENGTH}`, {
          signal: this.signal,
        });
        this._texts.set(
          one.first.id,
          text
            .replace(/<\|[^|]*\|>|\s+/g, " ")
            .replace(/ +/g, " ")
            .trim(),
        );
        this.arrived();
      } catch {
        // It has left, or is of another owner: it stays without a caption.
      }
      for (const key of this._texts.keys()) {
        if (this._texts.size <= KEPT) break;
        this._texts.delete(key);
      }
    }
    this._asking -= 1;
  }
}
