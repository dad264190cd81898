// The fields of a tokenizer_config.json that this room reads.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::text {

struct TokenizerConfig {
  struct AddedToken {
    int32_t id = 0;
    std::string content;
    bool special = false, lstrip = false, rstrip = false, single_word = false, normalized = false;
  };

  /// Parses `json`; empty text counts as an empty object.
  static StatusOr<TokenizerConfig> Parse(std::string_view json);

  std::string tokenizer_class;
  std::map<std::string, std::string>
      roles;  // "bos_token", "eos_token", "pad_token", "unk_token" and more -> text
  std::vector<AddedToken> added_tokens;               // sorted by id
  std::map<std::string, std::string> chat_templates;  // name -> source; an unnamed template is "default"
  std::optional<bool> add_bos, add_eos;
};

}  // namespace moesaic::text
