// Percent-encoding of URIs: RFC 3986, section 2.1.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::base {

/// Returns the value of a hexadecimal digit, or -1 for other characters.
inline int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// Decodes each %XX. A % without two hexadecimal digits is kept.
std::string PercentDecoded(std::string_view text);

}  // namespace moesaic::base
