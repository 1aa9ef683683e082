// Conversations in the browser's own database (IndexedDB), one for each address of a server. Nothing of them is sent anywhere.

/**
 * @typedef {{id: string, title: string, created: number, changed: number, words: string, low: string}} Head
 *   What the list and its search need of a conversation; `words` are all texts of it, `low` the same in small letters.
 * @typedef {{id: string, title: string, created: number, changed: number, model: string, system: string,
 *   messages: object[]}} Conversation  A whole one, as it is kept and exported; see Tree.plain
 */

const HEADS = "heads", WHOLE = "conversations";

/** @type {?Promise<IDBDatabase>} */
let opening = null;
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("facet-conversations") : null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(`facet ${new URL(".", document.baseURI).pathname}`, 1);
    asked.addEventListener("upgradeneeded", () => {
      for (const name of [HEADS, WHOLE]) asked.result.createObjectStore(name, { keyPath: "id" });
    });
    asked.addEventListener("success", () => resolve(asked.result));
    asked.addEventListener("error", () => reject(asked.error));
  });
  return opening;
}

/** Runs `work` on both stores in one transaction; resolves to the result of the request that it returns. */
async function run(mode, work) {
  const transaction = (await database()).transaction([HEADS, WHOLE], mode);
  const asked = work(transaction.objectStore(HEADS), transaction.objectStore(WHOLE));
  transaction.commit();  // at once: a page that is left waits for nothing
  return new Promise((resolve, reject) => {
    transaction.addEventListener("complete", () => resolve(asked?.result));
    for (const name of ["error", "abort"]) transaction.addEventListener(name, () => reject(transaction.error));
  });
}

/** @returns {Promise<Head[]>} the newest first */
export async function heads() {
  const found = await run("readonly", (heads) => heads.getAll());
  return found.map((one) => ({ ...one, low: one.words.toLowerCase() })).sort((a, b) => b.changed - a.changed);
}

/** @returns {Promise<?Conversation>} */
export const load = (id) => run("readonly", (_, whole) => whole.get(id));

/** @returns {Promise<Conversation[]>} */
export const loadAll = () => run("readonly", (_, whole) => whole.getAll());

/** @param {Conversation} one */
export async function put(one) {
  const { id, title, created, changed, messages } = one;
  const words = [title, ...messages.map(({ content }) => content)].join("\n");
  await run("readwrite", (heads, whole) => { heads.put({ id, title, created, changed, words }); whole.put(one); });
  channel?.postMessage(id);
}

/** @param {string[]} ids */
export async function remove(ids) {
  await run("readwrite", (heads, whole) => { for (const id of ids) { heads.delete(id); whole.delete(id); } });
  channel?.postMessage(null);
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Calls `act` when another tab has changed something, with the id of the conversation that it has kept. */
export const onChange = (act) => channel?.addEventListener("message", ({ data }) => act(data));
