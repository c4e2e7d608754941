/**
 * Settings view: what the requests of a conversation are sent with.
 * @module
 */
import { json } from "../api.js";
import { fill, h, set } from "../dom.js";

/** @typedef {import("../conversation.js").Settings} Settings */
/** @typedef {import("./session.js").Session} Session */

/** name, label, step, least, most */
const NUMBERS = /** @type {const} */ ([
  ["temperature", "Temperature", 0.05, 0, 2],
  ["top_p", "Top p", 0.01, 0, 1],
  ["top_k", "Top k", 1, 0, 1000000],
  ["min_p", "Min p", 0.01, 0, 1],
  ["max_tokens", "Most tokens", 1, 1, 1000000000],
  ["seed", "Seed", 1, 0, 9007199254740991],
]);

export class SettingsView {
  #session;
  #model = h("select", { name: "model" });
  #system = h("textarea", { name: "system", rows: 5, placeholder: "None" });
  #schema = h("textarea", {
    name: "schema",
    class: "mono",
    rows: 4,
    spellcheck: "false",
    placeholder: '{"type": "object", …}',
  });
  #tools = h("textarea", {
    name: "tools",
    class: "mono",
    rows: 4,
    spellcheck: "false",
    placeholder: '[{"name": "weather", "parameters": {…}}]',
  });
  #numbers = Object.fromEntries(
    NUMBERS.map(([name, , step, min, max]) => [
      name,
      h("input", { type: "number", name, step, min, max, inputmode: "decimal", placeholder: "Server’s" }),
    ]),
  );

  /** @param {Session} session */
  constructor(session) {
    this.#session = session;
    const numbers = NUMBERS.map(([name, label]) => h("label", {}, label, this.#numbers[name]));
    const fields = [
      h("label", {}, "Model", this.#model),
      h("label", {}, "System prompt", this.#system),
      h("div", { class: "numbers" }, numbers),
      h("label", {}, "JSON schema that replies follow", this.#schema),
      h(
        "label",
        {},
        "Tools, as JSON",
        this.#tools,
        h("span", { class: "quiet small" }, "The page shows calls, and you write their results."),
      ),
    ];
    this.element = h(
      "form",
      { class: "settings", "aria-label": "Settings of this conversation", on: { change: () => this.#take() } },
      h("h2", {}, "Settings"),
      fields,
    );
    this.element.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  /** Shows the settings of the conversation. */
  show() {
    const { settings } = this.#session.current;
    this.#system.value = settings.system;
    this.#schema.value = settings.schema;
    this.#tools.value = settings.tools;
    for (const [name] of NUMBERS) this.#numbers[name].value = settings[name] === null ? "" : String(settings[name]);
    this.#model.value = settings.model;
    this.#checkJson();
  }

  /** Asks the server for its models, and for what it does without settings. */
  async ask() {
    const [models, props] = await Promise.all([json("v1/models"), json("props").catch(() => ({}))]);
    const names = models.data.map((/** @type {any} */ one) => String(one.id));
    fill(
      this.#model,
      h("option", { value: "" }, names.length === 1 ? names[0] : "The server’s"),
      names.length > 1 ? names.map((/** @type {string} */ name) => h("option", { value: name }, name)) : null,
    );
    const usual = props.default_generation_settings?.params ?? {};
    for (const [name] of NUMBERS) if (typeof usual[name] === "number") set(this.#numbers[name], { placeholder: usual[name] });
    this.show();
    return names[0] ?? "";
  }

  async #take() {
    if (!this.#checkJson() || Object.values(this.#numbers).some((one) => !one.validity.valid)) return;
    const numbers = Object.entries(this.#numbers).map(([name, one]) => [name, one.value === "" ? null : one.valueAsNumber]);
    await this.#session.set({
      .../** @type {any} */ (Object.fromEntries(numbers)),
      model: this.#model.value,
      system: this.#system.value,
      schema: this.#schema.value,
      tools: this.#tools.value,
    });
  }

  /** Marks what is no JSON. Returns whether all is. */
  #checkJson() {
    return [this.#schema, this.#tools]
      .map((field) => {
        const isJson = field.value.trim() === "" || holdsJson(field.value);
        set(field, { "aria-invalid": isJson ? null : "true" });
        return isJson;
      })
      .every(Boolean);
  }
}

/** @param {string} text */
function holdsJson(text) {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}
