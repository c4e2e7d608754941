// Runs the script of /docs over /openapi.json with as much of a document as it uses, opens everything, and prints the text.
import { readFileSync } from "node:fs";
const [page, given] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));
const described = JSON.parse(given);

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], listeners: {}, value: "", hidden: false, own: "" }); }
  set textContent(text) { this.own = String(text); this.children = []; }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  addEventListener(name, act) { this.listeners[name] = act; }
  insertRow() { const row = new Element("tr"); this.append(row); return row; }
  insertCell() { return this.insertRow(); }
  get rows() { return this.children; }
  text() { return [this.own, ...this.children.map((one) => one.text())].filter(Boolean).join("\n"); }
}
const ids = Object.fromEntries(["about", "ask", "key", "routes"].map((id) => [id, new Element(id)]));
ids.ask.hidden = true;
const asked = [];
globalThis.document = { createElement: (tag) => new Element(tag), getElementById: (id) => ids[id] };
globalThis.fetch = async (path, options) => {
  asked.push([path, options?.headers?.authorization ?? null]);
  const ok = options?.headers?.authorization === "Bearer right";
  return { ok, status: ok ? 200 : 401, json: async () => described };
};

// Schemas contain each other: each is opened once.
const seen = new Set();
const open = (element) => {
  const title = element.children[0]?.text();
  if (element.tag === "details" && !(element.children[0].own && seen.has(title))) {
    seen.add(title);
    element.open = true;
    element.listeners.toggle();
  }
  element.children.forEach(open);
};
const settled = () => new Promise((done) => setTimeout(done, 0));
new Function(/<script>([^]*)<\/script>/.exec(page)[1])();
await settled();
const first = { about: ids.about.text(), hidden: ids.ask.hidden };
ids.key.value = "right";
ids.ask.listeners.submit({ preventDefault() {} });
await settled();
open(ids.routes);
console.log(JSON.stringify({ first, asked, hidden: ids.ask.hidden, about: ids.about.text(), text: ids.routes.text() }));
