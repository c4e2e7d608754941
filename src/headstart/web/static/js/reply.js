/**
 * Reply: puts a reply together from the chunks of its stream. Pure: no DOM.
 *
 * @typedef {object} Cost what a reply cost, in tokens and seconds
 * @property {number} prompt
 * @property {number} cached
 * @property {number} live of the cached ones, those that were in the slot
 * @property {Record<string, number>} tiers the others, by where they came from
 * @property {number} computed
 * @property {number} completion
 * @property {number} recomputed of the computed ones, those that had been computed before
 * @property {number | null} seconds that this took
 * @property {number | null} ttft from sending the request to the first token
 * @property {number | null} rate tokens a second
 * @property {string} cause why tokens were computed again; "" if none were
 * @property {string} what the same as a sentence
 * @property {string} hint how to avoid it
 * @property {string} request the id of the request
 *
 * @typedef {{done: number, total: number, cached: number, left: number | null}} Progress of a prompt; `left`: seconds
 * @module
 */

export class Reply {
  /** @param {number} began when the request was sent, in milliseconds */
  constructor(began) {
    this.began = began;
    this.content = "";
    this.reasoning = "";
    /** @type {import("./conversation.js").Call[]} */
    this.calls = [];
    this.finish = "";
    /** @type {Progress | null} */
    this.progress = null;
    /** @type {number | null} seconds */
    this.ttft = null;
    /** @type {{at: number, done: number} | null} where the prefill was when it was seen first */
    this.first = null;
    this.usage = /** @type {any} */ (null);
    this.headstart = /** @type {any} */ (null);
    this.timings = /** @type {any} */ (null);
  }

  /**
   * Takes a chunk.
   * @param {any} chunk
   * @param {number} now milliseconds
   * @throws {Error} the chunk says that the reply failed
   */
  take(chunk, now) {
    if (chunk.error) throw new Error(String(chunk.error.message ?? "The server failed."));
    if (chunk.prompt_progress) this.progress = this.#progress(chunk.prompt_progress, now);
    this.usage = chunk.usage ?? this.usage;
    this.headstart = chunk.headstart ?? this.headstart;
    this.timings = chunk.timings ?? this.timings;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls) {
      this.ttft ??= (now - this.began) / 1000;
      this.progress = null;
    }
    this.content += content ?? "";
    this.reasoning += reasoning ?? "";
    for (const part of calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }

  /**
   * @param {{total: number, cache: number, processed: number, time_ms: number}} given
   * @param {number} now
   * @returns {Progress}
   */
  #progress({ total, cache, processed, time_ms: time }, now) {
    this.first ??= { at: now, done: processed };
    const tokens = processed - this.first.done;
    // The first figures come after the first call. Until the second come, there is only the time since the request arrived.
    const [computed, spent] = tokens > 0 ? [tokens, now - this.first.at] : [processed - cache, time];
    const left = computed > 0 && spent > 0 ? ((total - processed) * spent) / computed / 1000 : null;
    return { done: processed, total, cached: cache, left };
  }

  /**
   * What it cost; null until the server has said so.
   * @param {string} request
   * @returns {Cost | null}
   */
  cost(request) {
    const { headstart, usage, timings } = this;
    if (!headstart) return null;
    return {
      prompt: usage?.prompt_tokens ?? headstart.cached + headstart.computed,
      cached: headstart.cached,
      live: headstart.live,
      tiers: headstart.tiers ?? {},
      computed: headstart.computed,
      completion: usage?.completion_tokens ?? timings?.predicted_n ?? 0,
      recomputed: headstart.recomputed ?? 0,
      seconds: headstart.seconds,
      ttft: this.ttft,
      rate: timings?.predicted_per_second || null,
      cause: headstart.cause ?? "",
      what: "",
      hint: headstart.hint ?? "",
      request,
    };
  }

  /**
   * What a stopped reply cost.
   * @param {any} account the server's, of the request
   * @returns {Cost}
   */
  stoppedCost({ id, prompt, cached, live, tiers, computed, completion, explanation }) {
    const { recomputed = 0, seconds = null, cause = "", what = "", hint = "" } = explanation ?? {};
    const same = { prompt, cached, live, tiers, computed, completion, recomputed, seconds, cause, what, hint };
    return { ...same, ttft: this.ttft, rate: null, request: id };
  }
}
