// A model for tests, without weights.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/served_model.h"

namespace moesaic::server {

/// Returns a model without an engine that uses `tokenizer`. The token `end` ends an answer.
inline ServedModel ModelOf(text::Tokenizer tokenizer, int32_t end, text::ToolFormat tools) {
  auto grammars = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{end}).value();
  ServedModel model{.names = {"m"},
                    .tokenizer = std::move(tokenizer),
                    .chat = {},
                    .grammars = std::move(grammars),
                    .defaults = {}};
  model.tools = tools;
  return model;
}

/// Returns a model with moesaic-tiny's tokenizer, which has the special tokens that frame calls in some
/// formats.
inline ServedModel TinyModel(text::ToolFormat tools = text::ToolFormat::kNone) {
  auto tokenizer =
      text::Tokenizer::FromFolder(std::string(MOESAIC_SOURCE_DIR) + "/models/moesaic-tiny").value();
  return ModelOf(std::move(tokenizer), /*end=*/2, tools);
}

}  // namespace moesaic::server
