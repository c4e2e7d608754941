/**
 * Health: whether the server serves. It is asked when the page opens and when something failed, until it serves.
 * @module
 */
import { sleep } from "./api.js";

/** @type {Set<(message: string) => void>} */
const listeners = new Set();
let asking = false;

/**
 * Calls a function with what is wrong, or with "" when the server serves.
 * @param {(message: string) => void} listener
 */
export function onHealth(listener) {
  listeners.add(listener);
}

/** Asks until the server serves. */
export async function checkHealth() {
  if (asking) return;
  asking = true;
  for (let pause = 500; ; pause = Math.min(2 * pause, 5000)) {
    const message = await trouble();
    for (const listener of listeners) listener(message);
    if (!message) break;
    await sleep(pause);
  }
  asking = false;
}

async function trouble() {
  try {
    const response = await fetch("health", { cache: "no-store", credentials: "omit" });
    if (response.ok) return "";
    const { error } = await response.json();
    return error.message === "Loading model" ? "The model is loading …" : String(error.message);
  } catch {
    return "The server does not answer. This page tries again by itself.";
  }
}
