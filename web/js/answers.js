// Streams answers, several at the same time, and saves each message while it grows.
import { streamChat } from "./api.js";
import { makeBody } from "./request.js";

const SAVE_PERIOD = 500; // ms between saves of a growing answer

/// Appends the contents of a chunk to `message`.
function absorb(message, chunk) {
  if (chunk.usage) message.stats.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const part of calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.stats.finish = choice.finish_reason;
  return Boolean(content || reasoning || calls);
}

export class Answers extends EventTarget {
  #running = new Map(); // message id -> {message, controller}
  #chats;
  #findModel;
  #readSettings;

  /// `findModel` resolves with the name of the served model.
  constructor(chats, findModel, readSettings) {
    super();
    this.#chats = chats;
    this.#findModel = findModel;
    this.#readSettings = readSettings;
    addEventListener("pagehide", () => {
      if (this.#running.size) chats.keepForNextLoad([...this.#running.values()].map(({ message }) => message));
    });
  }

  runs(messageId) { return this.#running.has(messageId); }
  runsIn(conversationId) { return [...this.#running.values()].some(({ message }) => message.conversation === conversationId); }
  stop(messageId) { this.#running.get(messageId)?.controller.abort(); }
  stopIn(conversationId) {
    for (const { message, controller } of this.#running.values()) if (message.conversation === conversationId) controller.abort();
  }

  /// Adds an answer to `parent`, the last message of its branch, and streams it.
  async answer(conversation, parent) {
    const messages = await this.#chats.branch(conversation.id);
    const upTo = messages.slice(0, messages.findIndex((message) => message.id === parent.id) + 1);
    if (!upTo.length) return; // another tab deleted the conversation
    const message = await this.#chats.add(conversation, { parent: parent.id, role: "assistant", content: "", status: "streaming", stats: {} });
    await this.#run(message, upTo);
  }

  /// Streams the rest of an answer that was cut off and appends it.
  async goOn(message) {
    const messages = await this.#chats.branch(message.conversation);
    const upTo = messages.slice(0, messages.findIndex((other) => other.id === message.id) + 1);
    message.content = message.content.trimEnd(); // the server continues after the last word
    message.status = "streaming";
    message.stats = { earlier: (message.stats.earlier ?? 0) + (message.stats.usage?.completion_tokens ?? 0) };
    delete message.error;
    await this.#run(message, upTo);
  }

  async #run(message, messages) {
    const controller = new AbortController();
    this.#running.set(message.id, { message, controller });
    this.#changed(message, "start");
    let started = performance.now();
    let saved = started;
    try {
      const body = makeBody(await this.#findModel(), messages, this.#readSettings());
      message.model = body.model;
      started = performance.now();
      await streamChat(body, controller.signal, (chunk) => {
        const now = performance.now();
        if (absorb(message, chunk)) message.stats.first ??= now - started;
        if (now - saved > SAVE_PERIOD) {
          saved = now;
          this.#chats.save(message);
        }
        this.#changed(message, "grow");
      });
      message.status = "done";
    } catch (error) {
      this.#fail(message, error);
    }
    message.stats.total = performance.now() - started;
    this.#running.delete(message.id);
    await this.#chats.save(message);
    this.#changed(message, "end");
  }

  #fail(message, error) {
    const partial = Boolean(message.content || message.reasoning);
    if (error.name === "AbortError") {
      message.status = "stopped";
      return;
    }
    message.status = partial ? "interrupted" : "failed";
    message.error = error instanceof TypeError ? `The server does not answer (${error.message}).` : error.message;
    if (error.needsKey) this.dispatchEvent(new CustomEvent("needskey", { detail: error }));
  }

  #changed(message, kind) {
    this.dispatchEvent(new CustomEvent(kind, { detail: message }));
  }
}
