// Keeps web pages of other origins away from a server that a browser can reach.
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
  std::vector<std::string> allowed_hosts;  ///< further names that requests may have in "host"; "*": any
  std::vector<std::string> cors_origins;   ///< origins whose pages may ask; "*": any
};

/// Any thread.
class BrowserGuard {
 public:
  explicit BrowserGuard(const BrowserGuardOptions& options);

  /// The refusal of a request that a page of another origin made, or that came by another host name:
  ///
  /// - "host" must be an IP address, "localhost", the bound name, the machine's own name, or an allowed one
  ///   (421). A page can have its own name resolve to this server (DNS rebinding), but it cannot do so with
  ///   an address. A request without "host" comes from no browser.
  /// - "origin" must be the same host and port as "host", or allowed by CORS (403).
  std::optional<ApiError> Check(const HttpRequest& head) const;

  /// Headers that let a page of an allowed origin read the answer.
  Headers CorsHeaders(const HttpRequest& head) const;

 private:
  bool HostAllowed(std::string_view host) const;

  const std::vector<std::string> cors_origins_;
  std::vector<std::string> names_;  // lower case
  bool any_host_ = false;
};

/// The refusal of a POST body that is not declared as JSON (415). A page of any origin may send the types of
/// HTML forms without asking; "application/json" needs CORS.
std::optional<ApiError> CheckContentType(const HttpRequest& head);

/// Security headers of the page's files.
///
/// The content security policy loads scripts and connects to this server only. Styles may stand in elements,
/// since KaTeX and uPlot set them; images may be data: and blob: URLs. A page of another origin may not frame
/// it. Where the page needs more, extend the policy here and test it in tests/server/browser_test.py.
Headers PageHeaders();

}  // namespace moesaic::server
