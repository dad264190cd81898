// Builds tokenizers from the vocabulary of a GGUF file by writing the tokenizer.json from which it was
// converted.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "text/json_writer.h"
#include "text/pre_tokenizers.h"
#include "text/tokenizer_build.h"
#include "text/tokenizer_impl.h"

namespace moesaic::text {
namespace {

enum TokenType { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

int TypeOf(const GgufVocab& vocab, size_t id) {
  return vocab.token_types.empty() ? kNormal : vocab.token_types[id];
}

Status CheckSizes(const GgufVocab& vocab) {
  const size_t size = vocab.tokens.size();
  if (size == 0) return InvalidArgument("tokenizer.ggml.tokens is empty");
  if (size > (1u << 24)) return InvalidArgument("tokenizer.ggml.tokens has {} entries", size);
  if (!vocab.token_types.empty() && vocab.token_types.size() != size) {
    return InvalidArgument("tokenizer.ggml.token_type has {} entries, but tokenizer.ggml.tokens {}",
                           vocab.token_types.size(), size);
  }
  const std::pair<const char*, std::optional<int32_t>> ids[] = {{"bos", vocab.bos_id},
                                                                {"eos", vocab.eos_id},
                                                                {"unknown", vocab.unk_id},
                                                                {"padding", vocab.pad_id},
                                                                {"eot", vocab.eot_id}};
  for (const auto& [name, id] : ids) {
    if (id && (*id < 0 || static_cast<size_t>(*id) >= size)) {
      return InvalidArgument("tokenizer.ggml.{}_token_id is outside the vocabulary of {}: {}", name, size,
                             *id);
    }
  }
  return OkStatus();
}

/// Control tokens are special; user-defined tokens are only matched before the model runs.
std::vector<AddedEntry> AddedTokens(const GgufVocab& vocab, bool unknown_too) {
  std::vector<AddedEntry> added;
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    const int type = TypeOf(vocab, id);
    const bool special = type == kControl || (type == kUnknown && unknown_too);
    if (!special && type != kUserDefined) continue;
    if (vocab.tokens[id].empty()) continue;
    added.push_back({static_cast<int32_t>(id), vocab.tokens[id], special});
  }
  return added;
}

StatusOr<std::string> ByteLevel(const GgufVocab& vocab) {
  const PreTokenizer* pre = FindPreTokenizer(vocab.pre.empty() ? "default" : vocab.pre);
  if (pre == nullptr) {
    return Unimplemented("tokenizer.ggml.pre names an unknown pre-tokenizer: \"{}\"", vocab.pre);
  }
  ByteLevelModel model;
  model.patterns.assign(pre->patterns.begin(), pre->patterns.end());
  model.nfc = pre->nfc;
  model.whole_words = pre->whole_words;
  model.prefix_space = vocab.add_space_prefix.value_or(false);
  std::unordered_set<std::string_view> seen;
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    // Padding rows repeat a name: the first row is the token.
    if (seen.insert(vocab.tokens[id]).second) model.vocab.emplace_back(vocab.tokens[id], id);
  }
  for (size_t i = 0; i < vocab.merges.size(); ++i) {
    const std::string_view merge = vocab.merges[i];
    const size_t space = merge.find(' ', 1);
    if (space == merge.npos || space + 1 == merge.size()) {
      return InvalidArgument("tokenizer.ggml.merges: entry {} is not two tokens: \"{}\"", i, merge);
    }
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    if (!seen.contains(left) || !seen.contains(right)) {
      return InvalidArgument("tokenizer.ggml.merges: entry {} joins an unknown token: \"{}\"", i, merge);
    }
    model.merges.emplace_back(left, right);
  }
  return ByteLevelJson(model, AddedTokens(vocab, false));
}

/// SentencePiece's BPE merges the adjacent pair whose merged token has the best score. The equivalent list of
/// merges contains every split of each token into two tokens, ordered by the token's score, then by the
/// parts' ids.
std::string SentencePieceMerges(const GgufVocab& vocab) {
  std::unordered_map<std::string_view, int32_t> id_of;
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    const int type = TypeOf(vocab, id);
    if (type == kNormal || type == kUserDefined || type == kUnused) id_of.emplace(vocab.tokens[id], id);
  }
  std::vector<int32_t> order;
  order.reserve(id_of.size());
  for (const auto& [text, id] : id_of) order.push_back(id);
  std::ranges::sort(order, [&](int32_t a, int32_t b) {
    return vocab.scores[a] != vocab.scores[b] ? vocab.scores[a] > vocab.scores[b] : a < b;
  });
  std::string out;
  std::vector<std::pair<int32_t, int32_t>> splits;
  for (const int32_t id : order) {
    const std::string_view token = vocab.tokens[id];
    splits.clear();
    for (size_t cut = 1; cut < token.size(); ++cut) {
      if ((static_cast<unsigned char>(token[cut]) & 0xc0) == 0x80) continue;  // inside a UTF-8 character
      const auto left = id_of.find(token.substr(0, cut));
      const auto right = id_of.find(token.substr(cut));
      if (left != id_of.end() && right != id_of.end()) splits.emplace_back(left->second, right->second);
    }
    std::ranges::sort(splits);
    for (const auto& [left, right] : splits) {
      out += out.empty() ? "[" : ",[";
      out += Quoted(vocab.tokens[left]) + "," + Quoted(vocab.tokens[right]) + "]";
    }
  }
  return out;
}

