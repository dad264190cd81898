// Reads the prompts of `moesaic generate`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/model_text.h"
#include "base/status.h"

namespace moesaic::app {

struct GenerateInput {
  std::vector<std::string> prompts;  // --prompt
  std::string file;                  // --file: a file whose contents are one prompt
  std::vector<int32_t> ids;          // --ids
  std::string jsonl;                 // --jsonl: one prompt per line; "-" is stdin
  bool add_special = true;
};

struct Prompt {
  std::string id;  // JSON text of the line's "id"; empty: none
  std::vector<int32_t> ids;
};

/// Returns all prompts, tokenized. Without other input, stdin is one prompt. `text` is needed unless all
/// prompts are ids. A JSON line has "prompt" (or "text"), "messages" (and "tools") of a chat, or "ids", and
/// optionally "id".
StatusOr<std::vector<Prompt>> ReadPrompts(const GenerateInput& input, const ModelText& text);

}  // namespace moesaic::app
