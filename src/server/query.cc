#include "server/query.h"

#include <algorithm>
#include <charconv>

#include "base/percent.h"
#include "server/api_error.h"
#include "server/http.h"

namespace moesaic::server {
namespace {

std::string Decoded(std::string_view text) {
  std::string spaced(text);
  std::replace(spaced.begin(), spaced.end(), '+', ' ');
  return base::PercentDecoded(spaced);
}

}  // namespace

std::string QueryValue(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(pair.size() + 1, query.size()));
    const size_t equals = std::min(pair.find('='), pair.size());
    if (Decoded(pair.substr(0, equals)) == name)
      return Decoded(pair.substr(std::min(equals + 1, pair.size())));
  }
  return "";
}

StatusOr<int> QueryInt(std::string_view query, const char* name, int min, int max, int otherwise) {
  const std::string text = QueryValue(query, name);
  if (text.empty()) return otherwise;
  int value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  if (read.ec != std::errc() || read.ptr != text.data() + text.size() || value < min || value > max) {
    return FieldError(
        name, "invalid_value",
        fmt::format("Invalid '{}': must be between {} and {}, found '{}'", name, min, max, text));
  }
  return value;
}

StatusOr<bool> QueryBool(std::string_view query, const char* name) {
  const std::string text = QueryValue(query, name);
  if (text.empty() || text == "false") return false;
  if (text == "true") return true;
  return FieldError(name, "invalid_value",
                    fmt::format("Invalid '{}': 'true' or 'false', found '{}'", name, text));
}

}  // namespace moesaic::server
