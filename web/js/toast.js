// Shows short notices at the edge of the page, with an action such as "Undo".
import { button, byId, make } from "./dom.js";

const SECONDS = 8;

/// Shows `text`. Calls `act` when the user takes the action, and `expired` otherwise.
export function toast(text, { action, act, expired, seconds = SECONDS } = {}) {
  let timer = 0;
  const close = (then) => {
    clearTimeout(timer);
    box.remove();
    then?.();
  };
  const box = make("div", { class: "toast" }, make("span", {}, text),
    action ? make("button", { type: "button", class: "quiet strong", onclick: () => close(act) }, action) : null,
    button("close", { label: "Dismiss", onclick: () => close(expired) }));
  const start = () => { timer = setTimeout(() => close(expired), seconds * 1000); };
  // The notice stays while the pointer or the focus is on it.
  for (const [stop, go] of [["pointerenter", "pointerleave"], ["focusin", "focusout"]]) {
    box.addEventListener(stop, () => clearTimeout(timer));
    box.addEventListener(go, start);
  }
  byId("toasts").append(box);
  start();
}

/// Announces a visible change to screen readers.
export function announce(text) {
  byId("announcer").textContent = text;
}
