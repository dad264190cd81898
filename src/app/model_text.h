// Text part of a model in any container: tokenizer, chat template and generation defaults.
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
  StatusOr<text::Tokenizer> tokenizer;  // an error if the model has none
  StatusOr<text::ChatTemplate> chat;    // an error if the model has none
  std::vector<int32_t> eos_ids;         // union of generation_config.json, config.json and the tokenizer
  nlohmann::json generation;            // generation_config.json, or an empty object
};

/// Opens the text part of a Hugging Face folder, a GGUF file or a packed file. A model without a tokenizer or
/// template can be opened; users of the missing part return its status.
StatusOr<ModelText> OpenModelText(const std::string& path);

/// Opens the tokenizer alone. A folder with tokenizer files needs no config.json and no weights. `path` may
/// also be a tokenizer.json.
StatusOr<text::Tokenizer> OpenTokenizer(const std::string& path);

/// Returns tokenizer files in Hub format that represent a GGUF file's metadata, as (name, text). Empty for
/// other containers, which have the files.
StatusOr<std::vector<std::pair<std::string, std::string>>> HubTexts(const checkpoint::Checkpoint& source);

/// Returns all text files, as (name, text), that a Hub folder made from the model should have: tokenizer,
/// chat template, generation defaults, code. Excludes config.json and the weight index.
StatusOr<std::vector<std::pair<std::string, std::string>>> SideTexts(const checkpoint::Checkpoint& source);

}  // namespace moesaic::app
