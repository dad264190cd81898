// The list of conversations. Opens, renames, exports and imports them, and deletes them with an undo.
import { button, byId, download, make } from "./dom.js";
import { fileName, fromJson, toJson, toMarkdown } from "./exchange.js";
import { openMenu } from "./menu.js";
import { read, write } from "./storage.js";
import { toast } from "./toast.js";

const DAY = 24 * 3600 * 1000;
const NARROW = matchMedia("(max-width: 52rem)");
const STORE = "moesaic.sidebar";

function ageGroup(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "Last 7 days";
  return "Older";
}

export class Sidebar {
  #chats;
  #answers;
  #openId = null;
  #renaming = null;

  constructor(chats, answers, actions) {
    this.#chats = chats;
    this.#answers = answers;
    this.actions = actions; // open(id or null)
    chats.addEventListener("list", () => this.draw());
    for (const kind of ["start", "end"]) answers.addEventListener(kind, () => this.draw());
    byId("filter").addEventListener("input", () => this.draw());
    byId("new-chat").addEventListener("click", () => this.#go(null));
    byId("toggle-sidebar").addEventListener("click", () => this.toggle());
    byId("backdrop").addEventListener("click", () => this.toggle(false));
    byId("sidebar").addEventListener("keydown", (event) => { if (event.key === "Escape" && NARROW.matches) this.toggle(false); });
    byId("list-menu").addEventListener("click", ({ currentTarget }) => openMenu(currentTarget, [
      { icon: "load", text: "Import JSON", run: () => byId("import-file").click() },
      { icon: "save", text: "Export all as JSON", run: () => this.#export(this.#chats.newestFirst(), "moesaic-chats.json") },
    ]));
    byId("import-file").addEventListener("change", ({ currentTarget }) => this.#import(currentTarget));
    this.toggle(!NARROW.matches && read("localStorage", STORE) !== "closed", false);
  }

  set openId(id) {
    this.#openId = id;
    this.draw();
  }

  toggle(shown = document.body.classList.contains("no-sidebar"), store = true) {
    document.body.classList.toggle("no-sidebar", !shown);
    byId("sidebar").inert = !shown;
    byId("toggle-sidebar").setAttribute("aria-expanded", String(shown));
    if (store && !NARROW.matches) write("localStorage", STORE, shown ? "open" : "closed");
    if (shown && store && NARROW.matches) byId("new-chat").focus();
  }

  draw() {
    if (this.#renaming) return; // the list is drawn when the name is entered
    const words = byId("filter").value.trim().toLowerCase();
    const all = this.#chats.newestFirst();
    const shown = all.filter(({ title }) => title.toLowerCase().includes(words));
    const parts = [];
    let group = "";
    for (const conversation of shown) {
      const next = ageGroup(conversation.updated);
      if (next !== group) parts.push(make("h2", {}, next));
      group = next;
      parts.push(this.#row(conversation));
    }
    if (!shown.length) parts.push(make("p", { class: "caption" }, all.length ? "No chat has these words in its title." : "Chats are stored in this browser only."));
    const focused = document.activeElement?.closest?.("#conversations .conversation")?.dataset.id;
    byId("conversations").replaceChildren(...parts);
    byId("filter").hidden = all.length === 0;
    if (focused) byId("conversations").querySelector(`[data-id="${focused}"] a`)?.focus();
  }

  #row(conversation) {
    const { id, title } = conversation;
    const more = button("more", { label: `Actions for ${title}`, "aria-haspopup": "menu", "aria-expanded": "false", onclick: () => openMenu(more, [
      { icon: "edit", text: "Rename", run: () => this.#rename(id) },
      { icon: "save", text: "Export as Markdown", run: async () => download(fileName(title, "md"), "text/markdown", toMarkdown(conversation, await this.#chats.branch(id))) },
      { icon: "save", text: "Export as JSON", run: () => this.#export([conversation], fileName(title, "json")) },
      { icon: "trash", text: "Delete", danger: true, run: () => this.#delete(conversation) },
    ]) });
    const row = make("div", { class: "conversation" },
      make("a", { href: `#chat/${id}`, title, "aria-current": id === this.#openId ? "true" : null, onclick: () => this.#narrow(),
        ondblclick: () => this.#rename(id) }, this.#answers.runsIn(id) ? make("span", { class: "running", title: "Answering" }) : null, title), more);
    row.dataset.id = id;
    return row;
  }

  #rename(id) {
    const row = byId("conversations").querySelector(`[data-id="${id}"]`);
    const field = make("input", { value: this.#chats.conversations.get(id).title, "aria-label": "Title", maxLength: 200 });
    this.#renaming = id;
    const finish = (store) => {
      if (!this.#renaming) return;
      this.#renaming = null;
      if (store) this.#chats.rename(id, field.value);
      this.draw();
      byId("conversations").querySelector(`[data-id="${id}"] a`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    field.addEventListener("blur", () => finish(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  #delete(conversation) {
    this.#answers.stopIn(conversation.id);
    const undo = this.#chats.remove(conversation.id);
    const wasOpen = conversation.id === this.#openId;
    if (wasOpen) this.#go(null);
    toast(`“${conversation.title}” is deleted.`, { action: "Undo", act: async () => {
      await undo();
      if (wasOpen) this.#go(conversation.id);
    }, expired: undo.finish });
  }

  async #export(conversations, name) {
    const entries = await Promise.all(conversations.map(async (conversation) => (
      { conversation, messages: [...(await this.#chats.messages(conversation.id)).values()] })));
    download(name, "application/json", toJson(entries));
  }

  async #import(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    try {
      const entries = fromJson(await file.text());
      await this.#chats.addAll(entries);
      toast(entries.length === 1 ? "1 chat is imported." : `${entries.length} chats are imported.`);
      if (entries.length === 1) this.#go(entries[0].conversation.id);
    } catch (error) {
      toast(`${file.name}: ${error.message}`, { seconds: 20 });
    }
  }

  #narrow() {
    if (NARROW.matches) this.toggle(false);
  }

  #go(id) {
    this.#narrow();
    this.actions.open(id);
  }
}
