// What `moesaic generate` is asked to complete.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/model_text.h"
#include "base/status.h"

namespace moesaic::app {

struct GenerateInput {
  std::vector<std::string> prompts;  // --prompt
  std::string file;                  // --file: its contents are one prompt
  std::vector<int32_t> ids;          // --ids
  std::string jsonl;                 // --jsonl: a prompt a line; "-" is stdin
  bool add_special = true;
};

struct Prompt {
  std::string id;  // "id" of its JSON line, as JSON; empty: none
  std::vector<int32_t> ids;
};

/// All prompts, tokenized; stdin is one when nothing else is given. `text` is needed unless all prompts are
/// ids. A JSON line has "prompt" (or "text"), "messages" (and "tools") of a chat, or "ids", and may have
/// "id".
StatusOr<std::vector<Prompt>> ReadPrompts(const GenerateInput& input, const ModelText& text);

}  // namespace moesaic::app
