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

// Returns the messages as templates expect them: `messages`, or `edited`. `exact` becomes false where engines
// differ.
StatusOr<std::string_view> TemplateMessages(std::string_view messages, Dialect dialect, std::string* edited,
                                            bool* exact) {
  constexpr size_t kMaxMessages = 1 << 16;
  size_t copied = 0, at = 1;  // after the bracket
  for (size_t count = 0; (at = messages.find_first_not_of(" \t\r\n,", at)) + 1 < messages.size(); ++count) {
    if (count == kMaxMessages) return Unimplemented("more than {} messages", kMaxMessages);
    size_t length = 0;
    ASSIGN_OR_RETURN(const JsonMembers fields,
                     JsonMembers::ScanFirst(messages.substr(at), kChecked, &length));
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
    if (!edit.empty()) {
      edited->append(messages.substr(copied, at - copied));
      edited->append(edit.Apply());
      copied = at + length;
    }
    at += length;
  }
  if (copied == 0) return messages;
  edited->append(messages.substr(copied));
  return *edited;
}

// Makes the pieces of a rendered template.
void SetPieces(const text::TemplateText& text, RenderedPrompt* prompt) {
  std::vector<size_t> ends;  // of the text before each hole, escaped
  size_t copied = 0;
  for (const text::TemplateText::Hole& hole : text.holes) {
    AppendJsonEscaped(std::string_view(text.text).substr(copied, hole.at - copied), &prompt->between);
    copied = hole.at;
    ends.push_back(prompt->between.size());
  }
  AppendJsonEscaped(std::string_view(text.text).substr(copied), &prompt->between);
  const std::string_view between = prompt->between;
  const auto add = [prompt](std::string_view piece) {
    if (!piece.empty()) prompt->pieces.push_back(piece);
  };
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); begin = ends[i++]) {
    add(between.substr(begin, ends[i] - begin));
    add(text.holes[i].json);
  }
  add(between.substr(begin));
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

StatusOr<std::unique_ptr<RenderedPrompt>> PromptRenderer::Render(const RequestBody& body) {
  for (const std::string_view field : {"chat_template", "truncate_prompt_tokens", "prompt_embeds", "suffix",
                                       "images", "mm_processor_kwargs"}) {
    if (body.members.Given(field)) return Unimplemented("'{}' is left to the engine", field);
  }
  auto prompt = std::make_unique<RenderedPrompt>();
  if (body.endpoint == Endpoint::kChat) {
    RETURN_IF_ERROR(RenderChat(body, prompt.get()));
  } else if (body.endpoint == Endpoint::kCompletions) {
    RETURN_IF_ERROR(RenderCompletion(body, prompt.get()));
  } else {
    return Unimplemented("this endpoint has no prompt");
  }
  return prompt;
}

Status PromptRenderer::Tokenize(RenderedPrompt* prompt, size_t max_unknown) {
  if (prompt->tokenized) return OkStatus();
  RETURN_IF_ERROR(cache_->Encode(prompt->pieces, prompt->add_special, &prompt->progress, max_unknown));
  prompt->tokenized = true;
  if (prompt->progress.ids.empty()) prompt->exact = false;
  return OkStatus();
}

Status PromptRenderer::RenderCompletion(const RequestBody& body, RenderedPrompt* prompt) {
  prompt->exact = true;
  if (std::optional<std::vector<int32_t>> ids = PromptIds(body)) {
    prompt->progress.ids = *std::move(ids);
    prompt->tokenized = true;
    return OkStatus();
  }
  const std::optional<std::string_view> text = body.members.QuotedString("prompt");
  if (!text) return Unimplemented("several prompts in one request");
  prompt->pieces = {*text};
  prompt->add_special = body.members.Bool("add_special_tokens").value_or(true);
  return OkStatus();
}

Status PromptRenderer::RenderChat(const RequestBody& body, RenderedPrompt* prompt) {
  if (!chat_) return Unimplemented("the model has no chat template");
  const JsonMembers& members = body.members;
  if (members.Bool("continue_final_message").value_or(false)) {
    return Unimplemented("'continue_final_message' is left to the engine");
  }
  prompt->exact = true;
  ASSIGN_OR_RETURN(const std::string_view messages,
                   TemplateMessages(members.Value("messages"), dialect_, &prompt->messages, &prompt->exact));
  text::ChatInput input;
  if (members.Given("tools")) {
    if (members.Value("tool_choice") != "\"none\"") input.tools_json = std::string(members.Value("tools"));
    prompt->exact = false;
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
  ASSIGN_OR_RETURN(const text::TemplateText text, chat_->RenderWithHoles(input, messages));
  SetPieces(text, prompt);
  prompt->add_special = members.Bool("add_special_tokens").value_or(false);
  return OkStatus();
}

}  // namespace moesaic::proxy
