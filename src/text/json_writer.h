// Writes a tokenizer.json for vocabularies in other formats. Private to this room.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moesaic::text {

/// Spells bytes in GPT-2's printable alphabet, as UTF-8, like tokens of byte-level vocabularies.
std::string SpellBytes(std::string_view bytes);

/// A byte-level BPE model: one or more regexes split text into words, and merges join the bytes of each word.
struct ByteLevelModel {
  std::vector<std::string> patterns;  // each regex splits the pieces produced by the previous one
  bool nfc = false;                   // normalize text to NFC first
  bool whole_words = false;   // a word that is in the vocabulary is one token, regardless of the merges
  bool prefix_space = false;  // prepend a space to texts that do not begin with one
  std::vector<std::pair<std::string, int32_t>> vocab;                 // spelling, id
  std::vector<std::pair<std::string_view, std::string_view>> merges;  // highest priority first
};

/// A token that is matched in the text before the model runs.
struct AddedEntry {
  int32_t id;
  std::string_view text;
  bool special;
};

std::string ByteLevelJson(const ByteLevelModel& model, std::span<const AddedEntry> added);

/// Returns `text` as a JSON string; bytes that are not UTF-8 become U+FFFD.
std::string Quoted(std::string_view text);

/// Returns the "added_tokens" array.
std::string AddedTokensJson(std::span<const AddedEntry> added);

}  // namespace moesaic::text
