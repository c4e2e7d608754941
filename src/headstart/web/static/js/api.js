/**
 * Api: the server's HTTP API, as any client may use it. Addresses are relative to the page, so a proxy may put it under a path.
 * @module
 */

const KEY = "headstart.key";

/** An answer that is an error, or none at all (`status` 0). */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status
   * @param {string} [code]
   */
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {(wrong: boolean) => Promise<string | null>} */
let askForKey = async () => null;
/** @type {Promise<string | null> | null} one question at a time, however many requests were refused */
let asking = null;

/**
 * Sets who asks the user for the key: a function that gets whether the last one was wrong.
 * @param {(wrong: boolean) => Promise<string | null>} ask null: the user does not want to
 */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The key of this tab; "" without one. It is in no address, and gone with the tab. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return kept;
  }
}
let kept = "";

/** @param {string} value */
export function setKey(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // The browser stores nothing for this page: the key lasts until it is loaded again.
  }
}

/**
 * The answer to a request. If the server wants a key, the user is asked for it, and the request is sent again.
 * @param {string} path without a slash at its beginning, like `v1/models`
 * @param {{method?: string, body?: unknown, signal?: AbortSignal, headers?: Record<string, string>}} [options]
 * @returns {Promise<Response>}
 * @throws {ApiError} the answer is an error, or there is none
 */
export async function request(path, { method, body, signal, headers = {} } = {}) {
  for (;;) {
    const used = key();
    /** @type {Record<string, string>} */
    const sent = { ...headers };
    // A header has bytes only; the server reads them as UTF-8.
    if (used) sent.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(used))}`;
    if (body !== undefined) sent["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: method ?? (body === undefined ? "GET" : "POST"),
        body: body === undefined ? undefined : JSON.stringify(body),
        headers: sent,
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("The server does not answer.", 0);
    }
    if (response.ok) return response;
    if (response.status === 401 && (await keyAfter(used))) continue;
    throw await errorOf(response);
  }
}

/**
 * Whether there is another key than the one that was refused.
 * @param {string} used
 */
async function keyAfter(used) {
  if (key() !== used) return true; // given meanwhile
  asking ??= askForKey(used !== "").finally(() => {
    asking = null;
  });
  const given = await asking;
  if (given) setKey(given);
  return Boolean(given);
}

/** @param {Response} response */
async function errorOf(response) {
  let message = `The server answered with status ${response.status}.`;
  let code = "";
  try {
    const { error } = await response.json();
    message = String(error.message || message);
    code = String(error.code ?? "");
  } catch {
    // It is not an error of headstart's; a proxy may have answered.
  }
  return new ApiError(message, response.status, code);
}

/**
 * The JSON of an answer; the options are those of `request`.
 * @param {string} path
 * @param {Parameters<typeof request>[1]} [options]
 * @returns {Promise<any>}
 */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/**
 * @typedef {{event: string, data: string, id: string}} ServerEvent
 *
 * The server-sent events of an answer.
 * @param {Response} response
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* events(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  /** @type {string[]} */
  let parts = []; // of the line that is not complete yet
  let event = "";
  let id = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = value.split("\n");
      parts.push(lines[0]);
      if (lines.length === 1) continue;
      lines[0] = parts.join("");
      parts = [/** @type {string} */ (lines.pop())];
      for (const line of lines.map((one) => one.replace(/\r$/, ""))) {
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n"), id };
          event = "";
          data = [];
          continue;
        }
        const at = line.indexOf(":");
        const name = at < 0 ? line : line.slice(0, at);
        const text = at < 0 ? "" : line.slice(line[at + 1] === " " ? at + 2 : at + 1);
        if (name === "data") data.push(text);
        else if (name === "event") event = text;
        else if (name === "id") id = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * The events of a stream that never ends, like `headstart/events`. After a break it connects again, and goes on where it was if
 * the server can. Beside the server's own events come `online` (connected), `offline` (with the reason as data) and `refused` (too
 * many readers, with the server's words as data).
 * @param {string} path
 * @param {AbortSignal} signal ends it
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* follow(path, signal) {
  let last = "";
  let pause = 500;
  while (!signal.aborted) {
    let reason = "The server closed the stream.";
    let refused = false;
    try {
      const response = await request(path, { signal, headers: last ? { "last-event-id": last } : {} });
      yield { event: "online", data: "", id: last };
      for await (const one of events(response)) {
        if (one.id) last = one.id;
        pause = 500;
        yield one;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403, 404].includes(error.status)) throw error;
      reason = error instanceof ApiError ? error.message : "The connection broke.";
      refused = error instanceof ApiError && error.status === 429;
    }
    if (signal.aborted) return;
    yield { event: refused ? "refused" : "offline", data: reason, id: last };
    await sleep(pause, signal);
    pause = Math.min(2 * pause, 10_000);
  }
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} [signal] wakes it early
 * @returns {Promise<void>}
 */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
    signal?.addEventListener("abort", done);
    if (signal?.aborted) done();
  });
}
