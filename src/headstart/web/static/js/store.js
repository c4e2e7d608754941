/**
 * Store: conversations in this browser (IndexedDB). If the browser keeps nothing for this page, they last until it is closed.
 *
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {{id: string, title: string, changed: number}} Title
 * @module
 */
import { merged } from "./conversation.js";

const [TITLES, WHOLE, CHOICES] = ["titles", "conversations", "choices"];

/**
 * @template T
 * @param {IDBRequest<T>} request
 * @returns {Promise<T>}
 */
function answer(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Store {
  /** @type {IDBDatabase | null} */
  #database = null;
  /** @type {Map<string, Map<string, any>>} in place of a database */
  #memory = new Map([TITLES, WHOLE, CHOICES].map((name) => [name, new Map()]));

  /** Whether conversations outlive the page. */
  get lasts() {
    return this.#database !== null;
  }

  async open() {
    try {
      const request = indexedDB.open("headstart", 1);
      request.onupgradeneeded = () => {
        for (const name of [TITLES, WHOLE, CHOICES]) request.result.createObjectStore(name);
      };
      this.#database = await answer(request);
    } catch {
      this.#database = null;
    }
  }

  /** @returns {Promise<Title[]>} the latest changed first */
  async titles() {
    const found = /** @type {Title[]} */ (await this.#all(TITLES));
    return found.sort((one, other) => other.changed - one.changed);
  }

  /**
   * @param {string} id
   * @returns {Promise<Conversation | null>}
   */
  async get(id) {
    return (await this.#one(WHOLE, id)) ?? null;
  }

  /** @returns {Promise<Conversation[]>} */
  async all() {
    return this.#all(WHOLE);
  }

  /**
   * Keeps a conversation, with what another tab may have added to it.
   * @param {Conversation} conversation
   * @returns {Promise<Conversation>} both together
   */
  async put(conversation) {
    const { id } = conversation;
    if (!this.#database) {
      this.#memory.get(WHOLE)?.set(id, conversation);
      this.#memory.get(TITLES)?.set(id, titleOf(conversation));
      return conversation;
    }
    const transaction = this.#database.transaction([TITLES, WHOLE], "readwrite");
    const whole = transaction.objectStore(WHOLE);
    const theirs = await answer(whole.get(id));
    const both = theirs ? merged(theirs, conversation) : conversation;
    whole.put(both, id);
    transaction.objectStore(TITLES).put(titleOf(both), id);
    await finished(transaction);
    return both;
  }

  /** @param {string} id */
  async remove(id) {
    if (!this.#database) {
      for (const name of [TITLES, WHOLE]) this.#memory.get(name)?.delete(id);
      return;
    }
    const transaction = this.#database.transaction([TITLES, WHOLE], "readwrite");
    for (const name of [TITLES, WHOLE]) transaction.objectStore(name).delete(id);
    await finished(transaction);
  }

  /**
   * What was chosen last under a name.
   * @param {string} name
   * @returns {Promise<any>}
   */
  async choice(name) {
    return this.#one(CHOICES, name);
  }

  /**
   * @param {string} name
   * @param {unknown} value
   */
  async choose(name, value) {
    if (!this.#database) this.#memory.get(CHOICES)?.set(name, value);
    else await answer(this.#database.transaction(CHOICES, "readwrite").objectStore(CHOICES).put(value, name));
  }

  /**
   * @param {string} name
   * @param {string} id
   */
  async #one(name, id) {
    if (!this.#database) return this.#memory.get(name)?.get(id);
    return answer(this.#database.transaction(name).objectStore(name).get(id));
  }

  /** @param {string} name */
  async #all(name) {
    if (!this.#database) return [...(this.#memory.get(name)?.values() ?? [])];
    return answer(this.#database.transaction(name).objectStore(name).getAll());
  }
}

/** @param {IDBTransaction} transaction */
function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(undefined);
    transaction.onabort = () => reject(transaction.error);
  });
}

/**
 * @param {Conversation} conversation
 * @returns {Title}
 */
function titleOf({ id, title, changed }) {
  return { id, title, changed };
}
