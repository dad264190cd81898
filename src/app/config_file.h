// Settings as a file: lines of TOML, without tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

struct ConfigEntry {
  std::string key;
  std::vector<std::string> values;  // of an array; otherwise one
  int line = 0;
};

/// Reads `KEY = VALUE` lines. A value is "text" with escapes, 'text' as it stands, one word (numbers, true,
/// addresses), nothing, or [an, array] of these. '#' begins a comment except in quotes and inside a word.
/// What is ambiguous is refused, with its line: a key twice, a bare value with spaces or commas, an
/// array's value left out, tables.
StatusOr<std::vector<ConfigEntry>> ParseConfig(std::string_view text);

/// `value` as ParseConfig reads it: a word where it is a number, true or false, else in quotes.
std::string ConfigValue(std::string_view value);

}  // namespace moesaic::app
