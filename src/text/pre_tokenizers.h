// Pre-tokenizer rules by the names in GGUF's `tokenizer.ggml.pre`. Private to this room.
#pragma once

#include <span>
#include <string_view>

namespace moesaic::text {

struct PreTokenizer {
  std::span<const char* const> patterns;  // each regex splits the pieces produced by the previous one
  bool nfc;                               // the model's own tokenizer normalizes text first
  bool whole_words;  // a word that is in the vocabulary is one token, regardless of the merges
};

// From Kimi-K2's tokenization_kimi.py: runs of Han are separate words; other words include case changes and
// contractions.
inline constexpr const char* kKimiK2Pattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Returns null for an unknown name.
const PreTokenizer* FindPreTokenizer(std::string_view name);

}  // namespace moesaic::text
