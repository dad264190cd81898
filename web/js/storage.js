// Reads and writes web storage without errors. Stores nothing if the storage is full or the browser blocks site data,
// where even naming the storage throws. `kind` is "localStorage", or "sessionStorage" for this tab only.

/// Returns the text stored under `name`, or null.
export function read(kind, name) {
  try {
    return globalThis[kind].getItem(name);
  } catch {
    return null;
  }
}

export function write(kind, name, text) {
  try {
    globalThis[kind].setItem(name, text);
  } catch { /* The value lasts until the page is left. */ }
}

export function remove(kind, name) {
  try {
    globalThis[kind].removeItem(name);
  } catch { /* Nothing was stored. */ }
}

/// Returns the stored names that begin with `prefix`.
export function names(kind, prefix) {
  try {
    return Object.keys(globalThis[kind]).filter((name) => name.startsWith(prefix));
  } catch {
    return [];
  }
}
