// Wraps IndexedDB in promises. The stores have conversations and messages by id, and samples of the operations view by
// time.

const NAME = "moesaic";
const VERSION = 1;
let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      const db = request.result;
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      db.createObjectStore("samples", { keyPath: "time" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/// Runs `use(store)` in a transaction. Resolves with the result of the request that it returns when the transaction is
/// committed.
async function run(name, mode, use) {
  const db = await open();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(name, mode);
    const request = use(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const get = (store, key) => run(store, "readonly", (all) => all.get(key));
export const getAll = (store, range) => run(store, "readonly", (all) => all.getAll(range));
export const getByIndex = (store, index, key) => run(store, "readonly", (all) => all.index(index).getAll(key));
export const put = (store, ...values) => run(store, "readwrite", (all) => { for (const value of values) all.put(value); });
/// Stores change(value) in place of the value of a key, in one transaction. undefined: the value stays.
export const update = (store, key, change) => run(store, "readwrite", (all) => {
  all.get(key).onsuccess = ({ target }) => {
    const value = change(target.result);
    if (value !== undefined) all.put(value);
  };
});
/// Removes the values of a key, or of the keys in an IDBKeyRange.
export const remove = (store, key) => run(store, "readwrite", (all) => { all.delete(key); });
export const removeByIndex = (store, index, key) => run(store, "readwrite", (all) => {
  all.index(index).openCursor(key).onsuccess = ({ target }) => {
    target.result?.delete();
    target.result?.continue();
  };
});
