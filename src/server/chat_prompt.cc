#include "server/chat_prompt.h"

#include <utility>

#include "server/api_error.h"
#include "server/tools.h"

namespace moesaic::server {
namespace {

// Names that chat_template_kwargs must not set.
constexpr const char* kReservedVariables[] = {
    "messages",      "tools",    "documents",    "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "strftime_now", "raise_exception"};

// OpenAI's clients send arguments as JSON text. Data sets often have an object.
Json ReadArguments(Fields& function) {
  const Json* arguments = function.Any("arguments");
  if (arguments == nullptr) return "";
  if (arguments->is_string() || arguments->is_object()) return *arguments;
  function.FailType("arguments", "a string or an object", *arguments);
  return "";
}

StatusOr<Json> ReadCalls(const Json& calls, const std::string& path) {
  Json read = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    Fields call(calls[i], at);
    std::string id, name;
    call.String("id", &id);
    const Json* function = call.Object("function");
    if (call.ok() && function == nullptr)
      call.Fail("function", "missing_required_parameter",
                "Missing required parameter: '" + at + ".function'.");
    RETURN_IF_ERROR(call.status());
    Fields fields(*function, at + ".function");
    fields.String("name", &name);
    Json arguments = ReadArguments(fields);
    RETURN_IF_ERROR(fields.status());
    read.push_back({{"id", id},
                    {"type", "function"},
                    {"function", {{"name", name}, {"arguments", std::move(arguments)}}}});
  }
  return read;
}

void ReadToolChoice(Fields& body, Conversation* conversation) {
  const Json* choice = body.Any("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_string()) {
    const auto& word = choice->get_ref<const std::string&>();
    if (word == "none") {
      conversation->tool_use = ToolUse::kNone;
    } else if (word == "required") {
      conversation->tool_use = ToolUse::kRequired;
    } else if (word != "auto") {
      return body.Fail(
          "tool_choice", "invalid_value",
          fmt::format("Invalid 'tool_choice': 'none', 'auto', 'required' or a function, found '{}'", word));
    }
  } else if (choice->is_object()) {
    Fields fields(*choice, "tool_choice");
    const Json* function = fields.Object("function");
    Fields named(function == nullptr ? *choice : *function,
                 function == nullptr ? "tool_choice" : "tool_choice.function");
    named.String("name", &conversation->tool_name);
    body.Merge(fields.status());
    body.Merge(named.status());
    conversation->tool_use = ToolUse::kNamed;
    if (body.ok() && !HasTool(*conversation, conversation->tool_name)) {
      body.Fail(
          "tool_choice", "invalid_value",
          fmt::format("Invalid 'tool_choice': there is no tool '{}' in 'tools'", conversation->tool_name));
    }
  } else {
    return body.FailType("tool_choice", "a string or an object", *choice);
  }
  if (body.ok() && conversation->tool_use == ToolUse::kRequired && conversation->tools.empty()) {
    body.Fail("tool_choice", "invalid_value", "Invalid 'tool_choice': 'required' needs 'tools'");
  }
}

// Reads further variables of the template. Refuses those that the request's own fields set.
void ReadVariables(Fields& body, Json* variables) {
  const Json* object = body.Object("chat_template_kwargs");
  if (object == nullptr) return;
  Fields fields(*object, "chat_template_kwargs");
  for (const char* reserved : kReservedVariables) {
    if (!object->contains(reserved)) continue;
    fields.Fail(reserved, "invalid_value",
                fmt::format("Invalid '{}': '{}' is reserved; use the request's own fields",
                            fields.Path(reserved), reserved));
  }
  body.Merge(fields.status());
  *variables = *object;
}

// Cuts the prompt after the last message's text, so that the template's end of the message is left out.
Status CutAfterLast(const Conversation& conversation, std::string* prompt) {
  const std::string& last = conversation.messages.back()["content"].get_ref<const std::string&>();
  const size_t end = last.find_last_not_of(" \t\r\n");
  if (end == std::string::npos) return OkStatus();
  const std::string text = last.substr(0, end + 1);
  const size_t at = prompt->rfind(text);
  if (at == std::string::npos) {
    return FieldError("continue_final_message", "invalid_value",
                      "the template changes the last message, so that the answer cannot continue it");
  }
  prompt->erase(at + text.size());
  return OkStatus();
}

}  // namespace

StatusOr<std::string> ReadContent(const Json& content, const std::string& path) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return TypeError(path, "a string or an array of objects", content);
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    Fields part(content[i], at);
    std::string type = "text", piece;
    part.String("type", &type);
    const bool refusal = type == "refusal";
    if (part.ok() && type != "text" && type != "input_text" && type != "output_text" && !refusal) {
      part.Fail("type", "invalid_value",
                fmt::format("Invalid '{}.type': this model takes text only, found '{}'", at, type));
    }
    const char* member = refusal ? "refusal" : "text";
    if (part.ok() && !part.Has(member)) {
      part.Fail(member, "missing_required_parameter",
                fmt::format("Missing required parameter: '{}.{}'.", at, member));
    }
    part.String(member, &piece);
    RETURN_IF_ERROR(part.status());
    if (i > 0) text += '\n';
    text += piece;
  }
  return text;
}

