#include "text/tokenizer_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace moesaic::text {
namespace {

using Json = nlohmann::json;

constexpr const char* kRoles[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

std::optional<bool> Flag(const Json& json, const char* name) {
  if (!json.contains(name) || !json[name].is_boolean()) return std::nullopt;
  return json[name].get<bool>();
}

/// A token is given as its text, or as an object with a "content".
std::optional<std::string> TokenText(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  if (json.is_object() && json.contains("content") && json["content"].is_string()) {
    return json["content"].get<std::string>();
  }
  return std::nullopt;
}

Status ReadAddedTokens(const Json& json, std::vector<TokenizerConfig::AddedToken>* tokens) {
  if (!json.contains("added_tokens_decoder")) return OkStatus();
  const Json& decoder = json["added_tokens_decoder"];
  if (!decoder.is_object())
    return InvalidArgument("tokenizer_config.json: \"added_tokens_decoder\" is not an object");
  for (const auto& [key, value] : decoder.items()) {
    TokenizerConfig::AddedToken token;
    const bool digits = !key.empty() && key.size() < 9 &&
                        std::ranges::all_of(key, [](char c) { return c >= '0' && c <= '9'; });
    const std::optional<std::string> text = TokenText(value);
    if (!digits || !text) {
      return InvalidArgument("tokenizer_config.json: \"added_tokens_decoder\" has an invalid entry \"{}\"",
                             key);
    }
    token.id = std::stoi(key);
    token.content = *text;
    token.special = Flag(value, "special").value_or(false);
    token.lstrip = Flag(value, "lstrip").value_or(false);
    token.rstrip = Flag(value, "rstrip").value_or(false);
    token.single_word = Flag(value, "single_word").value_or(false);
    token.normalized = Flag(value, "normalized").value_or(!token.special);
    tokens->push_back(std::move(token));
  }
  std::ranges::sort(*tokens, {}, &TokenizerConfig::AddedToken::id);
  return OkStatus();
}

Status ReadTemplates(const Json& json, std::map<std::string, std::string>* templates) {
  if (!json.contains("chat_template") || json["chat_template"].is_null()) return OkStatus();
  const Json& found = json["chat_template"];
  if (found.is_string()) {
    templates->emplace("default", found.get<std::string>());
    return OkStatus();
  }
  if (!found.is_array()) {
    return InvalidArgument("tokenizer_config.json: \"chat_template\" is neither a string nor a list");
  }
  for (const Json& entry : found) {
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() ||
        !entry.contains("template") || !entry["template"].is_string()) {
      return InvalidArgument(
          "tokenizer_config.json: an entry of \"chat_template\" lacks a name or a template");
    }
    templates->emplace(entry["name"].get<std::string>(), entry["template"].get<std::string>());
  }
  return OkStatus();
}

}  // namespace

StatusOr<TokenizerConfig> TokenizerConfig::Parse(std::string_view text) {
  TokenizerConfig config;
  if (text.empty()) return config;
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return InvalidArgument("tokenizer_config.json is not a JSON object");
  if (json.contains("tokenizer_class") && json["tokenizer_class"].is_string()) {
    config.tokenizer_class = json["tokenizer_class"].get<std::string>();
  }
  for (const char* role : kRoles) {
    if (!json.contains(role)) continue;
    if (const std::optional<std::string> token = TokenText(json[role])) config.roles.emplace(role, *token);
  }
  config.add_bos = Flag(json, "add_bos_token");
  config.add_eos = Flag(json, "add_eos_token");
  RETURN_IF_ERROR(ReadAddedTokens(json, &config.added_tokens));
  RETURN_IF_ERROR(ReadTemplates(json, &config.chat_templates));
  return config;
}

}  // namespace moesaic::text
