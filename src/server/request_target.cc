#include "server/request_target.h"

#include <algorithm>

#include "base/percent.h"

namespace moesaic::server {
namespace {

bool IsUnreserved(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("-._~").find(c) != std::string_view::npos;
}

// Normalizes percent-encodings (RFC 3986, section 6.2.2): writes them in capitals and decodes those of
// unreserved characters, so that each path has one spelling. Returns nothing for a malformed encoding or a
// control character.
std::optional<std::string> NormalPath(std::string_view path) {
  std::string normal;
  normal.reserve(path.size());
  for (size_t i = 0; i < path.size(); ++i) {
    if (path[i] != '%') {
      normal += path[i];
      continue;
    }
    const int high = i + 2 < path.size() ? base::HexValue(path[i + 1]) : -1;
    const int low = i + 2 < path.size() ? base::HexValue(path[i + 2]) : -1;
    if (high < 0 || low < 0) return std::nullopt;
    const int byte = high * 16 + low;
    if (byte < 0x20 || byte == 0x7F) return std::nullopt;
    i += 2;
    if (IsUnreserved(static_cast<char>(byte))) {
      normal += static_cast<char>(byte);
    } else {
      constexpr std::string_view kDigits = "0123456789ABCDEF";
      normal += '%';
      normal += kDigits[static_cast<size_t>(high)];
      normal += kDigits[static_cast<size_t>(low)];
    }
  }
  return normal;
}

std::optional<HttpRefusal> ReadPath(std::string_view text, RequestTarget& target) {
  const size_t question = std::min(text.find('?'), text.size());
  auto path = NormalPath(text.substr(0, question));
  if (!path) return HttpRefusal{400, "the request target has a malformed percent-encoding"};
  target.path = path->empty() ? "/" : *std::move(path);
  if (question < text.size()) target.query = text.substr(question + 1);
  return std::nullopt;
}

bool IsPort(std::string_view text) {
  int port = 0;
  for (const char c : text) {
    if (c < '0' || c > '9' || (port = port * 10 + (c - '0')) > 65535) return false;
  }
  return true;  // an empty port means the scheme's default
}

bool IsName(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%') {
      if (i + 2 >= text.size() || base::HexValue(text[i + 1]) < 0 || base::HexValue(text[i + 2]) < 0)
        return false;
      i += 2;
    } else if (!IsUnreserved(text[i]) &&
               std::string_view("!$&'()*+,;=").find(text[i]) == std::string_view::npos) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool IsHost(std::string_view text) {
  std::string_view port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos || !IsIpv6Address(text.substr(1, end - 1))) return false;
    const std::string_view rest = text.substr(end + 1);
    return rest.empty() || (rest.front() == ':' && IsPort(rest.substr(1)));
  }
  const size_t colon = std::min(text.find(':'), text.size());
  if (colon < text.size()) port = text.substr(colon + 1);
  return IsName(text.substr(0, colon)) && IsPort(port);
}

std::optional<HttpRefusal> ReadTarget(std::string_view method, std::string_view text, RequestTarget& target) {
  const bool visible =
      std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7F && c != '#'; });
  if (text.empty() || !visible) {
    return HttpRefusal{400, "the request target must be visible ASCII characters without a fragment"};
  }
  if (text == "*") {
    if (method != "OPTIONS") return HttpRefusal{400, "the request target * belongs to OPTIONS only"};
    target.path.assign(1, '*');
    return std::nullopt;
  }
  if (text.front() == '/') return ReadPath(text, target);
  const size_t colon = text.find("://");
  const std::string scheme = colon == std::string_view::npos ? "" : Lower(text.substr(0, colon));
  if (scheme != "http" && scheme != "https") {
    return HttpRefusal{400, "the request target must be a path that begins with / or an http URI"};
  }
  const std::string_view rest = text.substr(colon + 3);
  const size_t end = std::min(rest.find_first_of("/?"), rest.size());
  const std::string_view authority = rest.substr(0, end);
  if (authority.empty() || authority.front() == ':' || !IsHost(authority)) {
    return HttpRefusal{400, "the request target's host is malformed"};
  }
  target.authority = authority;
  if (end == rest.size() && method == "OPTIONS") {
    target.path.assign(1, '*');
    return std::nullopt;
  }
  return ReadPath(rest.substr(end), target);
}

}  // namespace moesaic::server