StatusOr<std::string> SentencePiece(const GgufVocab& vocab) {
  if (vocab.scores.size() != vocab.tokens.size()) {
    return InvalidArgument("tokenizer.ggml.scores has {} entries, but tokenizer.ggml.tokens {}",
                           vocab.scores.size(), vocab.tokens.size());
  }
  if (std::ranges::any_of(vocab.scores, [](float score) { return std::isnan(score); })) {
    return InvalidArgument("tokenizer.ggml.scores has a NaN");
  }
  const bool prefix = vocab.add_space_prefix.value_or(true);
  std::string out = R"({"version":"1.0","added_tokens":)" + AddedTokensJson(AddedTokens(vocab, true));
  const std::string replace = R"({"type":"Replace","pattern":{"String":" "},"content":"▁"})";
  out += prefix ? R"(,"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},)" +
                      replace + "]}"
                : R"(,"normalizer":)" + replace;
  out +=
      R"(,"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Sequence","decoders":[)"
      R"({"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"})";
  if (prefix) out += R"(,{"type":"Strip","content":" ","start":1,"stop":0})";
  out += R"(]},"model":{"type":"BPE","byte_fallback":true,"fuse_unk":true,"unk_token":)";
  out += vocab.unk_id ? Quoted(vocab.tokens[*vocab.unk_id]) : "null";
  out += R"(,"vocab":{)";
  std::unordered_set<std::string_view> seen;
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    if (!seen.insert(vocab.tokens[id]).second) continue;
    if (seen.size() > 1) out += ',';
    out += Quoted(vocab.tokens[id]) + fmt::format(":{}", id);
  }
  return out + R"(},"merges":[)" + SentencePieceMerges(vocab) + "]}}";
}

std::optional<SpecialToken> Role(const GgufVocab& vocab, std::optional<int32_t> id) {
  if (!id) return std::nullopt;
  return SpecialToken{*id, vocab.tokens[*id]};
}

/// Returns the tokenizer.json from which the vocabulary was converted, except for BOS and EOS around a text.
StatusOr<std::string> ToJson(const GgufVocab& vocab) {
  RETURN_IF_ERROR(CheckSizes(vocab));
  if (vocab.model == "gpt2") return ByteLevel(vocab);
  if (vocab.model == "llama") return SentencePiece(vocab);
  return Unimplemented("tokenizer.ggml.model names an unknown tokenizer: \"{}\"", vocab.model);
}

/// llama.cpp's default: SentencePiece models begin with BOS.
bool AddsBos(const GgufVocab& vocab) { return vocab.add_bos.value_or(vocab.model == "llama"); }

}  // namespace

StatusOr<Tokenizer> Tokenizer::FromGguf(const GgufVocab& vocab) {
  ASSIGN_OR_RETURN(const std::string json, ToJson(vocab));
  TokenizerConfig config;
  config.add_bos = AddsBos(vocab);
  config.add_eos = vocab.add_eos.value_or(false);
  if (vocab.bos_id) config.roles.emplace("bos_token", vocab.tokens[*vocab.bos_id]);
  if (vocab.eos_id) config.roles.emplace("eos_token", vocab.tokens[*vocab.eos_id]);
  StatusOr<std::shared_ptr<Impl>> impl = BuildTokenizer(json, config, true);
  if (!impl.ok()) return Annotate(impl.status(), "the GGUF vocabulary");
  (*impl)->special = {Role(vocab, vocab.bos_id), Role(vocab, vocab.eos_id), Role(vocab, vocab.pad_id),
                      Role(vocab, vocab.unk_id), Role(vocab, vocab.eot_id)};
  return Tokenizer(*std::move(impl));
}

StatusOr<HubFiles> HubFilesFromGguf(const GgufVocab& vocab, std::string_view chat_template) {
  HubFiles files;
  ASSIGN_OR_RETURN(files.tokenizer_json, ToJson(vocab));
  nlohmann::ordered_json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                   {"add_bos_token", AddsBos(vocab)},
                                   {"add_eos_token", vocab.add_eos.value_or(false)},
                                   {"clean_up_tokenization_spaces", false}};
  const std::pair<const char*, std::optional<int32_t>> roles[] = {{"bos_token", vocab.bos_id},
                                                                  {"eos_token", vocab.eos_id},
                                                                  {"pad_token", vocab.pad_id},
                                                                  {"unk_token", vocab.unk_id}};
  for (const auto& [role, id] : roles) {
    if (id) config[role] = vocab.tokens[*id];
  }
  if (!chat_template.empty()) config["chat_template"] = std::string(chat_template);
  files.tokenizer_config_json = config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  return files;
}

}  // namespace moesaic::text
