// The settings and their dialog. Every change is stored. Keys are stored for this tab only, unless the user chooses
// otherwise.
import { keys } from "./api.js";
import { byId, make } from "./dom.js";
import { libraryList } from "./library.js";
import { parseTools } from "./request.js";
import { read, remove, write } from "./storage.js";

const STORE = "moesaic.settings";
const KEYS = "moesaic.keys";
const FIELDS = { temperature: "", topP: "", maxTokens: "1024", system: "", tools: "" };
const IDS = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", system: "system", tools: "tools" };

function readJson(kind, name) {
  try {
    return JSON.parse(read(kind, name)) ?? {};
  } catch {
    return {};
  }
}

/// `onKey` is called when the dialog is closed after a change of a key.
export class Settings {
  values = { ...FIELDS };
  #dialog = byId("settings");
  #keysBefore = "";

  constructor(onKey) {
    Object.assign(this.values, readJson("localStorage", STORE));
    const remembered = readJson("localStorage", KEYS);
    Object.assign(keys, remembered, readJson("sessionStorage", KEYS));
    byId("remember-keys").checked = Boolean(remembered.api || remembered.admin);
    byId("api-key").value = keys.api;
    byId("admin-key").value = keys.admin;
    for (const [name, id] of Object.entries(IDS)) {
      byId(id).value = this.values[name];
      byId(id).addEventListener("input", () => this.#save());
    }
    for (const id of ["api-key", "admin-key", "remember-keys"]) byId(id).addEventListener("input", () => this.#saveKeys());
    byId("reset-settings").addEventListener("click", () => {
      for (const [name, id] of Object.entries(IDS)) byId(id).value = FIELDS[name];
      this.#save();
    });
    byId("show-keys").addEventListener("click", ({ currentTarget }) => {
      const shown = currentTarget.getAttribute("aria-pressed") !== "true";
      currentTarget.setAttribute("aria-pressed", String(shown));
      for (const id of ["api-key", "admin-key"]) byId(id).type = shown ? "text" : "password";
    });
    this.#dialog.addEventListener("click", (event) => { if (event.target === this.#dialog) this.#dialog.close(); });
    this.#dialog.addEventListener("close", () => {
      byId("key-reason").hidden = true;
      if (JSON.stringify(keys) !== this.#keysBefore) onKey();
    });
    byId("open-settings").addEventListener("click", () => this.open());
    byId("libraries").replaceChildren(...libraryList.flatMap(({ name, license }, i) => [
      i ? ", " : "", make("a", { href: license, target: "_blank", rel: "noopener" }, name)]));
    byId("libraries-line").hidden = libraryList.length === 0;
    this.#checkTools();
  }

  open() {
    if (this.#dialog.open) return;
    this.#keysBefore = JSON.stringify(keys);
    this.#dialog.showModal();
  }

  /// Opens the dialog at the key that the server's message `reason` requires.
  needKey(reason, field = "api-key") {
    this.open();
    byId("key-reason").textContent = reason;
    byId("key-reason").hidden = false;
    byId(field).focus();
    byId(field).select();
  }

  #save() {
    for (const [name, id] of Object.entries(IDS)) this.values[name] = byId(id).value;
    write("localStorage", STORE, JSON.stringify(this.values));
    this.#checkTools();
  }

  #saveKeys() {
    keys.api = byId("api-key").value.trim();
    keys.admin = byId("admin-key").value.trim();
    write("sessionStorage", KEYS, JSON.stringify(keys));
    if (byId("remember-keys").checked) write("localStorage", KEYS, JSON.stringify(keys));
    else remove("localStorage", KEYS);
  }

  #checkTools() {
    let fault = "";
    try {
      if (this.values.tools.trim()) parseTools(this.values.tools);
    } catch (error) {
      fault = error.message.replace("Settings, Tools: ", "");
    }
    byId("tools-fault").textContent = fault;
    byId("tools").setAttribute("aria-invalid", String(Boolean(fault)));
  }
}
