/** The conversations and settings that this browser keeps. A key is not among them. */

const SETTINGS = "radixrt-settings";

/** @type {Promise<IDBDatabase>|null} */
let database = null;

/** @returns {Promise<IDBDatabase>} */
function open() {
  return (database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("radixrt", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  }));
}

/** The result of one operation on the conversations. @param {"readonly"|"readwrite"} mode @param {(store: IDBObjectStore) => IDBRequest} operation */
async function run(mode, operation) {
  const store = (await open()).transaction("conversations", mode).objectStore("conversations");
  return new Promise((resolve, reject) => {
    const request = operation(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** The records of all conversations, the last used first. @returns {Promise<any[]>} */
export const storedConversations = async () =>
  (await run("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);

/** @param {any} record */
export const storeConversation = (record) => run("readwrite", (store) => store.put(record));

/** @param {string} id */
export const deleteConversation = (id) => run("readwrite", (store) => store.delete(id));

export const deleteAllConversations = () => run("readwrite", (store) => store.clear());

/** @returns {Object<string, string>} values by the names of their fields */
export function storedSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

/** @param {Object<string, string>} settings */
export const storeSettings = (settings) => localStorage.setItem(SETTINGS, JSON.stringify(settings));