StatusOr<Json> ReadMessage(const Json& message, const std::string& path) {
  Fields fields(message, path);
  std::string role, name, call_id, reasoning;
  fields.String("role", &role);
  if (fields.ok() && role.empty()) {
    fields.Fail("role", "missing_required_parameter",
                fmt::format("Missing required parameter: '{}.role'.", path));
  }
  if (role == "developer") role = "system";
  if (role == "function") role = "tool";
  if (fields.ok() && role != "system" && role != "user" && role != "assistant" && role != "tool") {
    fields.Fail(
        "role", "invalid_value",
        fmt::format("Invalid value: '{}'. Supported values for '{}.role' are: 'system', 'developer', 'user', "
                    "'assistant' and 'tool'.",
                    role, path));
  }
  fields.String("name", &name);
  fields.String("tool_call_id", &call_id);
  fields.String("reasoning_content", &reasoning);
  const Json* calls = fields.Array("tool_calls");
  RETURN_IF_ERROR(fields.status());
  Json read = {{"role", role}, {"content", ""}};
  if (const Json* content = fields.Any("content")) {
    ASSIGN_OR_RETURN(read["content"], ReadContent(*content, path + ".content"));
  } else if (role != "assistant") {
    return FieldError(path + ".content", "missing_required_parameter",
                      fmt::format("Missing required parameter: '{}.content'.", path));
  }
  if (!name.empty()) read["name"] = name;
  if (role == "tool" && !call_id.empty()) read["tool_call_id"] = call_id;
  if (role == "assistant" && !reasoning.empty()) read["reasoning_content"] = reasoning;
  if (role == "assistant" && calls != nullptr && !calls->empty()) {
    ASSIGN_OR_RETURN(read["tool_calls"], ReadCalls(*calls, path + ".tool_calls"));
  }
  return read;
}

Conversation ReadConversation(Fields& body) {
  Conversation conversation;
  const Json* messages = body.Array("messages");
  if (messages == nullptr) {
    body.Fail("messages", "missing_required_parameter", "Missing required parameter: 'messages'.");
    return conversation;
  }
  if (messages->empty()) {
    body.Fail("messages", "empty_array", "Invalid 'messages': empty array. Expected at least one message.");
  }
  for (size_t i = 0; body.ok() && i < messages->size(); ++i) {
    StatusOr<Json> message = ReadMessage((*messages)[i], fmt::format("messages[{}]", i));
    body.Merge(message.status());
    if (message.ok()) conversation.messages.push_back(*std::move(message));
  }
  ReadTools(body, kChatTool, &conversation);
  ReadToolChoice(body, &conversation);
  body.Bool("parallel_tool_calls", &conversation.parallel_calls);
  body.Bool("add_generation_prompt", &conversation.add_generation_prompt);
  body.Bool("continue_final_message", &conversation.continue_last);
  if (body.Has("chat_template")) {
    body.Fail("chat_template", "invalid_value", "'chat_template' is set by the server, not by requests");
  }
  ReadVariables(body, &conversation.variables);
  if (const Json* documents = body.Array("documents")) conversation.documents = *documents;
  std::string effort;
  body.String("reasoning_effort", &effort);
  if (!effort.empty()) conversation.variables["reasoning_effort"] = effort;
  return conversation;
}

StatusOr<std::string> RenderText(const PromptTemplate& chat, const Conversation& conversation) {
  text::ChatInput input;
  if (!conversation.tools.empty() && conversation.tool_use != ToolUse::kNone)
    input.tools_json = Dump(conversation.tools);
  if (conversation.documents.is_array()) input.documents_json = Dump(conversation.documents);
  if (!conversation.variables.empty()) input.variables_json = Dump(conversation.variables);
  input.add_generation_prompt = conversation.add_generation_prompt && !conversation.continue_last;
  ASSIGN_OR_RETURN(std::string text, chat.Render(conversation.messages, std::move(input)));
  if (conversation.continue_last) RETURN_IF_ERROR(CutAfterLast(conversation, &text));
  return text;
}

StatusOr<Prompt> RenderPrompt(const ServedModel& model, const Conversation& conversation) {
  if (!model.chat) {
    return InvalidArgument("this model has no chat template: use /v1/completions");
  }
  Prompt prompt;
  ASSIGN_OR_RETURN(prompt.text, RenderText(*model.chat, conversation));
  ASSIGN_OR_RETURN(prompt.ids, model.Encode(prompt.text, /*add_special=*/false, "messages"));
  prompt.in_reasoning = text::EndsInReasoning(model.reasoning, prompt.text);
  return prompt;
}

}  // namespace moesaic::server
