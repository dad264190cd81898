#include "server/anthropic_prompt.h"

#include <utility>

#include "server/api_error.h"
#include "server/tools.h"

namespace moesaic::server {
namespace {

// Reads an array of text blocks, or a string.
StatusOr<std::string> ReadText(const Json& content, const std::string& path) {
  return ReadContent(content, path);
}

struct Blocks {
  std::string text, thinking;
  Json calls = Json::array();
  Json results = Json::array();  // messages of role "tool"
};

Status ReadToolUse(Fields& block, Blocks* blocks) {
  std::string id, name;
  block.String("id", &id);
  block.String("name", &name);
  const Json* input = block.Object("input");
  RETURN_IF_ERROR(block.status());
  blocks->calls.push_back(
      {{"id", id},
       {"type", "function"},
       {"function", {{"name", name}, {"arguments", input == nullptr ? Json::object() : *input}}}});
  return OkStatus();
}

Status ReadToolResult(Fields& block, const std::string& path, Blocks* blocks) {
  std::string id, text;
  bool is_error = false;
  block.String("tool_use_id", &id);
  block.Bool("is_error", &is_error);
  RETURN_IF_ERROR(block.status());
  if (const Json* content = block.Any("content")) {
    ASSIGN_OR_RETURN(text, ReadText(*content, path + ".content"));
  }
  blocks->results.push_back(
      {{"role", "tool"}, {"content", is_error ? "Error: " + text : text}, {"tool_call_id", id}});
  return OkStatus();
}

Status ReadBlock(const Json& json, const std::string& path, Blocks* blocks) {
  Fields block(json, path);
  std::string type, text;
  block.String("type", &type);
  RETURN_IF_ERROR(block.status());
  if (type == "text") {
    block.String("text", &text);
    blocks->text += (blocks->text.empty() ? "" : "\n") + text;
    return block.status();
  }
  if (type == "thinking") {
    block.String("thinking", &text);
    blocks->thinking += text;
    return block.status();
  }
  if (type == "redacted_thinking") return OkStatus();
  if (type == "tool_use") return ReadToolUse(block, blocks);
  if (type == "tool_result") return ReadToolResult(block, path, blocks);
  return FieldError(
      path + ".type", "invalid_value",
      fmt::format("{}.type: this model takes text, tool_use, tool_result and thinking, found '{}'", path,
                  type));
}

Status ReadOne(const Json& json, const std::string& path, Conversation* conversation) {
  Fields message(json, path);
  std::string role;
  message.String("role", &role);
  if (message.ok() && role != "user" && role != "assistant" && role != "system") {
    message.Fail("role", "invalid_value",
                 fmt::format("{}.role: must be 'user' or 'assistant', found '{}'", path, role));
  }
  const Json* content = message.Any("content");
  if (message.ok() && content == nullptr) {
    message.Fail("content", "missing_required_parameter", path + ".content: Field required");
  }
  RETURN_IF_ERROR(message.status());
  Blocks blocks;
  if (content->is_string()) {
    blocks.text = content->get<std::string>();
  } else if (content->is_array()) {
    for (size_t i = 0; i < content->size(); ++i) {
      RETURN_IF_ERROR(ReadBlock((*content)[i], fmt::format("{}.content[{}]", path, i), &blocks));
    }
  } else {
    return TypeError(path + ".content", "a string or an array", *content);
  }
  // The tool results precede the user's text.
  for (Json& result : blocks.results) conversation->messages.push_back(std::move(result));
  if (!blocks.results.empty() && blocks.text.empty()) return OkStatus();
  Json read = {{"role", role}, {"content", blocks.text}};
  if (!blocks.thinking.empty()) read["reasoning_content"] = blocks.thinking;
  if (!blocks.calls.empty()) read["tool_calls"] = std::move(blocks.calls);
  conversation->messages.push_back(std::move(read));
  return OkStatus();
}

void ReadAnthropicChoice(Fields& body, Conversation* conversation) {
  const Json* json = body.Object("tool_choice");
  if (json == nullptr) return;
  Fields choice(*json, "tool_choice");
  std::string type;
  bool one_at_a_time = false;
  choice.String("type", &type);
  choice.String("name", &conversation->tool_name);
  choice.Bool("disable_parallel_tool_use", &one_at_a_time);
  conversation->parallel_calls = !one_at_a_time;
  if (type == "none") {
    conversation->tool_use = ToolUse::kNone;
  } else if (type == "any") {
    conversation->tool_use = ToolUse::kRequired;
  } else if (type == "tool") {
    conversation->tool_use = ToolUse::kNamed;
    if (choice.ok() && !HasTool(*conversation, conversation->tool_name)) {
      choice.Fail("name", "invalid_value",
                  fmt::format("tool_choice.name: there is no tool '{}'", conversation->tool_name));
    }
  } else if (type != "auto" && choice.ok()) {
    choice.Fail("type", "invalid_value",
                fmt::format("tool_choice.type: auto, any, tool or none, found '{}'", type));
  }
  if (choice.ok() && type == "any" && conversation->tools.empty()) {
    choice.Fail("type", "invalid_value", "tool_choice.type: 'any' needs 'tools'");
  }
  body.Merge(choice.status());
}

}  // namespace

Conversation ReadMessages(Fields& body) {
  Conversation conversation;
  if (const Json* system = body.Any("system")) {
    const StatusOr<std::string> text = ReadText(*system, "system");
    body.Merge(text.status());
    if (text.ok() && !text->empty())
      conversation.messages.push_back({{"role", "system"}, {"content", *text}});
  }
  const Json* messages = body.Array("messages");
  if (body.ok() && (messages == nullptr || messages->empty())) {
    body.Fail(
        "messages", "missing_required_parameter",
        messages == nullptr ? "messages: Field required" : "messages: at least one message is required");
  }
  for (size_t i = 0; body.ok() && i < messages->size(); ++i) {
    body.Merge(ReadOne((*messages)[i], fmt::format("messages[{}]", i), &conversation));
  }
  ReadTools(body, kMessagesTool, &conversation);
  ReadAnthropicChoice(body, &conversation);
  if (const Json* json = body.Object("thinking")) {
    Fields thinking(*json, "thinking");
    std::string type;
    thinking.String("type", &type);
    body.Merge(thinking.status());
    conversation.variables["enable_thinking"] = type != "disabled";
  }
  // The model continues a last message of the assistant.
  conversation.continue_last = body.ok() && conversation.messages.back()["role"] == "assistant" &&
                               !conversation.messages.back().contains("tool_calls");
  return conversation;
}

}  // namespace moesaic::server
