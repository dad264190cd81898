// The input field for the next message.
import { byId, fitHeight } from "./dom.js";
import { read, write } from "./storage.js";

const DRAFT = "moesaic.draft"; // sessionStorage: the text that was typed, so that it survives a reload

export class Composer {
  #prompt = byId("prompt");

  /// `actions` has send(text), stop() and editLast(). The field does not send while `busy`.
  constructor(actions) {
    this.actions = actions;
    this.#prompt.value = read("sessionStorage", DRAFT) ?? "";
    this.#prompt.addEventListener("input", () => this.#changed());
    this.#prompt.addEventListener("keydown", (event) => this.#key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => actions.stop());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy && !document.querySelector("dialog[open], .menu")) actions.stop();
    });
    this.busy = false;
    this.#changed();
  }

  #busy = false;
  get busy() { return this.#busy; }
  set busy(busy) {
    this.#busy = busy;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
  }

  /// Focuses the field when the view is shown.
  focus() {
    fitHeight(this.#prompt); // a hidden field has no height
    // On a phone, the keyboard would cover the answer.
    if (!matchMedia("(pointer: coarse)").matches) this.#prompt.focus();
  }

  #changed() {
    write("sessionStorage", DRAFT, this.#prompt.value);
    byId("send").disabled = !this.#prompt.value.trim();
    fitHeight(this.#prompt);
  }

  #send() {
    const text = this.#prompt.value.trim();
    if (!text || this.busy) return;
    this.#prompt.value = "";
    this.#changed();
    this.actions.send(text);
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && !this.#prompt.value && !this.busy) {
      event.preventDefault();
      this.actions.editLast();
    }
  }
}
