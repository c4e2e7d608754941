/**
 * Icons: drawn here, so that no font and no file is loaded.
 * @module
 */
import { h, s } from "./dom.js";

const PATHS = {
  add: ["M12 5v14", "M5 12h14"],
  close: ["M6 6l12 12", "M18 6L6 18"],
  copy: ["M9 9h10v10H9z", "M15 9V5H5v10h4"],
  dark: ["M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z"],
  delete: ["M5 7h14", "M9 7V4h6v3", "M7 7l1 13h8l1-13"],
  edit: ["M4 20l1-4L16.5 4.5l3 3L8 19z"],
  export: ["M12 4v11", "M7 10l5 5 5-5", "M5 20h14"],
  import: ["M12 15V4", "M7 9l5-5 5 5", "M5 20h14"],
  key: ["M15 9a4 4 0 1 1-4 4", "M11.5 12.5L4 20v0h3v-3h3"],
  left: ["M14 6l-6 6 6 6"],
  light: [
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z",
    "M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M19 5l-1.5 1.5M6.5 17.5L5 19",
  ],
  menu: ["M4 7h16", "M4 12h16", "M4 17h16"],
  repeat: ["M20 11A8 8 0 1 0 18 17", "M20 5v6h-6"],
  right: ["M10 6l6 6-6 6"],
  send: ["M12 19V5", "M6 11l6-6 6 6"],
  settings: [
    "M4 7h9M19 7h1M4 17h1M11 17h9",
    "M16 4.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
    "M8 14.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
  ],
  stop: ["M7 7h10v10H7z"],
  system: ["M4 5h16v11H4z", "M9 20h6", "M12 16v4"],
};

/** @param {keyof typeof PATHS} name */
export function icon(name) {
  const paths = PATHS[name].map((d) => s("path", { d }));
  return s("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, ...paths);
}

/**
 * A button with an icon and no text: its name is for screen readers, and is shown when the pointer rests on it.
 * @param {keyof typeof PATHS} name
 * @param {string} label
 * @param {(event: Event) => void} click
 * @param {import("./dom.js").Attributes} [more]
 */
export function iconButton(name, label, click, more = {}) {
  const attributes = { type: "button", class: "plain icon", "aria-label": label, title: label, on: { click }, ...more };
  return h("button", attributes, icon(name));
}
