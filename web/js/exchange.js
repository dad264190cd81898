// Exports a conversation's visible branch as Markdown and its tree as JSON, and imports such JSON.
import { newId } from "./tree.js";

const FORMAT = "moesaic.conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];
const NAMES = { user: "You", assistant: "Answer", tool: "Tool results" };

const fence = (text, language = "") => {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((match) => match[0].length));
  const marks = "`".repeat(longest + 1);
  return `${marks}${language}\n${text}\n${marks}`;
};

/// Returns the branch as one Markdown document.
export function toMarkdown(conversation, messages) {
  const parts = [`# ${conversation.title}`];
  for (const { role, content, calls, results, status } of messages) {
    parts.push(`## ${NAMES[role]}`);
    if (content) parts.push(content.trim());
    for (const call of calls ?? []) parts.push(`Call of \`${call.name}\`:`, fence(call.arguments, "json"));
    for (const result of results ?? []) parts.push(`Result of \`${result.name}\`:`, fence(result.content));
    if (status === "interrupted" || status === "stopped") parts.push(`*(${status})*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/// `entries` is [{conversation, messages}].
export function toJson(entries) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations: entries }, null, 1)}\n`;
}

const text = (value) => typeof value === "string" ? value : "";
const strings = (list, names) => !Array.isArray(list) ? undefined
  : list.map((item) => Object.fromEntries(names.map((name) => [name, text(item?.[name])])));

function readMessage(value, at) {
  if (typeof value?.id !== "string" || !ROLES.includes(value.role)) throw new Error(`${at}: expected an "id" and a "role" of ${ROLES.join(", ")}`);
  const message = { id: value.id, parent: typeof value.parent === "string" ? value.parent : null, role: value.role,
    order: Number(value.order) || 0, created: Number(value.created) || Date.now(), content: text(value.content),
    status: ["done", "stopped", "failed"].includes(value.status) ? value.status : value.status === undefined ? "done" : "interrupted" };
  if (value.role === "assistant") {
    message.stats = typeof value.stats === "object" && value.stats ? value.stats : {};
    if (value.reasoning) message.reasoning = text(value.reasoning);
    if (value.error) message.error = text(value.error);
    if (value.model) message.model = text(value.model);
    message.calls = strings(value.calls, ["id", "name", "arguments"]);
  }
  if (value.role === "tool") message.results = strings(value.results, ["id", "name", "content"]) ?? [];
  return message;
}

/// Reads conversations from a file's text. Gives them new ids, so that an import replaces no conversation. Throws an Error
/// that names the wrong part of the file.
export function fromJson(source) {
  let file;
  try {
    file = JSON.parse(source);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error(`expected an export of this page ("format": "${FORMAT}")`);
  if (file.version !== VERSION) throw new Error(`version ${file.version} is not known; this page reads version ${VERSION}`);
  return file.conversations.map(({ conversation, messages } = {}, i) => {
    const at = `conversations[${i}]`;
    if (!conversation || !Array.isArray(messages)) throw new Error(`${at}: expected "conversation" and "messages"`);
    const read = messages.map((message, j) => readMessage(message, `${at}.messages[${j}]`));
    const ids = new Map(read.map((message) => [message.id, newId()]));
    const id = newId();
    for (const message of read) {
      message.id = ids.get(message.id);
      message.parent = message.parent === null ? null : ids.get(message.parent) ?? null;
      message.conversation = id;
    }
    const chosen = Object.entries(conversation.chosen ?? {}).map(([parent, child]) => [parent === "root" ? parent : ids.get(parent), ids.get(child)])
      .filter(([parent, child]) => parent && child);
    return { messages: read, conversation: { id, title: text(conversation.title) || "Imported chat", named: true,
      created: Number(conversation.created) || Date.now(), updated: Number(conversation.updated) || Date.now(),
      chosen: Object.fromEntries(chosen) } };
  });
}

/// Makes a file name from a title.
export const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat"}.${ending}`;
