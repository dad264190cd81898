#include "proxy/tokenize/prompt_renderer.h"

#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

// Values of a body that ReadRequestBody has scanned.
constexpr JsonLimits kChecked = {.checked = true};

// Returns whether the pre-tokenizer of a tokenizer.json is byte-level.
bool IsByteLevel(const std::filesystem::path& folder) {
  std::ifstream file(folder / "tokenizer.json", std::ios::binary);
  std::string json{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const StatusOr<JsonMembers> members = JsonMembers::Scan(json);
  return members.ok() && members->Value("pre_tokenizer").find("\"ByteLevel\"") != std::string_view::npos;
}

// Joins the text parts of a message's content; Unimplemented for other parts.
StatusOr<std::string> JoinedContent(std::string_view content) {
  ASSIGN_OR_RETURN(const JsonMembers parts, JsonMembers::Scan(content, kChecked));
  std::string joined;
  bool first = true;
  for (const JsonMember& part : parts.all()) {
    if (part.type != JsonType::kObject) return Unimplemented("a content part is no object");
    ASSIGN_OR_RETURN(const JsonMembers fields, JsonMembers::Scan(parts.Text(part), kChecked));
    const std::string type = fields.String("type").value_or("text");
    const std::optional<std::string> text = fields.String("text");
    if (type != "text" || !text) return Unimplemented("content part of type '{}'", type);
    if (!first) joined += '\n';
    first = false;
    joined += *text;
  }
  return joined;
}

// Templates print the arguments of calls as objects; clients send them as JSON text.
StatusOr<std::string> WithObjectArguments(std::string_view calls) {
  ASSIGN_OR_RETURN(const JsonMembers list, JsonMembers::Scan(calls));
  std::string text = "[";
  for (const JsonMember& call : list.all()) {
    ASSIGN_OR_RETURN(const JsonMembers fields, JsonMembers::Scan(list.Text(call)));
    ASSIGN_OR_RETURN(const JsonMembers function, JsonMembers::Scan(fields.Value("function")));
    JsonEdit edit(fields);
    if (const auto arguments = function.String("arguments")) {
      if (JsonMembers::Scan(*arguments).ok()) {
        JsonEdit inner(function);
        inner.Set("arguments", *arguments);
        edit.Set("function", inner.Apply());
      }
    }
    if (text.size() > 1) text += ',';
    text += edit.Apply();
  }
  return text += ']';
}

// Returns the messages as templates expect them. `exact` becomes false where engines differ.
StatusOr<std::string> TemplateMessages(std::string_view messages, Dialect dialect, bool* exact) {
  ASSIGN_OR_RETURN(const JsonMembers list,
                   JsonMembers::Scan(messages, {.max_members = 1 << 16, .checked = true}));
  std::string text = "[";
  text.reserve(messages.size());
  for (const JsonMember& message : list.all()) {
    ASSIGN_OR_RETURN(const JsonMembers fields, JsonMembers::Scan(list.Text(message), kChecked));
    JsonEdit edit(fields);
    const std::string role = fields.String("role").value_or("");
    if (role == "developer" && dialect == Dialect::kMoesaic) edit.Set("role", "\"system\"");
    if (role != "system" && role != "user" && role != "assistant") *exact = false;
    const JsonMember* content = fields.Find("content");
    if (content != nullptr && content->type == JsonType::kArray) {
      ASSIGN_OR_RETURN(const std::string joined, JoinedContent(fields.Text(*content)));
      edit.Set("content", JsonQuoted(joined));
      *exact = false;
    }
    if (content == nullptr || content->type == JsonType::kNull) *exact = false;
    if (fields.Given("tool_calls")) {
      ASSIGN_OR_RETURN(std::string calls, WithObjectArguments(fields.Value("tool_calls")));
      edit.Set("tool_calls", std::move(calls));
      *exact = false;
    }
    if (fields.Given("reasoning_content")) *exact = false;
    if (text.size() > 1) text += ',';
    text += edit.empty() ? std::string(list.Text(message)) : edit.Apply();
  }
  return text += ']';
}

}  // namespace

