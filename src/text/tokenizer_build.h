// Builds a tokenizer's shared part from the text of a tokenizer.json. Private to this room.
#pragma once

#include <memory>
#include <string_view>

#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace moesaic::text {

/// Builds the part from `json`. With `config_wraps`, the config determines BOS and EOS around a text;
/// otherwise the JSON does. The error has the message of the tokenizers crate.
StatusOr<std::shared_ptr<Tokenizer::Impl>> BuildTokenizer(std::string_view json,
                                                          const TokenizerConfig& config, bool config_wraps);

}  // namespace moesaic::text
