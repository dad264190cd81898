#include "checkpoint/json_text.h"

#include <algorithm>
#include <set>

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

constexpr int kDeepest = 64;

StatusOr<json> Parse(std::string_view text, const std::string& file, const json::parser_callback_t& watch) {
  if (!IsShallowJson(text)) return DataLoss("{}: JSON nests deeper than {} levels", file, kDeepest);
  json value;
  try {
    value = json::parse(text, watch);
  } catch (const json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ...": the text after the name is
    // readable up to "; last read", which may be long or binary.
    std::string what = error.what();
    what.resize(std::min(what.find("; last read"), what.size()));
    const size_t bracket = what.find("] ");
    return DataLoss("{}: not JSON: {}", file, bracket == std::string::npos ? what : what.substr(bracket + 2));
  }
  if (!value.is_object()) return DataLoss("{}: must be a JSON object, found {}", file, ShownJson(value));
  return value;
}

}  // namespace

bool IsShallowJson(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepest) return false;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return true;
}

StatusOr<json> ParseJsonObject(std::string_view text, const std::string& file) {
  return Parse(text, file, nullptr);
}

// The library keeps the last of equal keys, so duplicates must be detected during parsing.
StatusOr<json> ParseJsonObjectOnce(std::string_view text, const std::string& file, const std::string& what) {
  std::set<std::string> keys;
  std::string twice;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !keys.insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  ASSIGN_OR_RETURN(json value, Parse(text, file, watch));
  if (!twice.empty()) return DataLoss("{}: {} {} occurs twice", file, what, twice);
  return value;
}

std::string ShownJson(const json& value) {
  constexpr size_t kLongest = 60;
  if (value.is_array() && value.size() > kLongest) return fmt::format("a list of {}", value.size());
  if (value.is_object() && value.size() > kLongest) return fmt::format("an object of {}", value.size());
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() <= kLongest) return text;
  size_t cut = kLongest;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0U) == 0x80U)
    --cut;  // does not split a UTF-8 character
  return text.substr(0, cut) + "...";
}

}  // namespace moesaic::checkpoint
