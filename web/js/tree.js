// A conversation is a tree of messages. The visible branch follows the chosen child at each fork.
//
// Conversation: {id, title, named, created, updated, chosen: {parent id or "root": child id}, deleted?}
// Message: {id, conversation, parent: id or null, order, role, created, status, ...} with
//   user: content. assistant: content, reasoning?, calls?: [{id, name, arguments}], stats, error?, model?.
//   tool: results: [{id, name, content}], one for each call of the parent.
// Status: "done", "streaming", "stopped" by the user, "interrupted" by a reload or a lost connection, or "failed".

const slot = (parent) => parent ?? "root";

/// Returns the children of `parent`, oldest first. A null `parent` has the first messages.
export function children(messages, parent) {
  return [...messages.values()].filter((message) => message.parent === parent).sort((a, b) => a.order - b.order);
}

/// Returns the visible branch, from its first message to its last.
export function branch(conversation, messages) {
  const byParent = new Map();
  for (const message of messages.values()) {
    if (!byParent.has(message.parent)) byParent.set(message.parent, []);
    byParent.get(message.parent).push(message);
  }
  const shown = [];
  for (let parent = null; byParent.has(parent);) {
    const forks = byParent.get(parent).sort((a, b) => a.order - b.order);
    const next = forks.find((message) => message.id === conversation.chosen[slot(parent)]) ?? forks.at(-1);
    byParent.delete(parent); // an imported tree may have a cycle
    shown.push(next);
    parent = next.id;
  }
  return shown;
}

/// Chooses `message` among its siblings.
export function choose(conversation, message) {
  conversation.chosen[slot(message.parent)] = message.id;
}

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/// Returns the first line of a message as a title.
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "New chat";
}
