#include "app/generate_input.h"

#include <limits>
#include <optional>
#include <sstream>

#include "app/chat_request.h"
#include "app/input.h"

namespace moesaic::app {
namespace {

StatusOr<std::vector<int32_t>> Tokenize(const ModelText& text, const std::string& prompt, bool add_special) {
  RETURN_IF_ERROR(text.tokenizer.status());
  return text.tokenizer->Encode(prompt, add_special);
}

// Renders a chat request with the model's template, ready for the answer.
StatusOr<std::vector<int32_t>> RenderChat(const ModelText& text, const server::PromptTemplate* chat,
                                          const server::Json& request) {
  RETURN_IF_ERROR(text.chat.status());
  ASSIGN_OR_RETURN(const std::string prompt, RenderRequest(*chat, request, /*add_generation_prompt=*/true));
  return Tokenize(text, prompt, /*add_special=*/false);  // the template writes BOS itself
}

// `chat` is null if the model has no template.
StatusOr<Prompt> ParseLine(const std::string& line, const ModelText& text, const server::PromptTemplate* chat,
                           bool add_special) {
  const StatusOr<server::Json> parsed = server::ParseJson(line);
  if (!parsed.ok() || !parsed->is_object()) return InvalidArgument("not a JSON object");
  const server::Json& json = *parsed;
  Prompt prompt;
  if (json.contains("id")) prompt.id = server::Dump(json["id"]);
  if (const auto ids = json.find("ids"); ids != json.end()) {
    if (!ids->is_array()) return InvalidArgument("\"ids\" must be an array of integers");
    for (const server::Json& id : *ids) {
      if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<int32_t>::max()) {
        return InvalidArgument("\"ids\" must be an array of token ids, found {}", server::Dump(id));
      }
      prompt.ids.push_back(id.get<int32_t>());
    }
    return prompt;
  }
  if (json.contains("messages")) {
    if (!json["messages"].is_array()) return InvalidArgument("\"messages\" must be an array");
    ASSIGN_OR_RETURN(prompt.ids, RenderChat(text, chat, json));
    return prompt;
  }
  const auto field = json.contains("prompt") ? json.find("prompt") : json.find("text");
  if (field == json.end() || !field->is_string()) {
    return InvalidArgument(
        "needs a string \"prompt\" (or \"text\"), an array \"messages\" or an array \"ids\"");
  }
  ASSIGN_OR_RETURN(prompt.ids, Tokenize(text, field->get<std::string>(), add_special));
  return prompt;
}

Status ReadPromptLines(const std::string& path, const ModelText& text, bool add_special,
                       std::vector<Prompt>* prompts) {
  ASSIGN_OR_RETURN(std::string contents, ReadInput(path));
  std::optional<server::PromptTemplate> chat;
  if (text.chat.ok()) chat.emplace(*text.chat);
  std::istringstream stream(std::move(contents));
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto prompt = ParseLine(line, text, chat ? &*chat : nullptr, add_special);
    if (!prompt.ok()) return Annotate(prompt.status(), fmt::format("{}:{}", InputName(path), number));
    prompts->push_back(*std::move(prompt));
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<Prompt>> ReadPrompts(const GenerateInput& input, const ModelText& text) {
  std::vector<Prompt> prompts;
  // Adds the contents of a file, or of standard input, as one prompt.
  const auto add_file = [&](const std::string& path) -> Status {
    ASSIGN_OR_RETURN(const std::string contents, ReadInput(path));
    StatusOr<std::vector<int32_t>> ids = Tokenize(text, contents, input.add_special);
    if (!ids.ok()) return Annotate(ids.status(), InputName(path));
    if (contents.empty()) return InvalidArgument("{}: the prompt is empty", InputName(path));
    prompts.push_back({"", *std::move(ids)});
    return OkStatus();
  };
  if (!input.ids.empty()) prompts.push_back({"", input.ids});
  for (const std::string& prompt : input.prompts) {
    ASSIGN_OR_RETURN(std::vector<int32_t> ids, Tokenize(text, prompt, input.add_special));
    prompts.push_back({"", std::move(ids)});
  }
  if (!input.file.empty()) RETURN_IF_ERROR(add_file(input.file));
  if (!input.jsonl.empty()) {
    RETURN_IF_ERROR(ReadPromptLines(input.jsonl, text, input.add_special, &prompts));
  } else if (prompts.empty()) {
    RETURN_IF_ERROR(add_file(kStandardInput));
  }
  if (prompts.empty()) {
    return InvalidArgument("{}: no line has a prompt", InputName(input.jsonl));
  }
  return prompts;
}

}  // namespace moesaic::app
