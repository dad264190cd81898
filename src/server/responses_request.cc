#include "server/responses_request.h"

#include <limits>
#include <utility>

#include "server/api_error.h"
#include "server/tools.h"

namespace moesaic::server {
namespace {

// Adds a call to the last message if that is the assistant's, since adjacent calls belong to one message.
void AddCall(Json call, Json* messages) {
  if (messages->empty() || messages->back()["role"] != "assistant") {
    messages->push_back({{"role", "assistant"}, {"content", ""}});
  }
  messages->back()["tool_calls"].push_back(std::move(call));
}

Status ReadFunctionCall(Fields& item, Json* messages) {
  std::string id, name, arguments;
  item.String("call_id", &id);
  item.String("name", &name);
  item.String("arguments", &arguments);
  RETURN_IF_ERROR(item.status());
  AddCall({{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", arguments}}}},
          messages);
  return OkStatus();
}

Status ReadCallOutput(Fields& item, const std::string& path, Json* messages) {
  std::string id, text;
  item.String("call_id", &id);
  const Json* output = item.Any("output");
  RETURN_IF_ERROR(item.status());
  if (output != nullptr) {
    ASSIGN_OR_RETURN(text, ReadContent(*output, path + ".output"));
  }
  messages->push_back({{"role", "tool"}, {"content", text}, {"tool_call_id", id}});
  return OkStatus();
}

Status ReadItem(const Json& json, const std::string& path, Json* messages) {
  Fields item(json, path);
  std::string type = "message";
  item.String("type", &type);
  RETURN_IF_ERROR(item.status());
  if (type == "message") {
    ASSIGN_OR_RETURN(Json message, ReadMessage(json, path));
    messages->push_back(std::move(message));
    return OkStatus();
  }
  if (type == "function_call") return ReadFunctionCall(item, messages);
  if (type == "function_call_output") return ReadCallOutput(item, path, messages);
  if (type == "reasoning") return OkStatus();  // templates drop the reasoning of earlier turns
  return FieldError(
      path + ".type", "invalid_value",
      fmt::format("Invalid '{}.type': message, function_call, function_call_output or reasoning, found '{}'",
                  path, type));
}

void ReadInput(Fields& body, const Json& history, Json* messages) {
  std::string instructions;
  body.String("instructions", &instructions);
  if (!instructions.empty()) messages->push_back({{"role", "system"}, {"content", instructions}});
  for (const Json& message : history) messages->push_back(message);
  const Json* input = body.Any("input");
  if (!body.ok()) return;
  if (input == nullptr) {
    // A conversation may contain the question already.
    if (history.empty())
      body.Fail("input", "missing_required_parameter", "Missing required parameter: 'input'.");
    return;
  }
  if (input->is_string()) {
    messages->push_back({{"role", "user"}, {"content", *input}});
    return;
  }
  if (!input->is_array()) return body.FailType("input", "a string or an array", *input);
  body.Merge(AppendItems(*input, "input", messages));
  if (body.ok() && messages->empty()) body.Fail("input", "empty_array", "Invalid 'input': empty array.");
}

void ReadChoice(Fields& body, Conversation* conversation) {
  const Json* choice = body.Any("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_object()) {
    Fields fields(*choice, "tool_choice");
    fields.String("name", &conversation->tool_name);
    body.Merge(fields.status());
    conversation->tool_use = ToolUse::kNamed;
    if (body.ok() && !HasTool(*conversation, conversation->tool_name)) {
      body.Fail("tool_choice", "invalid_value",
                fmt::format("Invalid 'tool_choice': there is no tool '{}'", conversation->tool_name));
    }
    return;
  }
  std::string word;
  body.String("tool_choice", &word);
  if (word == "none") conversation->tool_use = ToolUse::kNone;
  if (word == "required") conversation->tool_use = ToolUse::kRequired;
  if (body.ok() && word != "none" && word != "required" && word != "auto") {
    body.Fail(
        "tool_choice", "invalid_value",
        fmt::format("Invalid 'tool_choice': 'none', 'auto', 'required' or a function, found '{}'", word));
  }
  if (body.ok() && word == "required" && conversation->tools.empty()) {
    body.Fail("tool_choice", "invalid_value", "Invalid 'tool_choice': 'required' needs 'tools'");
  }
}

void ReadTextFormat(Fields& body, std::optional<GrammarText>* grammar) {
  const Json* object = body.Object("text");
  if (object == nullptr) return;
  Fields holder(*object, "text");
  if (const Json* format_json = holder.Object("format")) {
    Fields format(*format_json, "text.format");
    std::string type = "text";
    format.String("type", &type);
    if (type == "json_schema") {
      *grammar = ReadSchema(format);
    } else if (type == "json_object") {
      *grammar = GrammarText{text::GrammarKind::kJsonSchema, R"({"type":"object"})", "text.format"};
    } else if (type != "text" && format.ok()) {
      format.Fail(
          "type", "invalid_value",
          fmt::format("Invalid 'text.format.type': 'text', 'json_object' or 'json_schema', found '{}'",
                      type));
    }
    holder.Merge(format.status());
  }
  body.Merge(holder.status());
}

Json Member(const Fields& body, const char* name, const Json& otherwise) {
  const Json* found = body.Any(name);
  return found == nullptr ? otherwise : *found;
}

}  // namespace

Status AppendItems(const Json& items, const std::string& path, Json* messages) {
  for (size_t i = 0; i < items.size(); ++i) {
    RETURN_IF_ERROR(ReadItem(items[i], fmt::format("{}[{}]", path, i), messages));
  }
  return OkStatus();
}

ResponsesRequest ReadResponses(Fields& body, const ServedModel& model, const Json& history) {
  ResponsesRequest request;
  request.generation = ReadGeneration(body, model);
  body.Bool("store", &request.store);
  bool background = false;
  body.Bool("background", &background);
  if (background)
    body.Fail("background", "invalid_value", "'background': this server answers while the client waits");
  ReadInput(body, history, &request.conversation.messages);
  ReadTools(body, kResponsesTool, &request.conversation);
  ReadChoice(body, &request.conversation);
  body.Bool("parallel_tool_calls", &request.conversation.parallel_calls);
  ReadTextFormat(body, &request.grammar);
  if (body.Has("max_output_tokens")) {
    int most = 0;
    body.Int("max_output_tokens", 1, std::numeric_limits<int>::max(), &most);
    request.generation.max_tokens = most;
  }
  body.Int("top_logprobs", 0, kMaxLogprobs, &request.top_logprobs);
  std::vector<std::string> include;
  body.Strings("include", 16, &include);
  for (const std::string& name : include)
    request.logprobs = request.logprobs || name == "message.output_text.logprobs";
  if (const Json* reasoning = body.Object("reasoning")) {
    Fields fields(*reasoning, "reasoning");
    std::string effort;
    fields.String("effort", &effort);
    body.Merge(fields.status());
    if (!effort.empty()) request.conversation.variables["reasoning_effort"] = effort;
    if (effort == "none") request.conversation.variables["enable_thinking"] = false;
  }
  if (body.ok() && request.generation.n > 1)
    body.Fail("n", "invalid_value", "Invalid 'n': a response has one choice");
  if (!body.ok()) return request;
  Json conversation = Member(body, "conversation", nullptr);
  if (conversation.is_string()) conversation = {{"id", conversation}};
  request.echo = {{"conversation", std::move(conversation)},
                  {"instructions", Member(body, "instructions", nullptr)},
                  {"max_output_tokens", Member(body, "max_output_tokens", nullptr)},
                  {"metadata", Member(body, "metadata", Json::object())},
                  {"parallel_tool_calls", request.conversation.parallel_calls},
                  {"previous_response_id", Member(body, "previous_response_id", nullptr)},
                  {"reasoning", Member(body, "reasoning", {{"effort", nullptr}, {"summary", nullptr}})},
                  {"store", request.store},
                  {"temperature", request.generation.sampling.temperature},
                  {"text", Member(body, "text", {{"format", {{"type", "text"}}}})},
                  {"tool_choice", Member(body, "tool_choice", "auto")},
                  {"tools", Member(body, "tools", Json::array())},
                  {"top_p", request.generation.sampling.top_p},
                  {"top_logprobs", request.top_logprobs},
                  {"truncation", "disabled"},
                  {"user", Member(body, "user", nullptr)}};
  return request;
}

}  // namespace moesaic::server
