// A tokenizer of 95 tokens for tests of the engine.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "text/tokenizer.h"

namespace moesaic::engine {

// A tokenizer whose ids are the bytes, and <end>.
inline text::Tokenizer ByteTokenizer() {
  nlohmann::json vocab;
  // The byte-level alphabet: printable bytes stand for themselves.
  for (int id = 0; id < 94; ++id) vocab[std::string(1, static_cast<char>('!' + id))] = id;
  vocab["<end>"] = 94;
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const nlohmann::json tokenizer = {
      {"version", "1.0"},
      {"added_tokens",
       {{{"id", 94},
         {"content", "<end>"},
         {"special", true},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false}}}},
      {"pre_tokenizer", byte_level},
      {"decoder", byte_level},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
  StatusOr<text::Tokenizer> made = text::Tokenizer::FromJson(tokenizer.dump(), "{}");
  EXPECT_TRUE(made.ok()) << Message(made.status());
  return *std::move(made);
}

}  // namespace moesaic::engine
