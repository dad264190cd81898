// Builds a tokenizer's shared part from tokenizer.json text, wherever that text comes from. For this room
// only.
#pragma once

#include <memory>
#include <string_view>

#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace moesaic::text {

/// `config_wraps`: BOS and EOS around a text are as the config says, instead of as the JSON says.
StatusOr<std::shared_ptr<Tokenizer::Impl>> BuildTokenizer(std::string_view json,
                                                          const TokenizerConfig& config, bool config_wraps);

}  // namespace moesaic::text
