// Reads the target of a request line and its host: RFC 9112, section 3.2.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/http_syntax.h"

namespace moesaic::server {

struct RequestTarget {
  std::string path;  ///< "/..." or, for OPTIONS only, "*"; unreserved characters are never percent-encoded
  std::string query;
  std::optional<std::string> authority;  ///< authority of the absolute form, which replaces the Host field
};

/// Reads the origin form, the absolute form with http or https, and the asterisk form of OPTIONS.
std::optional<HttpRefusal> ReadTarget(std::string_view method, std::string_view text, RequestTarget& target);

/// Returns true for `host [":" port]` without user information, and for an empty text, which names no host.
bool IsHost(std::string_view text);

}  // namespace moesaic::server
