// Stores conversations in memory and in IndexedDB, and synchronizes them between all tabs of this browser.
import * as database from "./database.js";
import { names, read, remove, write } from "./storage.js";
import { branch, choose, newId, titleOf } from "./tree.js";

const RESCUE = "moesaic.rescue"; // localStorage: partial answers of a tab that was closed while they streamed
// localStorage, with an id: a conversation that IndexedDB had not stored when its page was left, which aborts transactions
const UNSAVED = "moesaic.unsaved.";
const ELSEWHERE = 15000; // ms without a save after which another tab does not stream any more

function openChannel() {
  try {
    return new BroadcastChannel("moesaic");
  } catch {
    return null; // the browser blocks site data
  }
}
const channel = openChannel();

export class Chats extends EventTarget {
  conversations = new Map(); // id -> conversation, without those that are deleted
  #messages = new Map(); // conversation id -> Map of id -> message, for opened conversations
  #heard = new Map(); // message id -> time of the last save by another tab
  #saving = new Map(); // conversation -> number of its saves that are not complete
  #failed = false;

  constructor() {
    super();
    addEventListener("pagehide", () => {
      for (const conversation of this.#saving.keys()) write("localStorage", UNSAVED + conversation.id, JSON.stringify(conversation));
    });
  }

  /// Reads the list. Marks partial answers of closed tabs as "interrupted".
  async load() {
    try {
      await this.#rescue();
      await this.#finishSaves();
      for (const conversation of await database.getAll("conversations")) {
        if (conversation.deleted) await this.#purge(conversation.id);
        else this.conversations.set(conversation.id, conversation);
      }
    } catch (error) {
      this.#fail(error);
    }
    if (channel) channel.onmessage = ({ data }) => this.#hear(data);
    this.#changed("list");
  }

  newestFirst() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  /// Returns the messages of a conversation by id.
  async messages(id) {
    if (!this.#messages.has(id)) {
      let found = [];
      try {
        found = await database.getByIndex("messages", "conversation", id);
      } catch (error) {
        this.#fail(error);
      }
      // Another caller has opened it meanwhile. All callers use that map.
      if (!this.#messages.has(id)) this.#messages.set(id, new Map(found.map((message) => [message.id, message])));
    }
    return this.#messages.get(id);
  }

  async branch(id) {
    const conversation = this.conversations.get(id);
    return conversation ? branch(conversation, await this.messages(id)) : [];
  }

  create(firstText) {
    const now = Date.now();
    const conversation = { id: newId(), title: titleOf(firstText), named: false, created: now, updated: now, chosen: {} };
    this.#messages.set(conversation.id, new Map());
    this.#saveConversation(conversation);
    return conversation;
  }

  rename(id, title) {
    const conversation = this.conversations.get(id);
    if (!conversation || !title.trim()) return;
    conversation.title = title.trim();
    conversation.named = true;
    this.#saveConversation(conversation);
  }

  /// Deletes a conversation. The returned function restores it, until its `finish` is called or the page is loaded again.
  remove(id) {
    const conversation = this.conversations.get(id);
    const messages = this.messages(id); // another tab that loads meanwhile removes them from the database
    conversation.deleted = Date.now();
    this.#saveConversation(conversation);
    const undo = () => {
      delete conversation.deleted;
      return this.#save(conversation, async () => {
        this.#messages.set(id, await messages);
        await this.#write("messages", ...(await messages).values());
        await this.#saveConversation(conversation);
      });
    };
    undo.finish = () => { if (conversation.deleted && !this.conversations.has(id)) this.#purge(id).catch((error) => this.#fail(error)); };
    return undo;
  }

  /// Adds a message to the tree and shows its branch.
  async add(conversation, message) {
    const messages = await this.messages(conversation.id);
    let order = 0;
    for (const other of messages.values()) order = Math.max(order, other.order + 1);
    const added = { id: newId(), conversation: conversation.id, order, created: Date.now(), status: "done", ...message };
    messages.set(added.id, added);
    choose(conversation, added);
    conversation.updated = Date.now();
    await Promise.all([this.save(added), this.#saveConversation(conversation)]);
    return added;
  }

  show(conversation, message) {
    choose(conversation, message);
    this.#saveConversation(conversation);
  }

  async save(message) {
    if (!this.conversations.has(message.conversation)) return; // deleted meanwhile
    await this.#write("messages", message);
    channel?.postMessage({ message });
  }

  /// Returns true if another tab streams this message now.
  streamsElsewhere(message) {
    return message.status === "streaming" && Date.now() - (this.#heard.get(message.id) ?? 0) < ELSEWHERE;
  }

  /// Adds conversations of a file under new ids. `entries` is [{conversation, messages}].
  async addAll(entries) {
    for (const { conversation, messages } of entries) {
      this.#messages.set(conversation.id, new Map(messages.map((message) => [message.id, message])));
      await this.#write("messages", ...messages);
      await this.#saveConversation(conversation);
    }
  }

  /// Stores partial answers when the page ends, since IndexedDB would not finish in time.
  keepForNextLoad(messages) {
    write("localStorage", RESCUE, JSON.stringify(messages)); // when it is full, the last periodic save remains
  }

  async #rescue() {
    const text = read("localStorage", RESCUE);
    if (!text) return;
    for (const message of JSON.parse(text)) {
      const saved = await database.get("messages", message.id);
      if (saved?.status === "streaming") await database.put("messages", { ...message, status: "interrupted" });
    }
    remove("localStorage", RESCUE);
  }

  async #purge(id) {
    this.#messages.delete(id);
    await database.removeByIndex("messages", "conversation", id);
    await database.remove("conversations", id);
  }

  async #saveConversation(conversation) {
    if (conversation.deleted) this.conversations.delete(conversation.id);
    else this.conversations.set(conversation.id, conversation);
    this.#changed("list");
    await this.#save(conversation, () => this.#write("conversations", conversation));
    channel?.postMessage({ conversation });
  }

  // Runs `store`. If the page is left meanwhile, the next load stores the conversation.
  async #save(conversation, store) {
    conversation.saved = Math.max(Date.now(), (conversation.saved ?? 0) + 1);
    this.#saving.set(conversation, (this.#saving.get(conversation) ?? 0) + 1);
    await store();
    if (this.#failed) return; // pagehide keeps it
    const left = this.#saving.get(conversation) - 1;
    if (left) this.#saving.set(conversation, left);
    else this.#saving.delete(conversation);
  }

  // Stores the conversations that pages had not stored when they were left, unless another page has changed them since.
  async #finishSaves() {
    for (const name of names("localStorage", UNSAVED)) {
      const text = read("localStorage", name);
      let kept = null;
      try {
        kept = JSON.parse(text);
      } catch { /* It was not written by this page. */ }
      if (typeof kept?.id === "string") {
        // Messages are stored before their conversation, and removed before it.
        const isNew = !(await database.get("conversations", kept.id))
          && (await database.getByIndex("messages", "conversation", kept.id)).length > 0;
        let changes = false;
        await database.update("conversations", kept.id, (stored) => {
          changes = stored ? kept.saved > (stored.saved ?? 0) : isNew;
          return changes ? kept : undefined;
        });
        if (changes) channel?.postMessage({ conversation: kept });
      }
      if (read("localStorage", name) === text) remove("localStorage", name); // else another page has kept a later change
    }
  }

