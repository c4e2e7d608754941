/**
 * Session: the conversations of this tab, and the replies that are running. They go on while another view is open.
 *
 * Events: `titles` (the list has changed), `thread` (other messages are shown), `reply` (a message has changed: `detail`).
 *
 * @typedef {import("../conversation.js").Conversation} Conversation
 * @typedef {import("../conversation.js").Message} Message
 * @typedef {{message: Message, reply: Reply, stop: AbortController}} Running
 * @module
 */
import { ApiError, events, json, request, sleep } from "../api.js";
import { add, body, create, edit, path, settingsOf, turn, USUAL } from "../conversation.js";
import { checkHealth } from "../health.js";
import { Reply } from "../reply.js";
import { Store } from "../store.js";

const SAVE_EVERY = 1000; // milliseconds, of a running reply
const STOPPING = [100, 400, 1500, 4000]; // milliseconds before each question what a stopped reply cost
const BROKEN = "The connection broke before the reply was complete.";

export class Session extends EventTarget {
  store = new Store();
  /** @type {import("../store.js").Title[]} */
  titles = [];
  /** @type {Conversation} */
  current = create(USUAL);
  /** @type {Map<string, Running>} by the id of the conversation */
  running = new Map();
  /** @type {Map<string, Conversation>} those whose replies are running */
  #open = new Map();
  /** @type {import("../conversation.js").Settings} */
  #chosen = USUAL;
  /** @type {Set<string>} a reply that was running must not bring them back */
  #removed = new Set();
  #others = new BroadcastChannel("headstart.conversations");

  async open() {
    await this.store.open();
    this.#others.onmessage = ({ data }) => this.#changedElsewhere(data);
    addEventListener("pagehide", () => this.#open.forEach((one) => this.store.put(one)));
    this.#chosen = settingsOf((await this.store.choice("settings")) ?? USUAL);
    await this.#listTitles();
    this.begin();
  }

  /** Shows a new conversation, with the settings that were chosen last. It is kept when it has a message. */
  begin() {
    this.current = create(this.#chosen);
    this.#tell("thread");
  }

  /**
   * Shows a conversation.
   * @param {string} id
   * @returns {Promise<boolean>} false if there is none
   */
  async show(id) {
    if (this.current.id === id) return true;
    const found = this.#open.get(id) ?? (await this.store.get(id));
    if (!found) return false;
    this.current = found;
    this.#tell("thread");
    return true;
  }

  /** What runs in the conversation that is shown. */
  get runningHere() {
    return this.running.get(this.current.id) ?? null;
  }

  /** @param {string} text */
  async send(text) {
    const last = path(this.current).at(-1);
    await this.#answer(add(this.current, last?.id ?? "", { role: "user", content: text }));
  }

  /**
   * Another reply in place of this one, as a branch. A reply that has nothing yet is begun anew.
   * @param {Message} message
   */
  async again(message) {
    const { parent, content, reasoning, calls } = message;
    const isEmpty = !content && !reasoning && !calls?.length && message.state !== "done";
    await this.#run(isEmpty ? message : this.#empty(parent));
  }

  /**
   * Writes a message anew, as a branch. What a user asks is answered.
   * @param {Message} message
   * @param {string} text
   */
  async edit(message, text) {
    const made = edit(this.current, message.id, text);
    if (made.role === "assistant") await this.#keep(this.current);
    else await this.#answer(made);
  }

  /**
   * Sends the results of the tools that a reply calls, in the order of the calls.
   * @param {Message} message
   * @param {string[]} results
   */
  async giveResults(message, results) {
    let last = message;
    for (const [place, content] of results.entries()) {
      last = add(this.current, last.id, { role: "tool", content, answers: message.calls?.[place].id ?? "" });
    }
    await this.#answer(last);
  }

  /**
   * @param {Message} message
   * @param {number} step
   */
  async turn(message, step) {
    turn(this.current, message.id, step);
    await this.#keep(this.current);
  }

  stop() {
    this.runningHere?.stop.abort();
  }

  /** @param {import("../conversation.js").Settings} settings */
  async set(settings) {
    this.current.settings = this.#chosen = settings;
    await this.store.choose("settings", settings);
    if (Object.keys(this.current.messages).length) await this.#keep(this.current);
  }

  /**
   * @param {string} id
   * @param {string} title
   */
  async rename(id, title) {
    const found = id === this.current.id ? this.current : (this.#open.get(id) ?? (await this.store.get(id)));
    if (!found) return;
    found.title = title;
    found.changed = Date.now();
    await this.#keep(found);
  }

  /** @param {string} id */
  async remove(id) {
    this.#removed.add(id);
    this.running.get(id)?.stop.abort();
    await this.store.remove(id);
    this.#others.postMessage({ removed: id });
    await this.#listTitles();
    if (this.current.id === id) this.begin();
  }

  /** @param {Conversation[]} conversations */
  async take(conversations) {
    for (const one of conversations) await this.store.put(one);
    this.#others.postMessage({});
    await this.#listTitles();
  }

  // ── replies ───────────────────────────────────────────────────────────────────────────────────────────────────────

  /** @param {Message} message */
  async #answer(message) {
    await this.#run(this.#empty(message.id));
  }

  /** @param {string} parent */
  #empty(parent) {
    return add(this.current, parent, { role: "assistant", state: "running" });
  }

  /** @param {Message} message */
  async #run(message) {
    const conversation = this.current;
    const reply = new Reply(performance.now());
    const stop = new AbortController();
    this.running.get(conversation.id)?.stop.abort();
    const running = { message, reply, stop };
    this.running.set(conversation.id, running);
    this.#open.set(conversation.id, conversation);
    message.state = "running";
    delete message.error;
    await this.#keep(conversation);
    let id = "";
    let saved = performance.now();
    try {
      const sent = body(conversation, message.parent);
      reply.began = performance.now();
      const response = await request("v1/chat/completions", { body: sent, signal: stop.signal });
      id = response.headers.get("x-request-id") ?? "";
      let complete = false;
      for await (const { data } of events(response)) {
        complete = data === "[DONE]";
        if (complete) break;
        reply.take(JSON.parse(data), performance.now());
        copy(reply, message);
        this.#tell("reply", message);
        if (performance.now() - saved > SAVE_EVERY) {
          saved = performance.now();
          this.#put(conversation);
        }
      }
      if (!complete) throw new ApiError(BROKEN, 0);
      message.state = "done";
    } catch (error) {
      this.#failed(message, stop.signal, error);
    }
    if (this.running.get(conversation.id) === running) this.running.delete(conversation.id);
    const cost = reply.cost(id);
    if (cost) message.cost = cost;
    await this.#keep(conversation);
    this.#tell("reply", message);
    if (id && message.state === "stopped") await this.#explainStopped(conversation, message, reply, id);
    else if (id && cost?.recomputed) await this.#explain(conversation, message, cost);
    if (!this.running.has(conversation.id)) this.#open.delete(conversation.id);
  }

