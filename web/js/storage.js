// Web storage as a convenience: where site data is blocked even naming it throws, and it may be full. Then nothing is kept.
// `kind`: "localStorage", or "sessionStorage", which is of this tab only.

/// The text stored under `name`, or null.
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
  } catch { /* it holds until the page is left */ }
}

export function remove(kind, name) {
  try {
    globalThis[kind].removeItem(name);
  } catch { /* nothing was stored */ }
}
