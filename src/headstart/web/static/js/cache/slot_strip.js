/**
 * Slot strip: what each slot does.
 * @module
 */
import { fill, h, set } from "../dom.js";
import { count, left, tokens } from "../format.js";

/**
 * A slot, as events tell it. Of the slots of others only the number and the state are known.
 * @typedef {{slot: number, state: string, tokens?: number, total?: number, reply?: number, request?: number, left?: number}} Slot
 */

export class SlotStrip {
  constructor() {
    this.element = h("ul", { class: "slots", "aria-label": "Slots" });
    /** @type {Map<number, {row: HTMLElement, text: HTMLElement, bar: HTMLProgressElement}>} */
    this._rows = new Map();
  }

  /** @param {Slot[]} slots */
  show(slots) {
    for (const [number, { row }] of this._rows) {
      if (slots.some((slot) => slot.slot === number)) continue;
      row.remove(); // the server was started again, with fewer
      this._rows.delete(number);
    }
    for (const slot of slots) {
      const known = this._rows.get(slot.slot) ?? this._add(slot.slot);
      set(known.row, { "data-state": slot.state });
      fill(known.text, words(slot));
      const prefills = slot.state === "prefill" && Boolean(slot.total);
      known.bar.hidden = !prefills;
      if (prefills) set(known.bar, { value: slot.tokens, max: slot.total });
    }
  }

  /** @param {number} number */
  _add(number) {
    const text = h("span", { class: "number" });
    const bar = h("progress", { hidden: true, "aria-label": `Prefill of slot ${number}` });
    const row = h("li", { "data-state": "idle" }, h("strong", {}, `Slot ${number}`), text, bar);
    this.element.append(row);
    const made = { row, text, bar };
    this._rows.set(number, made);
    return made;
  }
}

/** @param {Slot} slot */
function words(slot) {
  if (slot.tokens === undefined) return slot.state === "idle" ? "idle" : "in use by others";
  if (slot.state === "prefill") {
    const rest = slot.left === undefined ? "" : `, ${left(slot.left)} left`;
    return `computes the prompt: ${count(slot.tokens)} of ${count(slot.total ?? 0)}${rest}`;
  }
  if (slot.state === "reply") return `replies: ${tokens(slot.reply ?? 0)}`;
  return slot.tokens ? `idle, holds ${tokens(slot.tokens)}` : "empty";
}
