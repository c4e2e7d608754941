/**
 * Feed: what the server does, for views that watch it.
 * @module
 */
import { follow } from "./api.js";
import { checkHealth } from "./health.js";

/**
 * Passes events on until the signal ends it. After a break it goes on by itself.
 * @param {{signal: AbortSignal, say: (text: string) => void}} context
 * @param {(name: string, data: any) => void} take
 * @param {string[]} [without] events that are not wanted
 */
export async function watch({ signal, say }, take, without = []) {
  let said = false;
  try {
    for await (const { event, data } of follow("headstart/events", signal)) {
      if (event === "offline") checkHealth();
      else if (event === "refused") {
        if (!said) say(data);
        said = true;
      } else if (event === "online") said = false;
      else if (!without.includes(event)) take(event, JSON.parse(data));
    }
  } catch (error) {
    if (!signal.aborted) say(error instanceof Error ? error.message : String(error));
  }
}
