// Builds the body of a chat completion from a branch and the settings.

/// Converts the branch to messages of the API.
export function toMessages(messages, system) {
  const made = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, calls, results } of messages) {
    if (role === "tool") {
      for (const result of results) made.push({ role: "tool", tool_call_id: result.id, content: result.content });
    } else if (role === "user") {
      made.push({ role, content });
    } else if (content || calls?.length) { // an answer that failed before its first token has no message
      const message = { role, content: content ?? "" };
      if (calls?.length) {
        message.tool_calls = calls.map((call) => (
          { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      }
      made.push(message);
    }
  }
  return made;
}

/// Returns the request that answers the last of `messages`, or continues it if it is an answer. Throws an Error that
/// names an invalid setting.
export function makeBody(model, messages, settings) {
  const body = { model, messages: toMessages(messages, settings.system.trim()) };
  for (const [name, field] of [["temperature", "temperature"], ["topP", "top_p"], ["maxTokens", "max_tokens"]]) {
    const value = Number.parseFloat(settings[name]);
    if (Number.isFinite(value)) body[field] = value;
  }
  if (settings.tools.trim()) {
    body.tools = parseTools(settings.tools);
  }
  if (messages.at(-1).role === "assistant") {
    body.messages.at(-1).content = messages.at(-1).content.trimEnd();
    body.continue_final_message = true;
    body.add_generation_prompt = false;
  }
  return body;
}

export function parseTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Settings, Tools: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error('Settings, Tools: expected a JSON array such as [{"type": "function", "function": {"name": "…"}}]');
  return tools;
}
