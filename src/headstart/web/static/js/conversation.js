/**
 * Conversation: a tree of messages. An edit makes a branch beside the message that was edited. Nothing is lost. Pure: no DOM.
 *
 * @typedef {"user" | "assistant" | "tool"} Role
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {"done" | "running" | "stopped" | "failed"} State
 * @typedef {object} Message
 * @property {string} id
 * @property {string} parent the message before it; "" for a first one
 * @property {Role} role
 * @property {string} content
 * @property {number} at milliseconds since 1970
 * @property {number} changed the same, for its last change
 * @property {State} [state] of a reply
 * @property {string} [reasoning]
 * @property {Call[]} [calls] tools that a reply calls
 * @property {string} [answers] the id of the call whose result this is
 * @property {string} [error] why a reply is not complete
 * @property {string} [finish] `length`: the reply reached its limit
 * @property {boolean} [edited] whether a user has written it in place of the model
 * @property {import("./reply.js").Cost} [cost]
 *
 * @typedef {object} Settings what requests are sent with; "" and null: as the server does it
 * @property {string} model
 * @property {string} system
 * @property {number | null} temperature
 * @property {number | null} top_p
 * @property {number | null} top_k
 * @property {number | null} min_p
 * @property {number | null} max_tokens
 * @property {number | null} seed
 * @property {string} schema a JSON schema that replies must follow
 * @property {string} tools a JSON list of tools
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} created milliseconds since 1970
 * @property {number} changed
 * @property {Settings} settings
 * @property {Record<string, Message>} messages
 * @property {Record<string, string>} chosen the message that is shown after each message (or after "")
 * @module
 */

/** @type {Readonly<Settings>} */
export const USUAL = Object.freeze({
  model: "",
  system: "",
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  max_tokens: null,
  seed: null,
  schema: "",
  tools: "",
});

/** An id that no other has. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @param {Settings} settings
 * @param {number} [now]
 * @returns {Conversation}
 */
export function create(settings, now = Date.now()) {
  return { id: newId(), title: "", created: now, changed: now, settings: { ...settings }, messages: {}, chosen: {} };
}

/**
 * Adds a message after another one, and shows it.
 * @param {Conversation} conversation
 * @param {string} parent
 * @param {Partial<Message> & {role: Role}} fields
 * @param {number} [now]
 * @returns {Message}
 */
export function add(conversation, parent, fields, now = Date.now()) {
  /** @type {Message} */
  const message = { content: "", ...fields, id: newId(), parent, at: after(conversation, parent, now), changed: now };
  conversation.messages[message.id] = message;
  conversation.chosen[parent] = message.id;
  conversation.changed = now;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return message;
}

/**
 * A time behind those of all messages beside the new one: it is their order.
 * @param {Conversation} conversation
 * @param {string} parent
 * @param {number} now
 */
function after(conversation, parent, now) {
  return Math.max(now, ...children(conversation, parent).map((one) => one.at + 1));
}

/**
 * The messages that follow a message, in the order in which they were made.
 * @param {Conversation} conversation
 * @param {string} parent
 */
function children(conversation, parent) {
  return Object.values(conversation.messages)
    .filter((one) => one.parent === parent)
    .sort(byAge);
}

/**
 * @param {Message} one
 * @param {Message} other
 */
function byAge(one, other) {
  return one.at - other.at || (one.id < other.id ? -1 : 1);
}

/**
 * The messages that are shown, from the first to the last.
 * @param {Conversation} conversation
 * @returns {Message[]}
 */
export function path(conversation) {
  const after = Map.groupBy(Object.values(conversation.messages), (one) => one.parent);
  /** @type {Message[]} */
  const found = [];
  for (let parent = ""; ;) {
    const next = after.get(parent);
    if (!next) return found;
    const chosen = next.find((one) => one.id === conversation.chosen[parent]) ?? next.sort(byAge)[next.length - 1];
    found.push(chosen);
    parent = chosen.id;
  }
}

