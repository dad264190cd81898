#include "app/generate_input.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace moesaic::app {
namespace {

StatusOr<std::string> ReadAll(std::istream& stream, const std::string& name) {
  if (!stream) return NotFound("{}: can't be opened", name);
  std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  if (stream.bad()) return IoError("{}: can't be read", name);
  return text;
}

StatusOr<std::vector<int32_t>> Tokenize(const ModelText& text, const std::string& prompt, bool add_special) {
  RETURN_IF_ERROR(text.tokenizer.status());
  return text.tokenizer->Encode(prompt, add_special);
}

// A chat request: its messages as the model's template renders them, ready for the answer.
StatusOr<std::vector<int32_t>> RenderChat(const ModelText& text, const nlohmann::json& request) {
  RETURN_IF_ERROR(text.chat.status());
  text::ChatInput input;
  input.messages_json = request["messages"].dump();
  if (request.contains("tools")) input.tools_json = request["tools"].dump();
  input.add_generation_prompt = true;
  ASSIGN_OR_RETURN(const std::string prompt, text.chat->Render(input));
  return Tokenize(text, prompt, /*add_special=*/false);  // the template writes BOS itself
}

StatusOr<Prompt> ParseLine(const std::string& line, const ModelText& text, bool add_special) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidArgument("not a JSON object");
  Prompt prompt;
  if (json.contains("id")) prompt.id = json["id"].dump();
  if (const auto ids = json.find("ids"); ids != json.end()) {
    if (!ids->is_array()) return InvalidArgument("\"ids\" must be an array of integers");
    for (const nlohmann::json& id : *ids) {
      if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<int32_t>::max()) {
        return InvalidArgument("\"ids\" must be an array of token ids, found {}", id.dump());
      }
      prompt.ids.push_back(id.get<int32_t>());
    }
    return prompt;
  }
  if (json.contains("messages")) {
    if (!json["messages"].is_array()) return InvalidArgument("\"messages\" must be an array");
    ASSIGN_OR_RETURN(prompt.ids, RenderChat(text, json));
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

Status ReadLines(std::istream& stream, const std::string& name, const ModelText& text, bool add_special,
                 std::vector<Prompt>* prompts) {
  if (!stream) return NotFound("{}: can't be opened", name);
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto prompt = ParseLine(line, text, add_special);
    if (!prompt.ok()) return Annotate(prompt.status(), fmt::format("{}:{}", name, number));
    prompts->push_back(*std::move(prompt));
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<Prompt>> ReadPrompts(const GenerateInput& input, const ModelText& text) {
  std::vector<Prompt> prompts;
  if (!input.ids.empty()) prompts.push_back({"", input.ids});
  for (const std::string& prompt : input.prompts) {
    ASSIGN_OR_RETURN(std::vector<int32_t> ids, Tokenize(text, prompt, input.add_special));
    prompts.push_back({"", std::move(ids)});
  }
  if (!input.file.empty()) {
    std::ifstream file(input.file, std::ios::binary);
    ASSIGN_OR_RETURN(const std::string contents, ReadAll(file, input.file));
    ASSIGN_OR_RETURN(std::vector<int32_t> ids, Tokenize(text, contents, input.add_special));
    prompts.push_back({"", std::move(ids)});
  }
  if (input.jsonl == "-") {
    RETURN_IF_ERROR(ReadLines(std::cin, "stdin", text, input.add_special, &prompts));
  } else if (!input.jsonl.empty()) {
    std::ifstream file(input.jsonl, std::ios::binary);
    RETURN_IF_ERROR(ReadLines(file, input.jsonl, text, input.add_special, &prompts));
  } else if (prompts.empty()) {
    ASSIGN_OR_RETURN(const std::string contents, ReadAll(std::cin, "stdin"));
    ASSIGN_OR_RETURN(std::vector<int32_t> ids, Tokenize(text, contents, input.add_special));
    prompts.push_back({"", std::move(ids)});
  }
  return prompts;
}

}  // namespace moesaic::app
