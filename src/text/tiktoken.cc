#include "text/tiktoken.h"

#include <absl/strings/escaping.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <unordered_map>

#include "text/json_writer.h"
#include "text/pre_tokenizers.h"

namespace moesaic::text {
namespace {

struct Rank {
  std::string bytes;
  int32_t rank;
};

StatusOr<std::vector<Rank>> ParseRanks(std::string_view text) {
  std::vector<Rank> ranks;
  std::set<int32_t> seen;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (row.ends_with('\r')) row.remove_suffix(1);
    if (row.empty()) continue;
    const size_t space = row.find(' ');
    Rank rank;
    const std::string_view number = space == row.npos ? std::string_view() : row.substr(space + 1);
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), rank.rank);
    std::string base64(row.substr(0, space));
    if (parsed.ec != std::errc() || parsed.ptr != number.data() + number.size() || rank.rank < 0 ||
        !absl::Base64Unescape(base64, &rank.bytes) || rank.bytes.empty()) {
      return InvalidArgument("tiktoken vocabulary, line {}: not a base64 token and its rank: \"{}\"", line,
                             row.substr(0, 80));
    }
    if (!seen.insert(rank.rank).second) {
      return InvalidArgument("tiktoken vocabulary, line {}: rank {} occurs twice", line, rank.rank);
    }
    ranks.push_back(std::move(rank));
  }
  if (ranks.empty()) return InvalidArgument("the tiktoken vocabulary is empty");
  return ranks;
}

/// tiktoken merges the adjacent pair whose merged token has the lowest rank. The equivalent list of merges
/// contains every split of each token into two tokens, ordered by the token's rank, then by its parts' ranks.
std::vector<std::pair<std::string_view, std::string_view>> Merges(
    const std::vector<Rank>& by_rank, const std::unordered_map<std::string_view, int32_t>& rank_of,
    const std::unordered_map<std::string_view, std::string_view>& spelling_of) {
  struct Split {
    int32_t left, right;
    std::string_view left_spelling, right_spelling;
  };
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  std::vector<Split> splits;
  for (const Rank& token : by_rank) {
    splits.clear();
    const std::string_view bytes = token.bytes;
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = rank_of.find(bytes.substr(0, cut));
      const auto right = rank_of.find(bytes.substr(cut));
      if (left == rank_of.end() || right == rank_of.end()) continue;
      splits.push_back(
          {left->second, right->second, spelling_of.at(left->first), spelling_of.at(right->first)});
    }
    std::ranges::sort(splits, {}, [](const Split& s) { return std::pair(s.left, s.right); });
    for (const Split& split : splits) merges.emplace_back(split.left_spelling, split.right_spelling);
  }
  return merges;
}

/// Returns the special tokens after the ranks, as defined by the style's Python code.
std::vector<std::string> StyleTokens(TiktokenStyle style, int32_t first_id) {
  std::vector<std::string> tokens;
  if (style == TiktokenStyle::kQwen) {
    tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    for (int i = 0; i < 205; ++i) tokens.push_back(fmt::format("<|extra_{}|>", i));
  } else {
    for (int i = 0; i < 256; ++i) tokens.push_back(fmt::format("<|reserved_token_{}|>", first_id + i));
  }
  return tokens;
}

void AddStyleTokens(TiktokenStyle style, int32_t first_id, TokenizerConfig* config) {
  std::set<int32_t> named;
  for (TokenizerConfig::AddedToken& token : config->added_tokens) {
    named.insert(token.id);
    token.special = true;  // both styles pass all of them to tiktoken as special
  }
  int32_t id = first_id;
  for (std::string& text : StyleTokens(style, first_id)) {
    if (!named.contains(id)) {
      TokenizerConfig::AddedToken token;
      token.id = id;
      token.content = std::move(text);
      token.special = true;
      config->added_tokens.push_back(std::move(token));
    }
    ++id;
  }
  std::ranges::sort(config->added_tokens, {}, &TokenizerConfig::AddedToken::id);
}

}  // namespace

StatusOr<std::string> TiktokenToJson(std::string_view text, TiktokenStyle style, TokenizerConfig* config) {
  ASSIGN_OR_RETURN(std::vector<Rank> ranks, ParseRanks(text));
  std::ranges::sort(ranks, {}, &Rank::rank);
  AddStyleTokens(style, ranks.back().rank + 1, config);
  ByteLevelModel model;
  const PreTokenizer& pre = *FindPreTokenizer(style == TiktokenStyle::kKimi ? "kimi-k2" : "qwen2");
  model.patterns.assign(pre.patterns.begin(), pre.patterns.end());
  model.nfc = pre.nfc;
  model.whole_words = true;
  std::unordered_map<std::string_view, int32_t> rank_of;
  std::unordered_map<std::string_view, std::string_view> spelling_of;
  model.vocab.reserve(ranks.size());
  for (const Rank& token : ranks) {
    model.vocab.emplace_back(SpellBytes(token.bytes), token.rank);
    if (!rank_of.emplace(token.bytes, token.rank).second) {
      return InvalidArgument("tiktoken vocabulary: the token of rank {} occurs twice", token.rank);
    }
    spelling_of.emplace(token.bytes, model.vocab.back().first);
  }
  model.merges = Merges(ranks, rank_of, spelling_of);
  std::vector<AddedEntry> added;
  for (const TokenizerConfig::AddedToken& token : config->added_tokens) {
    added.push_back({token.id, token.content, token.special});
  }
  return ByteLevelJson(model, added);
}

}  // namespace moesaic::text
