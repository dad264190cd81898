// Hosts in URLs.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::proxy {

/// Returns a host as a URL and a Host header spell it: an IPv6 address has brackets (RFC 3986, 3.2.2).
inline std::string UrlHost(std::string_view host) {
  if (host.find(':') == std::string_view::npos || host.starts_with('[')) return std::string(host);
  return "[" + std::string(host) + "]";
}

}  // namespace moesaic::proxy
