// `moesaic tokenize MODEL` converts text to token ids and back, one JSON object per line.
#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "app/model_text.h"
#include "app/output.h"
#include "app/session.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

using nlohmann::json;

struct TokenizeFlags {
  std::string model;
  std::vector<std::string> texts;
  bool no_special = false;
  bool decode = false;
};

StatusOr<json> EncodeLine(const text::Tokenizer& tokenizer, const TokenizeFlags& options, const json& line) {
  if (!line.is_object() || !line.contains("text") || !line["text"].is_string()) {
    return InvalidArgument("needs {{\"text\": \"...\"}}");
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                   tokenizer.Encode(line["text"].get<std::string>(), /*add_special=*/!options.no_special));
  return json{{"ids", ids}};
}

StatusOr<json> DecodeLine(const text::Tokenizer& tokenizer, const TokenizeFlags& options, const json& line) {
  if (!line.is_object() || !line.contains("ids") || !line["ids"].is_array()) {
    return InvalidArgument("needs {{\"ids\": [...]}}");
  }
  std::vector<int32_t> ids;
  for (const json& id : line["ids"]) {
    if (!id.is_number_integer() || id < 0 || id >= tokenizer.vocab_size()) {
      return InvalidArgument("\"ids\" must hold token ids in [0, {}), found {}", tokenizer.vocab_size(),
                             id.dump());
    }
    ids.push_back(id.get<int32_t>());
  }
  ASSIGN_OR_RETURN(const std::string text, tokenizer.Decode(ids, /*skip_special=*/options.no_special));
  return json{{"text", text}};
}

Status RunTokenize(const TokenizeFlags& options) {
  ASSIGN_OR_RETURN(const text::Tokenizer tokenizer, OpenTokenizer(options.model));
  const auto convert = options.decode ? DecodeLine : EncodeLine;
  for (const std::string& text : options.texts) {
    ASSIGN_OR_RETURN(const json result, EncodeLine(tokenizer, options, json{{"text", text}}));
    Print("{}\n", result.dump());
  }
  if (!options.texts.empty()) return OkStatus();
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); ++number) {
    if (line.empty()) continue;
    const json parsed = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded()) return InvalidArgument("line {} is not JSON: {}", number, line.substr(0, 60));
    const StatusOr<json> result = convert(tokenizer, options, parsed);
    if (!result.ok()) return Annotate(result.status(), fmt::format("line {}", number));
    Print("{}\n", result->dump());
    RETURN_IF_ERROR(FlushOutput());  // interactive callers wait for the line
  }
  return OkStatus();
}

}  // namespace

void AddTokenize(Verb& root, VerbRun& run) {
  auto options = std::make_shared<TokenizeFlags>();
  Verb verb = root.AddVerb("tokenize", "Turn text into token ids, or back");
  AddModelPath(
      verb, options->model,
      "Hugging Face folder or id, .gguf file or packed file; a folder with tokenizer.json is enough");
  verb.AddOption("TEXT", options->texts, "Texts to encode; none: JSON lines from standard input");
  verb.AddFlag("--no-special", options->no_special,
               "Do not add BOS or EOS; with --decode: omit special tokens");
  verb.AddFlag("--decode", options->decode, "Read {\"ids\": [...]} lines and write {\"text\": ...} lines");
  verb.Footer(
      "Examples:\n"
      "  moesaic tokenize models/moesaic-tiny \"Hello there\"\n"
      "  echo '{\"text\": \"Hello\"}' | moesaic tokenize model.gguf --no-special\n"
      "  echo '{\"ids\": [1, 2]}' | moesaic tokenize model.gguf --decode");
  verb.OnParsed([options, &run] {
    if (options->decode && !options->texts.empty()) {
      FailUsage("--decode reads lines from standard input, not TEXT");
    }
    run = [options] { return RunTokenize(*options); };
  });
}

}  // namespace moesaic::app
