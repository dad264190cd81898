// Reads vocabularies in tiktoken's format. Private to this room.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace moesaic::text {

/// Returns a tokenizer.json that tokenizes like tiktoken with `ranks`. Adds to `config` the special tokens of
/// `style` that it does not name.
StatusOr<std::string> TiktokenToJson(std::string_view ranks, TiktokenStyle style, TokenizerConfig* config);

}  // namespace moesaic::text