/**
 * The messages from the first one to this one.
 * @param {Conversation} conversation
 * @param {string} id
 * @returns {Message[]}
 */
export function upTo(conversation, id) {
  /** @type {Message[]} */
  const found = [];
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) found.push(at);
  return found.reverse();
}

/**
 * A message and those beside it: the branches at its place.
 * @param {Conversation} conversation
 * @param {string} id
 */
export function branches(conversation, id) {
  return children(conversation, conversation.messages[id].parent);
}

/**
 * Shows the branch that is `step` places beside the shown one.
 * @param {Conversation} conversation
 * @param {string} id
 * @param {number} step
 */
export function turn(conversation, id, step) {
  const all = branches(conversation, id);
  const place = all.findIndex((one) => one.id === id) + step;
  if (place >= 0 && place < all.length) conversation.chosen[all[place].parent] = all[place].id;
}

/**
 * Writes a message anew, as a branch beside it. A branch of a reply has no cost and no reasoning: no model wrote it.
 * @param {Conversation} conversation
 * @param {string} id
 * @param {string} content
 * @param {number} [now]
 */
export function edit(conversation, id, content, now = Date.now()) {
  const { parent, role, answers } = conversation.messages[id];
  const reply = role === "assistant" ? { state: /** @type {State} */ ("done"), edited: true } : {};
  return add(conversation, parent, { role, content, ...(answers ? { answers } : {}), ...reply }, now);
}

/**
 * The messages of a request: those up to this one, in the form of the API. Replies go back as they came, so that the server
 * knows their tokens.
 * @param {Conversation} conversation
 * @param {string} id
 * @returns {Record<string, unknown>[]}
 */
export function sent(conversation, id) {
  const { system } = conversation.settings;
  const messages = upTo(conversation, id).map(({ role, content, reasoning, calls, answers }) => {
    if (role === "tool") return { role, content, tool_call_id: answers };
    if (role === "user") return { role, content };
    return {
      role,
      content: content || (calls?.length ? null : ""),
      ...(reasoning ? { reasoning_content: reasoning } : {}),
      ...(calls?.length ? { tool_calls: calls.map(asSent) } : {}),
    };
  });
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** @param {Call} call */
function asSent({ id, name, arguments: given }) {
  return { id, type: "function", function: { name, arguments: given } };
}

/**
 * The body of a request for a reply to this message.
 * @param {Conversation} conversation
 * @param {string} id
 * @returns {Record<string, unknown>}
 * @throws {SyntaxError} schema or tools are no JSON
 */
export function body(conversation, id) {
  const { model, schema, tools, system: _, ...sampling } = conversation.settings;
  return {
    ...(model ? { model } : {}),
    messages: sent(conversation, id),
    ...Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== null)),
    ...(schema.trim() ? { response_format: formatOf(JSON.parse(schema)) } : {}),
    ...(tools.trim() ? { tools: toolsOf(JSON.parse(tools)) } : {}),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
}

/** @param {unknown} schema */
function formatOf(schema) {
  return { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
}

/**
 * A list of tools, each as OpenAI writes it; a function alone is taken too.
 * @param {any} given
 */
function toolsOf(given) {
  const all = Array.isArray(given) ? given : [given];
  return all.map((one) => (one?.function ? one : { type: "function", function: one }));
}

/** @param {string} text */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ").slice(0, 200);
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/**
 * What two tabs know of one conversation, together. `ours` decides what is shown.
 * @param {Conversation} theirs
 * @param {Conversation} ours
 * @returns {Conversation}
 */
export function merged(theirs, ours) {
  const messages = { ...theirs.messages };
  for (const [id, message] of Object.entries(ours.messages)) {
    if (!messages[id] || messages[id].changed <= message.changed) messages[id] = message;
  }
  const newer = theirs.changed > ours.changed ? theirs : ours;
  const { title, settings, changed } = newer;
  return { ...ours, title, settings, changed, messages, chosen: { ...theirs.chosen, ...ours.chosen } };
}

// ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const FORMAT = "headstart-conversations";
const STATES = new Set(["done", "stopped", "failed"]);

/**
 * The content of a file with conversations.
 * @param {Conversation[]} conversations
 */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * The conversations of such a file. A file may come from anybody: only what has the right form is taken.
 * @param {string} text
 * @returns {Conversation[]}
 * @throws {Error} it is another file
 */
export function imported(text) {
  /** @type {any} */
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    given = null;
  }
  if (given?.format !== FORMAT || !Array.isArray(given.conversations))
    throw new Error("This file has no conversations of this page.");
  return given.conversations.map(conversationOf);
}

