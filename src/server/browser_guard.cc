#include "server/browser_guard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "server/http_syntax.h"

namespace moesaic::server {
namespace {

constexpr const char* kContentSecurityPolicy =
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'";

// Headers of answers that scripts of other origins can read. Clients wait and report errors by them.
constexpr const char* kExposedHeaders =
    "retry-after, x-request-id, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-tokens";

// Removes the port and the brackets of an IPv6 address from "name:port".
std::string_view WithoutPort(std::string_view host) {
  if (host.starts_with('[')) return host.substr(1, std::min(host.find(']'), host.size()) - 1);
  if (std::count(host.begin(), host.end(), ':') > 1) return host;  // IPv6 without brackets
  return host.substr(0, std::min(host.find(':'), host.size()));
}

std::string Normal(std::string_view name) {
  std::string lower = Lower(name);
  if (lower.ends_with('.')) lower.pop_back();
  return lower;
}

// Returns true if a page of `origin` was loaded from `host`. The scheme may differ, since a proxy may end
// TLS.
bool SameHost(std::string_view origin, std::string_view host) {
  const size_t scheme = origin.find("://");
  if (scheme == std::string_view::npos) return false;
  const std::string default_port = origin.starts_with("https:") ? ":443" : ":80";
  const auto full = [&default_port](std::string_view text) {
    std::string name = Lower(text);
    const size_t colon = name.rfind(':');
    const bool has_port = colon != std::string::npos && name.find(']', colon) == std::string::npos;
    return has_port ? name : name + default_port;
  };
  return full(origin.substr(scheme + 3)) == full(host);
}

}  // namespace

BrowserGuard::BrowserGuard(const BrowserGuardOptions& options)
    : cors_origins_(options.cors_origins), names_({"localhost", Normal(options.bound_host)}) {
  std::array<char, 256> own{};
  if (gethostname(own.data(), own.size() - 1) == 0 && own[0] != '\0') names_.push_back(Normal(own.data()));
  for (const std::string& name : options.allowed_hosts) {
    any_host_ = any_host_ || name == "*";
    names_.push_back(Normal(WithoutPort(name)));
  }
}

bool BrowserGuard::HostAllowed(std::string_view host) const {
  if (any_host_) return true;
  const std::string name = Normal(WithoutPort(host));
  return IsIpAddress(name) || std::find(names_.begin(), names_.end(), name) != names_.end();
}

std::optional<ApiError> BrowserGuard::Check(const HttpRequest& head) const {
  for (const auto& [name, host] : head.headers) {
    if (name != "host" || host.empty() || HostAllowed(host)) continue;
    return ApiError{
        .http_status = 421,
        .message = fmt::format("this server does not answer for the host name \"{}\"; start it with "
                               "--allowed-host {}, or use its address",
                               WithoutPort(host), WithoutPort(host)),
        .type = "invalid_request_error",
        .code = "host_not_allowed"};
  }
  const std::string_view origin = head.Header("origin");
  if (origin.empty() || SameHost(origin, head.Header("host")) || !CorsHeaders(head).empty())
    return std::nullopt;
  return ApiError{.http_status = 403,
                  .message = fmt::format("pages of the origin \"{}\" may not use this server; start it with "
                                         "--cors-origin {} to allow them",
                                         origin, origin),
                  .type = "invalid_request_error",
                  .code = "origin_not_allowed"};
}

Headers BrowserGuard::CorsHeaders(const HttpRequest& head) const {
  const std::string_view origin = head.Header("origin");
  if (origin.empty()) return {};
  for (const std::string& allowed : cors_origins_) {
    const std::pair<std::string, std::string> exposed{"access-control-expose-headers", kExposedHeaders};
    if (allowed == "*") return {{"access-control-allow-origin", "*"}, exposed};
    if (allowed == origin) return {{"access-control-allow-origin", allowed}, {"vary", "origin"}, exposed};
  }
  return {};
}

std::optional<ApiError> CheckContentType(const HttpRequest& head) {
  if (head.method != "POST") return std::nullopt;
  const std::string_view length = head.Header("content-length");
  const bool has_body = !head.Header("transfer-encoding").empty() || (!length.empty() && length != "0");
  if (!has_body) return std::nullopt;
  const std::string_view type = head.Header("content-type");
  const std::string_view essence = TrimBlanks(type.substr(0, std::min(type.find(';'), type.size())));
  if (Lower(essence) == "application/json") return std::nullopt;
  return ApiError{
      .http_status = 415,
      .message = fmt::format("send the header \"content-type: application/json\" with a JSON body; found {}",
                             type.empty() ? "no content-type" : fmt::format("\"{}\"", type)),
      .type = "invalid_request_error",
      .code = "unsupported_content_type"};
}

Headers PageHeaders() {
  return {{"content-security-policy", kContentSecurityPolicy},
          {"x-frame-options", "DENY"},
          {"referrer-policy", "no-referrer"}};
}

}  // namespace moesaic::server
