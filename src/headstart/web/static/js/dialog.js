/**
 * Dialog: questions to the user, in front of the page.
 * @module
 */
import { h } from "./dom.js";

/**
 * Shows a form in front of the page. Escape and the button Cancel end it.
 * @template T
 * @param {string} title
 * @param {import("./dom.js").Child[]} content
 * @param {{ok?: string, danger?: boolean, read?: () => T}} [options] `read`: what the form says, read when it is sent
 * @returns {Promise<T | true | null>} null if the user cancels
 */
export function ask(title, content, { ok = "OK", danger = false, read } = {}) {
  return new Promise((resolve) => {
    /** @type {T | true | null} */
    let answer = null;
    const heading = h("h2", { id: "dialog-title" }, title);
    const buttons = h(
      "div",
      { class: "row" },
      h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"),
      h("button", { class: danger ? "danger" : "primary" }, ok),
    );
    const form = h("form", { method: "dialog", on: { submit } }, heading, ...content, buttons);
    /** @param {Event} event */
    function submit(event) {
      event.preventDefault(); // the policy of the page lets no form be sent
      answer = read ? read() : true;
      dialog.close();
    }
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * A question before something is lost.
 * @param {string} title
 * @param {string} text
 * @param {string} ok
 * @returns {Promise<boolean>}
 */
export async function confirmed(title, text, ok) {
  return (await ask(title, [h("p", {}, text)], { ok, danger: true })) !== null;
}

/**
 * Asks for the key of the server.
 * @param {boolean} wrong whether the last one was refused
 * @returns {Promise<string | null>}
 */
export async function askForKey(wrong) {
  const input = h("input", {
    type: "password",
    autocomplete: "off",
    required: true,
    autofocus: true,
    "aria-invalid": wrong && "true",
  });
  const label = h("label", {}, "API key", input);
  const note = "It is kept in this tab until you close it, and is sent to this server only.";
  const said = wrong ? h("p", { class: "bad", role: "alert" }, "The server does not know this key.") : null;
  const content = [said, label, h("p", { class: "quiet small" }, note)];
  const given = await ask("This server needs a key", content, { ok: "Use it", read: () => input.value.trim() });
  return typeof given === "string" && given ? given : null;
}
