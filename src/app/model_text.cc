#include "app/model_text.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"

namespace moesaic::app {
namespace {

using checkpoint::Checkpoint;

text::GgufVocab VocabOf(const checkpoint::GgufMetadata& metadata) {
  const std::string prefix = "tokenizer.ggml.";
  const auto text = [&](const char* key) {
    const std::string* value = metadata.String(prefix + key);
    return value == nullptr ? "" : *value;
  };
  const auto texts = [&](const char* key) {
    const std::vector<std::string>* values = metadata.Strings(prefix + key);
    return values == nullptr ? std::vector<std::string>{} : *values;
  };
  const auto id = [&](const char* key) -> std::optional<int32_t> {
    const std::optional<int64_t> value = metadata.Int(prefix + key);
    if (!value || *value < 0 || *value > std::numeric_limits<int32_t>::max()) return std::nullopt;
    return static_cast<int32_t>(*value);
  };
  text::GgufVocab vocab;
  vocab.model = text("model");
  vocab.pre = text("pre");
  vocab.tokens = texts("tokens");
  vocab.merges = texts("merges");
  if (const auto* scores = metadata.Numbers(prefix + "scores"))
    vocab.scores.assign(scores->begin(), scores->end());
  if (const auto* types = metadata.Ints(prefix + "token_type")) {
    vocab.token_types.assign(types->begin(), types->end());
  }
  vocab.bos_id = id("bos_token_id");
  vocab.eos_id = id("eos_token_id");
  vocab.unk_id = id("unknown_token_id");
  vocab.pad_id = id("padding_token_id");
  vocab.eot_id = id("eot_token_id");
  vocab.add_bos = metadata.Bool(prefix + "add_bos_token");
  vocab.add_eos = metadata.Bool(prefix + "add_eos_token");
  vocab.add_space_prefix = metadata.Bool(prefix + "add_space_prefix");
  return vocab;
}

StatusOr<text::Tokenizer> TokenizerOf(const Checkpoint& source) {
  if (source.gguf() != nullptr) return text::Tokenizer::FromGguf(VocabOf(*source.gguf()));
  if (std::filesystem::is_directory(source.path())) return text::Tokenizer::FromFolder(source.path());
  const std::string config = source.ReadText("tokenizer_config.json").value_or("");
  if (const auto json = source.ReadText("tokenizer.json")) return text::Tokenizer::FromJson(*json, config);
  if (const auto ranks = source.ReadText("tiktoken.model")) {
    return text::Tokenizer::FromTiktoken(*ranks, config, text::TiktokenStyle::kKimi);
  }
  return NotFound("{}: the model has no tokenizer", source.path());
}

// Sets the special tokens that templates name by role.
void SetTokens(const StatusOr<text::Tokenizer>& tokenizer, text::ChatTemplate* chat) {
  if (!tokenizer.ok()) return;
  const text::SpecialTokens& tokens = tokenizer->special_tokens();
  if (tokens.bos) chat->SetToken("bos_token", tokens.bos->text);
  if (tokens.eos) chat->SetToken("eos_token", tokens.eos->text);
  if (tokens.pad) chat->SetToken("pad_token", tokens.pad->text);
  if (tokens.unk) chat->SetToken("unk_token", tokens.unk->text);
}

StatusOr<text::ChatTemplate> OpenTemplate(const Checkpoint& source,
                                          const StatusOr<text::Tokenizer>& tokenizer) {
  if (std::filesystem::is_directory(source.path())) return text::ChatTemplate::FromFolder(source.path());
  const auto jinja = source.ReadText("chat_template.jinja");
  auto config =
      source.ReadText("chat_template.json");  // older processors: the same field in a file of its own
  if (!config) config = source.ReadText("tokenizer_config.json");
  if (!jinja && !config) return NotFound("{}: the model has no chat template", source.path());
  StatusOr<text::ChatTemplate> chat =
      jinja ? text::ChatTemplate::FromSource(*jinja) : text::ChatTemplate::FromConfig(*config);
  if (!chat.ok()) return Annotate(chat.status(), source.path());
  SetTokens(tokenizer, &*chat);
  return chat;
}

StatusOr<nlohmann::json> ReadGeneration(const Checkpoint& source) {
  const auto text = source.ReadText("generation_config.json");
  if (!text) return nlohmann::json::object();
  nlohmann::json json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return DataLoss("{}: generation_config.json is not a JSON object", source.path());
  return json;
}

// Adds "eos_token_id", which may be a number, a list of numbers, null or absent.
Status AddEosIds(const nlohmann::json& config, const char* file, std::vector<int32_t>* ids) {
  const auto found = config.find("eos_token_id");
  if (found == config.end() || found->is_null()) return OkStatus();
  for (const nlohmann::json& id : found->is_array() ? *found : nlohmann::json::array({*found})) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument("{}: \"eos_token_id\" must be a token id or a list of them, found {}", file,
                             found->dump());
    }
    ids->push_back(id.get<int32_t>());
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<std::pair<std::string, std::string>>> HubTexts(const Checkpoint& source) {
  std::vector<std::pair<std::string, std::string>> texts;
  if (source.gguf() == nullptr) return texts;
  const std::string chat = source.ReadText("chat_template.jinja").value_or("");
  ASSIGN_OR_RETURN(text::HubFiles files, text::HubFilesFromGguf(VocabOf(*source.gguf()), chat));
  texts.emplace_back("tokenizer.json", std::move(files.tokenizer_json));
  texts.emplace_back("tokenizer_config.json", std::move(files.tokenizer_config_json));
  return texts;
}

StatusOr<std::vector<std::pair<std::string, std::string>>> SideTexts(const Checkpoint& source) {
  ASSIGN_OR_RETURN(auto texts, HubTexts(source));
  const std::filesystem::path path(source.path());
  std::error_code error;
  const auto folder = std::filesystem::is_directory(path, error) ? path : path.parent_path();
  if (source.container() == "safetensors") {
    constexpr std::string_view kExtensions[] = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"};
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().string();
      const bool is_text =
          std::ranges::find(kExtensions, entry.path().extension().string()) != std::end(kExtensions);
      if (!is_text || name == "config.json" || name.ends_with(".safetensors.index.json")) continue;
      if (auto text = source.ReadText(name)) texts.emplace_back(name, *std::move(text));
    }
    std::ranges::sort(texts);
  } else if (auto chat = source.ReadText("chat_template.jinja")) {
    texts.emplace_back("chat_template.jinja", *std::move(chat));
  }
  return texts;
}

StatusOr<text::Tokenizer> OpenTokenizer(const std::string& path) {
  const std::filesystem::path file(path);
  std::error_code error;
  if (file.filename() == "tokenizer.json") return text::Tokenizer::FromFolder(file.parent_path());
  if (std::filesystem::exists(file / "tokenizer.json", error)) return text::Tokenizer::FromFolder(file);
  ASSIGN_OR_RETURN(ModelText model, OpenModelText(path));
  return std::move(model.tokenizer);
}

StatusOr<ModelText> OpenModelText(const std::string& path) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> source, Checkpoint::Open(path));
  StatusOr<text::Tokenizer> tokenizer = TokenizerOf(*source);
  StatusOr<text::ChatTemplate> chat = OpenTemplate(*source, tokenizer);
  if (!chat.ok()) chat = Annotate(chat.status(), "chat template");
  std::vector<int32_t> eos_ids;
  ASSIGN_OR_RETURN(nlohmann::json generation, ReadGeneration(*source));
  RETURN_IF_ERROR(AddEosIds(generation, "generation_config.json", &eos_ids));
  RETURN_IF_ERROR(AddEosIds(source->config(), "config.json", &eos_ids));
  if (tokenizer.ok()) {
    const text::SpecialTokens& tokens = tokenizer->special_tokens();
    if (tokens.eos) eos_ids.push_back(tokens.eos->id);
    if (tokens.end_of_turn) eos_ids.push_back(tokens.end_of_turn->id);
  }
  std::sort(eos_ids.begin(), eos_ids.end());
  eos_ids.erase(std::unique(eos_ids.begin(), eos_ids.end()), eos_ids.end());
  return ModelText{std::move(tokenizer), std::move(chat), std::move(eos_ids), std::move(generation)};
}

}  // namespace moesaic::app
