/**
 * Store: conversations in this browser (IndexedDB). What the browser does not keep, because it may not or its disk is full, is in
 * memory, and lasts until the page is closed.
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
  /** @type {Map<string, Map<string, any>>} what the database did not take */
  #memory = new Map([TITLES, WHOLE, CHOICES].map((name) => [name, new Map()]));

  /** Whether all conversations outlive the page. */
  get lasts() {
    return this.#database !== null && this.#memory.get(WHOLE)?.size === 0;
  }

  async open() {
    try {
      const request = indexedDB.open("headstart", 1);
      request.onupgradeneeded = () => {
        for (const name of [TITLES, WHOLE, CHOICES]) request.result.createObjectStore(name);
      };
      this.#database = await answer(request);
      this.#database.onclose = () => (this.#database = null); // the user deleted what sites store
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
    let both = conversation;
    const isKept = await this.#write([TITLES, WHOLE], async (titles, whole) => {
      const theirs = await answer(whole.get(id));
      both = theirs ? merged(theirs, conversation) : conversation;
      await Promise.all([answer(whole.put(both, id)), answer(titles.put(titleOf(both), id))]);
    });
    this.#remember(WHOLE, id, isKept ? null : both);
    this.#remember(TITLES, id, isKept ? null : titleOf(both));
    return both;
  }

  /** @param {string} id */
  async remove(id) {
    for (const name of [TITLES, WHOLE]) this.#remember(name, id, null);
    await this.#write([TITLES, WHOLE], (...both) => Promise.all(both.map((one) => answer(one.delete(id)))));
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
    const isKept = await this.#write([CHOICES], (choices) => answer(choices.put(value, name)));
    this.#remember(CHOICES, name, isKept ? null : value);
  }

  /**
   * @param {string} name
   * @param {string} id
   * @param {unknown} value null: the database has it, or nobody should
   */
  #remember(name, id, value) {
    if (value === null) this.#memory.get(name)?.delete(id);
    else this.#memory.get(name)?.set(id, value);
  }

  /**
   * Changes the database.
   * @param {string[]} names of its stores
   * @param {(...stores: IDBObjectStore[]) => Promise<unknown>} change
   * @returns {Promise<boolean>} false if it could not be changed
   */
  async #write(names, change) {
    try {
      if (!this.#database) return false;
      const transaction = this.#database.transaction(names, "readwrite");
      const ended = finished(transaction);
      await Promise.all([ended, change(...names.map((name) => transaction.objectStore(name)))]);
      return true;
    } catch {
      return false;
    }
  }

  /**
   * @param {string} name
   * @param {string} id
   */
  async #one(name, id) {
    return this.#memory.get(name)?.get(id) ?? (await this.#read(name, (store) => store.get(id)));
  }

  /** @param {string} name */
  async #all(name) {
    const [ids, values] = await Promise.all([
      this.#read(name, (store) => store.getAllKeys()),
      this.#read(name, (store) => store.getAll()),
    ]);
    const kept = new Map((ids ?? []).map((id, place) => [id, values?.[place]]));
    return [...new Map([...kept, ...(this.#memory.get(name) ?? [])]).values()];
  }

  /**
   * @template T
   * @param {string} name
   * @param {(store: IDBObjectStore) => IDBRequest<T>} ask
   * @returns {Promise<T | undefined>}
   */
  async #read(name, ask) {
    try {
      return this.#database ? await answer(ask(this.#database.transaction(name).objectStore(name))) : undefined;
    } catch {
      return undefined;
    }
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
