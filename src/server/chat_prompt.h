// Checks a client's conversation, converts it to the form of chat templates, and renders its prompt.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// The tools that the model may or must call: none, any of them or none, at least one, or the named one.
enum class ToolUse { kNone, kAuto, kRequired, kNamed };

struct Conversation {
  /// Messages with the roles system, user, assistant and tool. Contents are strings. Arguments of calls are
  /// JSON text or an object, as the client sent them; PromptTemplate converts both to the form that the
  /// template shows.
  Json messages = Json::array();
  Json tools = Json::array();  // {"type": "function", "function": {...}}
  ToolUse tool_use = ToolUse::kNone;
  std::string tool_name;  // the named tool, for kNamed
  bool parallel_calls = true;
  Json variables = Json::object();  // further variables of the template
  Json documents;                   // array or null
  bool add_generation_prompt = true;
  bool continue_last = false;  // true if the answer continues the last message
};

/// Reads the conversation of a /v1/chat/completions body: "messages", "tools", "tool_choice",
/// "parallel_tool_calls", "chat_template_kwargs" and the other fields of the template.
Conversation ReadConversation(Fields& body);

/// Checks one message. `path` names it in errors.
StatusOr<Json> ReadMessage(const Json& message, const std::string& path);
/// Returns a string unchanged, and joins an array of text parts with line breaks. Refuses other parts.
StatusOr<std::string> ReadContent(const Json& content, const std::string& path);

struct Prompt {
  std::string text;
  std::vector<int32_t> ids;
  bool in_reasoning = false;  // true if the template leaves a reasoning section open
};

/// Renders the prompt's text. InvalidArgument has the template's error.
StatusOr<std::string> RenderText(const PromptTemplate& chat, const Conversation& conversation);

/// Renders the text with the model's template and tokenizes it.
StatusOr<Prompt> RenderPrompt(const ServedModel& model, const Conversation& conversation);

}  // namespace moesaic::server
