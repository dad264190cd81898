// Reads settings files: lines of TOML without tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

struct ConfigEntry {
  std::string key;
  std::vector<std::string> values;  // values of an array, or one value
  int line = 0;
};

/// Reads `KEY = VALUE` lines. A value is "text" with escapes, literal 'text', one word (numbers, true,
/// addresses), empty, or [an, array] of these. '#' starts a comment except in quotes and within a word.
/// Rejects ambiguous input, and names the line: repeated keys, bare values with spaces or commas, missing
/// array values, tables.
StatusOr<std::vector<ConfigEntry>> ParseConfig(std::string_view text);

/// Formats `value` for ParseConfig: a number, true or false as a word, others in quotes.
std::string ConfigValue(std::string_view value);

}  // namespace moesaic::app
