// Refuses requests of web pages of other origins to a server that a browser can reach.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api_error.h"
#include "server/http.h"

namespace moesaic::server {

struct BrowserGuardOptions {
  std::string bound_host;                  ///< address or name that the server listens on
  std::vector<std::string> allowed_hosts;  ///< further names that "host" may have; "*" allows any
  std::vector<std::string> cors_origins;   ///< origins whose pages may send requests; "*" allows any
};

/// Any thread.
class BrowserGuard {
 public:
  explicit BrowserGuard(const BrowserGuardOptions& options);

  /// Returns the refusal of a request from a page of another origin or under another host name:
  ///
  /// - "host" must be an IP address, "localhost", the bound name, the machine's own name, or an allowed one
  ///   (421). A page can have its own name resolve to this server (DNS rebinding), but it cannot do so with
  ///   an address. A request without "host" comes from no browser.
  /// - "origin" must be the same host and port as "host", or allowed by CORS (403).
  std::optional<ApiError> Check(const HttpRequest& head) const;

  /// Returns the headers that let a page of an allowed origin read the answer.
  Headers CorsHeaders(const HttpRequest& head) const;

 private:
  bool HostAllowed(std::string_view host) const;

  const std::vector<std::string> cors_origins_;
  std::vector<std::string> names_;  // lower case
  bool any_host_ = false;
};

/// Returns the refusal of a POST body that is not declared as JSON (415). A page of any origin may send the
/// types of HTML forms without a preflight; "application/json" needs CORS.
std::optional<ApiError> CheckContentType(const HttpRequest& head);

/// Returns the security headers of the page's files.
///
/// The content security policy allows scripts and connections of this server only. It allows style
/// attributes, since KaTeX and uPlot set them, and images from data: and blob: URLs. It forbids frames on
/// pages of other origins. Where the page needs more, extend the policy here and test it in
/// tests/server/browser_test.py.
Headers PageHeaders();

}  // namespace moesaic::server
