// The text side of a model, whatever its container: tokenizer, chat template and generation defaults.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace moesaic::app {

struct ModelText {
  StatusOr<text::Tokenizer> tokenizer;  // why not, when the model has none
  StatusOr<text::ChatTemplate> chat;    // likewise
  std::vector<int32_t> eos_ids;         // of generation_config.json, config.json and the tokenizer, together
  nlohmann::json generation;            // generation_config.json, or an empty object
};

/// Opens the texts of a Hugging Face folder, a GGUF file or a packed file. A model without a tokenizer or
/// template opens; whoever needs one returns its status.
StatusOr<ModelText> OpenModelText(const std::string& path);

/// The tokenizer alone: a folder with tokenizer files needs no config.json and no weights. `path` may also be
/// a tokenizer.json.
StatusOr<text::Tokenizer> OpenTokenizer(const std::string& path);

/// The tokenizer files of a Hub folder that stand for a GGUF file's own metadata, as (name, text); empty for
/// other containers, which have the files themselves.
StatusOr<std::vector<std::pair<std::string, std::string>>> HubTexts(const checkpoint::Checkpoint& source);

/// Every text file of a model that a Hub folder made from it should have, as (name, text): tokenizer, chat
/// template, generation defaults, code; not config.json and not the index of its weights.
StatusOr<std::vector<std::pair<std::string, std::string>>> SideTexts(const checkpoint::Checkpoint& source);

}  // namespace moesaic::app
