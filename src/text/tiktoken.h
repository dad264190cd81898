// Vocabularies in tiktoken's format. For this room only.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace moesaic::text {

/// A tokenizer.json that tokenizes like tiktoken does with `ranks`. Adds the special tokens that `style`
/// knows and `config` does not name to `config`.
StatusOr<std::string> TiktokenToJson(std::string_view ranks, TiktokenStyle style, TokenizerConfig* config);

}  // namespace moesaic::text
