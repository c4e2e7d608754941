import { h } from "../dom.js";

/** @param {HTMLElement} element */
export function mount(element) {
  element.append(h("p", { class: "empty" }, "This view comes next."));
}

export function unmount() {}
