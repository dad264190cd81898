#include "server/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "server/browser_guard.h"
#include "server/web_files.h"

namespace moesaic::server {
namespace {

const char* TypeOf(std::string_view path) {
  const std::string_view ending = path.substr(std::min(path.rfind('.'), path.size()));
  if (ending == ".html") return "text/html; charset=utf-8";
  if (ending == ".js") return "text/javascript; charset=utf-8";
  if (ending == ".css") return "text/css; charset=utf-8";
  if (ending == ".svg") return "image/svg+xml";
  if (ending == ".woff2") return "font/woff2";
  if (ending == ".txt") return "text/plain; charset=utf-8";
  return "application/octet-stream";
}

// Calls `visit` with every trimmed element of a comma-separated header, until it returns true.
template <typename Visit>
bool AnyElement(std::string_view list, Visit visit) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    std::string_view element = list.substr(0, comma);
    while (!element.empty() && element.front() == ' ') element.remove_prefix(1);
    while (!element.empty() && element.back() == ' ') element.remove_suffix(1);
    if (visit(element)) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

// True if accept-encoding (RFC 9110, 12.5.3) names gzip with a weight other than zero.
bool AcceptsGzip(std::string_view accepted) {
  return AnyElement(accepted, [](std::string_view element) {
    if (element.substr(0, std::min(element.find_first_of("; "), element.size())) != "gzip") return false;
    const size_t weight = element.find("q=");
    return weight == std::string_view::npos ||
           element.find_first_of("123456789", weight) != std::string_view::npos;
  });
}

// Compares entity tags weakly, as if-none-match requires (RFC 9110, 13.1.2).
bool MatchesTag(std::string_view tags, std::string_view etag) {
  return AnyElement(tags, [etag](std::string_view tag) {
    if (tag.starts_with("W/")) tag.remove_prefix(2);
    return tag == etag || tag == "*";
  });
}

void SendFile(const WebFile& file, Call& call) {
  // The path of a library contains its version, so that the browser need not validate it.
  const bool immutable = file.path.starts_with("lib/");
  HttpResponse response{
      .status = 200,
      .headers = {{"content-type", TypeOf(file.path)},
                  {"cache-control", immutable ? "public, max-age=31536000, immutable" : "no-cache"},
                  {"etag", std::string(file.etag)},
                  {"vary", "accept-encoding"},
                  {"x-content-type-options", "nosniff"}},
      .body = {}};
  const Headers security = PageHeaders();
  response.headers.insert(response.headers.end(), security.begin(), security.end());
  if (MatchesTag(call.request.Header("if-none-match"), file.etag)) {
    response.status = 304;
  } else if (!file.gzip.empty() && AcceptsGzip(call.request.Header("accept-encoding"))) {
    response.headers.emplace_back("content-encoding", "gzip");
    response.body = file.gzip;
  } else {
    response.body = file.bytes;
  }
  call.writer->Send(std::move(response));
}

}  // namespace

void AddPage(Router& router) {
  for (const WebFile& file : WebFiles()) {
    const auto endpoint = [&file](Call& call) {
      SendFile(file, call);
      return OkStatus();
    };
    router.Add("GET", fmt::format("/{}", file.path), Router::Access::kOpen, endpoint);
    if (file.path == "index.html") router.Add("GET", "/", Router::Access::kOpen, endpoint);
  }
}

}  // namespace moesaic::server
