/**
 * Main: the frame of the page. The part of the address behind `#/` names the view and what it shows: `#/requests/req_12`.
 *
 * A view is a module `views/NAME.js` with these functions. It is loaded when it is opened for the first time.
 *
 *     mount(element, context)   builds the view in an empty element, and begins what it watches
 *     unmount()                 ends all that; the element is emptied after it
 *     navigate(path)            optional: another path of the same view was opened. Without it, the view is mounted anew
 *
 * The context has
 *
 *     path      the parts of the address behind the name: ["req_12"]
 *     go(path, replace)   opens another path: go(["requests", "req_12"]). `replace` adds no step for the browser's Back
 *     say(text) shows a short message, which screen readers read
 *     signal    an AbortSignal, aborted at unmount: give it to `request`, `follow` and `addEventListener`
 *
 * To add a view, add its file and a line in VIEWS. What it needs is in `dom.js` (elements), `api.js` (requests and events),
 * `dialog.js` (questions), `format.js` (numbers) and `icons.js`. A style sheet of its own is a line in `index.html`.
 *
 * @typedef {object} Context
 * @property {string[]} path
 * @property {(path: string[], replace?: boolean) => void} go
 * @property {(text: string) => void} say
 * @property {AbortSignal} signal
 * @typedef {{mount: (element: HTMLElement, context: Context) => void | Promise<void>, unmount: () => void,
 *   navigate?: (path: string[]) => void}} View
 * @module
 */
import { key, onKeyNeeded, setKey } from "./api.js";
import { askForKey } from "./dialog.js";
import { fill, h } from "./dom.js";
import { checkHealth, onHealth } from "./health.js";
import { iconButton } from "./icons.js";

/** Names and titles, in the order of the tabs. */
const VIEWS = /** @type {const} */ ([
  ["chat", "Chat"],
  ["cache", "Cache"],
  ["requests", "Requests"],
  ["figures", "Figures"],
]);

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const tabs = /** @type {HTMLElement} */ (document.getElementById("tabs"));

/** @type {{name: string, view: View | null, ended: AbortController} | null} */
let open = null;

/** The name of the view and the path in it that the address names. */
function place() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
  const known = VIEWS.find(([name]) => name === parts[0]);
  return known ? { name: known[0], title: known[1], path: parts.slice(1) } : { name: "chat", title: "Chat", path: [] };
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * @param {string[]} path
 * @param {boolean} [replace]
 */
function go(path, replace = false) {
  const hash = `#/${path.map(encodeURIComponent).join("/")}`;
  if (hash === location.hash) return;
  if (!replace) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    show();
  }
}

async function show() {
  const { name, title, path } = place();
  document.title = `${title} – headstart`;
  for (const tab of tabs.children) {
    if (tab instanceof HTMLElement && tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  if (open?.name === name && open.view?.navigate) return open.view.navigate(path);
  close();
  const ended = new AbortController();
  const here = (open = { name, view: /** @type {View | null} */ (null), ended });
  try {
    const view = /** @type {View} */ (await import(`./views/${name}.js`));
    if (open !== here) return;
    here.view = view;
    await view.mount(main, { path, go, say, signal: ended.signal });
  } catch (error) {
    if (open !== here) return;
    console.error(error);
    const again = h("button", { on: { click: () => location.reload() } }, "Load the page again");
    fill(main, h("div", { class: "empty" }, h("p", {}, "This view could not be opened. The server may have stopped."), again));
  }
}

function close() {
  open?.ended.abort();
  open?.view?.unmount();
  open = null;
  main.replaceChildren();
  main.scrollTop = 0;
}

/** @param {string} text */
function say(text) {
  const toast = h("div", { class: "toast" }, text);
  document.getElementById("toasts")?.append(toast);
  setTimeout(() => toast.remove(), 4000);
}

// ── the tools on the right ──────────────────────────────────────────────────────────────────────────────────────────

const dark = matchMedia("(prefers-color-scheme: dark)");

function tools() {
  const { theme } = document.documentElement.dataset;
  const isDark = theme ? theme === "dark" : dark.matches;
  const forget = iconButton("key", "Forget the API key", () => {
    setKey("");
    location.reload();
  });
  const change = iconButton(isDark ? "light" : "dark", isDark ? "Light colours" : "Dark colours", () => {
    const chosen = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    try {
      localStorage.setItem("headstart.theme", chosen);
    } catch {
      // It lasts until the page is loaded again.
    }
    tools();
    /** @type {HTMLElement | null} */ (document.querySelector("#tools button:last-child"))?.focus();
  });
  const place = /** @type {HTMLElement} */ (document.getElementById("tools"));
  fill(place, key() ? forget : null, change);
}

// ── beginning ───────────────────────────────────────────────────────────────────────────────────────────────────────

onKeyNeeded(async (wrong) => {
  const given = await askForKey(wrong);
  setTimeout(tools);
  return given;
});
onHealth((message) => {
  const banner = /** @type {HTMLElement} */ (document.getElementById("banner"));
  banner.textContent = message;
  banner.hidden = !message;
});
fill(
  tabs,
  VIEWS.map(([name, title]) => h("a", { href: `#/${name}`, "data-view": name }, title)),
);
document.getElementById("skip")?.addEventListener("click", (event) => {
  event.preventDefault(); // `#main` would be an address of a view
  main.focus();
});
addEventListener("hashchange", show);
dark.addEventListener("change", tools);
tools();
checkHealth();
show();
