// Writes a tokenizer.json for vocabularies that come in other formats. For this room only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moesaic::text {

/// GPT-2's printable alphabet for bytes, as UTF-8: how byte-level vocabularies spell tokens.
std::string SpellBytes(std::string_view bytes);

/// A byte-level BPE model: a regex or more split text into words, and merges join the bytes of each.
struct ByteLevelModel {
  std::vector<std::string> patterns;  // each splits the pieces that the one before it left
  bool nfc = false;                   // normalise text first
  bool whole_words = false;           // a word in the vocabulary is one token whatever the merges say
  bool prefix_space = false;          // a space goes in front of a text without one
  std::vector<std::pair<std::string, int32_t>> vocab;                 // spelling, id
  std::vector<std::pair<std::string_view, std::string_view>> merges;  // best first
};

/// A token that is found in text before the model sees it.
struct AddedEntry {
  int32_t id;
  std::string_view text;
  bool special;
};

std::string ByteLevelJson(const ByteLevelModel& model, std::span<const AddedEntry> added);

/// `"text"` as JSON; bytes that are not UTF-8 become U+FFFD.
std::string Quoted(std::string_view text);

/// The "added_tokens" array.
std::string AddedTokensJson(std::span<const AddedEntry> added);

}  // namespace moesaic::text
