// The splitting rules behind the names in GGUF's `tokenizer.ggml.pre`. For this room only.
#pragma once

#include <span>
#include <string_view>

namespace moesaic::text {

struct PreTokenizer {
  std::span<const char* const> patterns;  // each splits the pieces that the one before it left
  bool nfc;                               // the model's own tokenizer normalises text first
  bool whole_words;                       // a word in the vocabulary is one token whatever the merges say
};

// From Kimi-K2's tokenization_kimi.py: Han runs stand alone, words keep their case changes and contractions.
inline constexpr const char* kKimiK2Pattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Null for a name that is not known.
const PreTokenizer* FindPreTokenizer(std::string_view name);

}  // namespace moesaic::text
