// Loads tokenizers from files in Hub layout.
#include <algorithm>

#include "text/file.h"
#include "text/tiktoken.h"
#include "text/tokenizer_build.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_impl.h"

namespace moesaic::text {
namespace {

std::optional<SpecialToken> Role(const Tokenizer::Impl& impl, const TokenizerConfig& config,
                                 const char* role) {
  const auto found = config.roles.find(role);
  if (found == config.roles.end()) return std::nullopt;
  const int32_t id = impl.bridge->token_to_id(Bytes(found->second));
  if (id < 0) return std::nullopt;
  return SpecialToken{id, found->second};
}

/// Llama's classes make their own post-processor, also if the tokenizer.json has one. DeepSeek's has only
/// ByteLevel.
bool IsLlama(const TokenizerConfig& config) {
  return config.tokenizer_class == "LlamaTokenizerFast" || config.tokenizer_class == "LlamaTokenizer";
}

/// Returns whether the config determines BOS and EOS around a text, overriding the tokenizer.json.
/// `transformers` does so for its general class and Llama's; other classes have it in their tokenizer.json.
bool ConfigWraps(const TokenizerConfig& config, std::string_view tokenizer_json) {
  if (!config.add_bos && !config.add_eos) return false;
  const std::string& name = config.tokenizer_class;
  if (name.empty() || name == "PreTrainedTokenizerFast" || name == "TokenizersBackend") return true;
  if (IsLlama(config)) return true;
  // Without a post-processor in the file, the config determines it.
  const size_t at = tokenizer_json.find("\"post_processor\"");
  const size_t value = tokenizer_json.find_first_not_of(" \t\r\n:", at + 16);
  return at == std::string_view::npos || tokenizer_json.substr(value).starts_with("null");
}

std::string RoleText(const TokenizerConfig& config, const char* role, const std::optional<bool>& wanted) {
  const auto found = config.roles.find(role);
  return wanted.value_or(false) && found != config.roles.end() ? found->second : std::string();
}

}  // namespace

StatusOr<std::shared_ptr<Tokenizer::Impl>> BuildTokenizer(std::string_view json,
                                                          const TokenizerConfig& config, bool config_wraps) {
  return Bridged([&] {
    rust::Vec<bridge::AddedToken> added;
    for (const TokenizerConfig::AddedToken& token : config.added_tokens) {
      added.push_back({token.id, token.content, token.special, token.lstrip, token.rstrip, token.single_word,
                       token.normalized});
    }
    const bridge::Wrapping wrapping{config_wraps, RoleText(config, "bos_token", config.add_bos),
                                    RoleText(config, "eos_token", config.add_eos)};
    auto impl = std::make_shared<Tokenizer::Impl>(
        Tokenizer::Impl{bridge::tokenizer_from_json(Bytes(json), added, wrapping), {}});
    impl->special = {Role(*impl, config, "bos_token"), Role(*impl, config, "eos_token"),
                     Role(*impl, config, "pad_token"), Role(*impl, config, "unk_token"), std::nullopt};
    return impl;
  });
}

StatusOr<Tokenizer> Tokenizer::FromJson(std::string_view tokenizer_json,
                                        std::string_view tokenizer_config_json) {
  ASSIGN_OR_RETURN(const TokenizerConfig config, TokenizerConfig::Parse(tokenizer_config_json));
  ASSIGN_OR_RETURN(auto impl, BuildTokenizer(tokenizer_json, config, ConfigWraps(config, tokenizer_json)));
  return Tokenizer(std::move(impl));
}

StatusOr<Tokenizer> Tokenizer::FromTiktoken(std::string_view ranks, std::string_view tokenizer_config_json,
                                            TiktokenStyle style) {
  ASSIGN_OR_RETURN(TokenizerConfig config, TokenizerConfig::Parse(tokenizer_config_json));
  ASSIGN_OR_RETURN(const std::string json, TiktokenToJson(ranks, style, &config));
  ASSIGN_OR_RETURN(auto impl, BuildTokenizer(json, config, config.add_bos || config.add_eos));
  return Tokenizer(std::move(impl));
}

StatusOr<Tokenizer> Tokenizer::FromFolder(const std::filesystem::path& folder) {
  std::string config;
  ASSIGN_OR_RETURN(config, ReadIfThere(folder / "tokenizer_config.json", config));
  StatusOr<Tokenizer> made = NotFound("no tokenizer.json, tiktoken.model or *.tiktoken");
  if (StatusOr<std::string> json = ReadFile(folder / "tokenizer.json"); json.ok()) {
    made = FromJson(*json, config);
  } else if (json.status().code() != StatusCode::kNotFound) {
    return json.status();
  } else {
    std::filesystem::path ranks;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      const std::filesystem::path& path = entry.path();
      if (path.filename() == "tiktoken.model" || path.extension() == ".tiktoken") ranks = path;
    }
    if (!ranks.empty()) {
      ASSIGN_OR_RETURN(const std::string bytes, ReadFile(ranks));
      const bool kimi = ranks.filename() == "tiktoken.model";
      made = FromTiktoken(bytes, config, kimi ? TiktokenStyle::kKimi : TiktokenStyle::kQwen);
    }
  }
  if (!made.ok()) return Annotate(made.status(), folder.string());
  return made;
}

}  // namespace moesaic::text