StatusOr<std::unique_ptr<PromptRenderer>> PromptRenderer::Open(const std::filesystem::path& folder,
                                                               Dialect dialect, size_t cache_bytes) {
  ASSIGN_OR_RETURN(text::Tokenizer tokenizer, text::Tokenizer::FromFolder(folder));
  ASSIGN_OR_RETURN(TextCutter cutter, TextCutter::Create(tokenizer, IsByteLevel(folder)));
  std::optional<text::ChatTemplate> chat;
  StatusOr<text::ChatTemplate> opened = text::ChatTemplate::FromFolder(folder);
  if (opened.ok()) {
    chat = *std::move(opened);
  } else if (opened.status().code() != StatusCode::kNotFound) {
    return opened.status();
  }
  auto cache = std::make_unique<SegmentCache>(std::move(tokenizer), std::move(cutter), cache_bytes);
  return std::unique_ptr<PromptRenderer>(new PromptRenderer(dialect, std::move(cache), std::move(chat)));
}

StatusOr<RenderedPrompt> PromptRenderer::Render(const RequestBody& body, size_t max_unknown) {
  for (const std::string_view field : {"chat_template", "truncate_prompt_tokens", "prompt_embeds", "suffix",
                                       "images", "mm_processor_kwargs"}) {
    if (body.members.Given(field)) return Unimplemented("'{}' is left to the engine", field);
  }
  if (body.endpoint == Endpoint::kChat) return RenderChat(body, max_unknown);
  if (body.endpoint == Endpoint::kCompletions) return RenderCompletion(body, max_unknown);
  return Unimplemented("this endpoint has no prompt");
}

StatusOr<RenderedPrompt> PromptRenderer::RenderCompletion(const RequestBody& body, size_t max_unknown) {
  RenderedPrompt prompt;
  if (std::optional<std::vector<int32_t>> ids = PromptIds(body)) {
    prompt.ids = *std::move(ids);
    prompt.exact = true;
    return prompt;
  }
  const std::optional<std::string> text = body.members.String("prompt");
  if (!text) return Unimplemented("several prompts in one request");
  const bool special = body.members.Bool("add_special_tokens").value_or(true);
  ASSIGN_OR_RETURN(prompt.ids, cache_->Encode(*text, special, max_unknown));
  prompt.exact = !prompt.ids.empty();
  return prompt;
}

StatusOr<RenderedPrompt> PromptRenderer::RenderChat(const RequestBody& body, size_t max_unknown) {
  if (!chat_) return Unimplemented("the model has no chat template");
  const JsonMembers& members = body.members;
  if (members.Bool("continue_final_message").value_or(false)) {
    return Unimplemented("'continue_final_message' is left to the engine");
  }
  RenderedPrompt prompt;
  prompt.exact = true;
  text::ChatInput input;
  ASSIGN_OR_RETURN(input.messages_json, TemplateMessages(members.Value("messages"), dialect_, &prompt.exact));
  input.messages_checked = true;  // they are members of a scanned body, or edits of them
  if (members.Given("tools")) {
    if (members.Value("tool_choice") != "\"none\"") input.tools_json = std::string(members.Value("tools"));
    prompt.exact = false;
  }
  if (members.Given("documents")) input.documents_json = std::string(members.Value("documents"));
  std::string variables = "{}";
  if (members.Given("chat_template_kwargs")) variables = std::string(members.Value("chat_template_kwargs"));
  if (members.Given("reasoning_effort")) {
    ASSIGN_OR_RETURN(const JsonMembers fields, JsonMembers::Scan(variables));
    JsonEdit edit(fields);
    edit.Set("reasoning_effort", std::string(members.Value("reasoning_effort")));
    variables = edit.Apply();
  }
  if (variables != "{}") input.variables_json = std::move(variables);
  input.add_generation_prompt = members.Bool("add_generation_prompt").value_or(true);
  ASSIGN_OR_RETURN(const std::string text, chat_->Render(input));
  ASSIGN_OR_RETURN(prompt.ids,
                   cache_->Encode(text, members.Bool("add_special_tokens").value_or(false), max_unknown));
  if (prompt.ids.empty()) prompt.exact = false;
  return prompt;
}

}  // namespace moesaic::proxy