  async #write(store, ...values) {
    if (this.#failed) return;
    try {
      await database.put(store, ...values);
    } catch (error) {
      this.#fail(error);
    }
  }

  // Applies a change of another tab.
  #hear({ conversation, message }) {
    if (message) {
      this.#heard.set(message.id, Date.now());
      const known = this.#messages.get(message.conversation);
      if (!known) return;
      known.set(message.id, Object.assign(known.get(message.id) ?? {}, message));
      this.#changed("messages", message.conversation);
    } else if (conversation) {
      const known = this.conversations.get(conversation.id);
      if (known && (conversation.saved ?? 0) < (known.saved ?? 0)) return; // it was changed here since
      if (conversation.deleted) {
        if (known) Object.assign(known, conversation); // users of the old object cannot save it as a stored one
        this.conversations.delete(conversation.id);
        this.#messages.delete(conversation.id);
        this.#changed("removed", conversation.id);
      } else {
        this.conversations.set(conversation.id, known ? Object.assign(known, conversation) : conversation);
      }
      this.#changed("list");
    }
  }

  #fail(error) {
    if (this.#failed) return;
    this.#failed = true;
    this.dispatchEvent(new CustomEvent("fault", { detail: `This browser does not store conversations: ${error?.message ?? error}` }));
  }

  #changed(kind, id) {
    this.dispatchEvent(new CustomEvent(kind, { detail: id }));
  }
}