/**
 * @param {any} given
 * @returns {Conversation}
 */
function conversationOf(given) {
  const made = create(settingsOf(given?.settings), whole(given?.created));
  made.changed = whole(given?.changed);
  made.title = text(given?.title);
  const messages = Object.entries(Object(given?.messages)).filter(([id, one]) => /^[0-9a-f]{24}$/.test(id) && one);
  /** @type {Record<string, string>} */
  const ids = { "": "" }; // new ones: an import changes no conversation that is already here
  for (const [id] of messages) ids[id] = newId();
  for (const [id, one] of messages) {
    const message = messageOf(one);
    const parent = text(/** @type {any} */ (one).parent);
    if (message && parent in ids && parent !== id) made.messages[ids[id]] = { ...message, id: ids[id], parent: ids[parent] };
  }
  for (const [parent, child] of Object.entries(Object(given?.chosen))) {
    const [before, after] = [ids[parent], ids[text(child)]];
    if (after && made.messages[after]?.parent === before) made.chosen[before] = after;
  }
  return made;
}

/**
 * @param {any} given
 * @returns {Omit<Message, "id" | "parent"> | null}
 */
function messageOf(given) {
  if (!["user", "assistant", "tool"].includes(given.role)) return null;
  const calls = (Array.isArray(given.calls) ? given.calls : []).map(callOf);
  const texts = ["reasoning", "answers", "error", "finish"]
    .filter((name) => text(given[name]))
    .map((name) => [name, given[name]]);
  return {
    role: given.role,
    content: text(given.content),
    at: whole(given.at),
    changed: whole(given.changed),
    ...(given.role === "assistant" ? { state: STATES.has(given.state) ? given.state : "stopped" } : {}),
    ...(given.edited === true ? { edited: true } : {}),
    ...Object.fromEntries(texts),
    ...(calls.length ? { calls } : {}),
    ...(given.cost ? { cost: costOf(given.cost) } : {}),
  };
}

/**
 * @param {any} given
 * @returns {Call}
 */
function callOf(given) {
  return { id: text(given?.id), name: text(given?.name), arguments: text(given?.arguments) };
}

/**
 * @param {any} given
 * @returns {import("./reply.js").Cost}
 */
function costOf(given) {
  const tiers = Object.entries(Object(given.tiers)).filter(([, value]) => typeof value === "number");
  /** @type {any} */
  const made = { tiers: Object.fromEntries(tiers) };
  for (const name of ["prompt", "cached", "live", "computed", "completion", "recomputed"]) made[name] = whole(given[name]);
  for (const name of ["seconds", "ttft", "rate"]) made[name] = number(given[name]);
  for (const name of ["cause", "what", "hint", "request"]) made[name] = text(given[name]);
  return made;
}

/**
 * Settings of any origin, as far as they have the right form.
 * @param {any} given
 * @returns {Settings}
 */
export function settingsOf(given) {
  const pairs = Object.entries(USUAL).map(([name, usual]) => [
    name,
    usual === null ? number(given?.[name]) : text(given?.[name]),
  ]);
  return Object.fromEntries(pairs);
}

/** @param {unknown} value */
function text(value) {
  return typeof value === "string" ? value : "";
}

/** @param {unknown} value */
function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** @param {unknown} value */
function whole(value) {
  return Math.max(0, Math.floor(number(value) ?? 0));
}
