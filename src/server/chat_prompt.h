// A conversation as clients send it, checked and brought into the form that templates know, and its prompt.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// What of a request's tools the model may or must use.
enum class ToolUse { kNone, kAuto, kRequired, kNamed };

struct Conversation {
  /// Roles system, user, assistant and tool. Contents are strings; arguments of calls are as the client sent
  /// them, JSON text or an object. PromptTemplate brings both into the form that the template shows.
  Json messages = Json::array();
  Json tools = Json::array();  // {"type": "function", "function": {...}}
  ToolUse tool_use = ToolUse::kNone;
  std::string tool_name;  // with kNamed
  bool parallel_calls = true;
  Json variables = Json::object();  // for the template
  Json documents;                   // array or null
  bool add_generation_prompt = true;
  bool continue_last = false;  // the answer goes on with the last message
};

/// Reads "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs" and what else
/// /v1/chat/completions has of a conversation.
Conversation ReadConversation(Fields& body);

/// One message of `messages`, checked. `path` names it.
StatusOr<Json> ReadMessage(const Json& message, const std::string& path);
/// Parts of text put together by line breaks; a string as it is. Other parts than text are refused.
StatusOr<std::string> ReadContent(const Json& content, const std::string& path);

struct Prompt {
  std::string text;
  std::vector<int32_t> ids;
  bool in_reasoning = false;  // the template left a thought open
};

/// The prompt's text. InvalidArgument with the template's error.
StatusOr<std::string> RenderText(const PromptTemplate& chat, const Conversation& conversation);

/// RenderText with the model's template, and its tokens.
StatusOr<Prompt> RenderPrompt(const ServedModel& model, const Conversation& conversation);

}  // namespace moesaic::server