  /**
   * @param {Message} message
   * @param {AbortSignal} signal
   * @param {unknown} error
   */
  #failed(message, signal, error) {
    message.state = signal.aborted ? "stopped" : "failed";
    if (signal.aborted) return;
    const isNetwork = error instanceof TypeError; // what `fetch` raises when a stream breaks
    message.error = isNetwork ? BROKEN : error instanceof Error ? error.message : String(error);
    if (isNetwork || (error instanceof ApiError && (error.status === 0 || error.status === 503))) checkHealth();
  }

  /**
   * Asks why tokens were computed again: the stream has the cause's name and the hint only.
   * @param {Conversation} conversation
   * @param {Message} message
   * @param {import("../reply.js").Cost} cost
   */
  async #explain(conversation, message, cost) {
    try {
      const { explanation } = await json(`headstart/explain/${encodeURIComponent(cost.request)}`);
      cost.what = String(explanation.what);
    } catch {
      return; // too long ago
    }
    await this.#keep(conversation);
    this.#tell("reply", message);
  }

  /**
   * Asks what a stopped reply cost: its stream ended before it said so. The server needs a moment to stop.
   * @param {Conversation} conversation
   * @param {Message} message
   * @param {Reply} reply
   * @param {string} id of the request
   */
  async #explainStopped(conversation, message, reply, id) {
    for (const pause of STOPPING) {
      await sleep(pause);
      try {
        message.cost = reply.stoppedCost(await json(`headstart/explain/${encodeURIComponent(id)}`));
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) continue;
        return; // the page says elsewhere that the server does not answer
      }
      await this.#keep(conversation);
      this.#tell("reply", message);
      return;
    }
  }

  // ── keeping ───────────────────────────────────────────────────────────────────────────────────────────────────────

  /**
   * Keeps a conversation, and tells this tab and the others.
   * @param {Conversation} conversation
   */
  async #keep(conversation) {
    if (conversation === this.current) this.#tell("thread");
    await this.#put(conversation);
    this.#others.postMessage({ changed: conversation.id });
    await this.#listTitles();
  }

  /** @param {Conversation} conversation */
  async #put(conversation) {
    if (this.#removed.has(conversation.id)) return;
    const running = this.running.get(conversation.id);
    if (running) running.message.changed = Date.now();
    const both = await this.store.put(conversation);
    for (const [id, message] of Object.entries(both.messages)) conversation.messages[id] ??= message;
  }

  async #listTitles() {
    this.titles = await this.store.titles();
    this.#tell("titles");
  }

  /** @param {{changed?: string, removed?: string}} news */
  async #changedElsewhere({ changed, removed }) {
    await this.#listTitles();
    if (removed === this.current.id) this.begin();
    if (changed !== this.current.id || this.runningHere) return;
    const found = await this.store.get(changed);
    if (!found || changed !== this.current.id) return;
    const { messages, chosen } = this.current;
    for (const [id, message] of Object.entries(found.messages)) messages[id] = Object.assign(messages[id] ?? {}, message);
    Object.assign(this.current, found, { messages, chosen: { ...found.chosen, ...chosen } });
    this.#tell("thread");
  }

  /**
   * @param {string} name
   * @param {Message} [detail]
   */
  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/**
 * @param {Reply} reply
 * @param {Message} message
 */
function copy(reply, message) {
  message.content = reply.content;
  if (reply.reasoning) message.reasoning = reply.reasoning;
  if (reply.calls.length) message.calls = reply.calls;
  if (reply.finish) message.finish = reply.finish;
}
