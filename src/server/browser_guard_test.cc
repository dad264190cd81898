#include "server/browser_guard.h"

#include <gtest/gtest.h>

namespace moesaic::server {
namespace {

int StatusOf(const BrowserGuardOptions& options, Headers headers) {
  HttpRequest head;
  head.headers = std::move(headers);
  const auto error = BrowserGuard(options).Check(head);
  return error ? error->http_status : 200;
}

TEST(BrowserGuard, AcceptsAddressesAndKnownNamesAsHost) {
  const BrowserGuardOptions options{
      .bound_host = "Models.example", .allowed_hosts = {"proxy.example"}, .cors_origins = {}};
  for (const char* host :
       {"localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fe80::1]",
        "models.example:80", "proxy.example", "proxy.example:8443"}) {
    EXPECT_EQ(StatusOf(options, {{"host", host}}), 200) << host;
  }
  for (const char* host : {"evil.example", "evil.example:8000", "localhost.evil.example",
                           "127.0.0.1.evil.example", "[evil]", "a.proxy.example", "127.1.evil"}) {
    EXPECT_EQ(StatusOf(options, {{"host", host}}), 421) << host;
  }
  EXPECT_EQ(StatusOf(options, {{"host", "localhost"}, {"host", "evil.example"}}), 421);
  EXPECT_EQ(StatusOf(options, {}), 200);  // a request of HTTP/1.0 without "host"
  EXPECT_EQ(
      StatusOf({.bound_host = "::", .allowed_hosts = {"*"}, .cors_origins = {}}, {{"host", "any.example"}}),
      200);
}

TEST(BrowserGuard, AcceptsItsOwnPagesAndThoseThatCorsAllows) {
  const BrowserGuardOptions options{
      .bound_host = "127.0.0.1", .allowed_hosts = {"m.example"}, .cors_origins = {"http://a.example"}};
  for (const auto& [host, origin] : std::vector<std::pair<const char*, const char*>>{
           {"127.0.0.1:8000", "http://127.0.0.1:8000"},
           {"localhost", "http://localhost"},
           {"localhost:80", "http://localhost"},
           {"m.example", "https://m.example"},  // a proxy ends TLS
           {"[::1]:8000", "http://[::1]:8000"},
           {"127.0.0.1:8000", "http://a.example"}}) {
    EXPECT_EQ(StatusOf(options, {{"host", host}, {"origin", origin}}), 200) << origin;
  }
  for (const auto& [host, origin] :
       std::vector<std::pair<const char*, const char*>>{{"127.0.0.1:8000", "http://evil.example"},
                                                        {"127.0.0.1:8000", "null"},
                                                        {"127.0.0.1:8000", "http://127.0.0.1:9000"},
                                                        {"127.0.0.1:8000", "http://localhost:8000"},
                                                        {"127.0.0.1:8000", "http://a.example:81"},
                                                        {"m.example", "http://m.example:444"}}) {
    EXPECT_EQ(StatusOf(options, {{"host", host}, {"origin", origin}}), 403) << origin;
  }
  EXPECT_EQ(StatusOf({.bound_host = "", .allowed_hosts = {}, .cors_origins = {"*"}}, {{"origin", "null"}}),
            200);
}

TEST(CheckContentType, RequiresJsonForABody) {
  const auto status = [](const char* method, Headers headers) {
    HttpRequest head;
    head.method = method;
    head.headers = std::move(headers);
    const auto error = CheckContentType(head);
    return error ? error->http_status : 200;
  };
  EXPECT_EQ(status("POST", {{"content-length", "2"}, {"content-type", "application/json"}}), 200);
  EXPECT_EQ(status("POST", {{"content-length", "2"}, {"content-type", "Application/JSON ; charset=utf-8"}}),
            200);
  EXPECT_EQ(status("POST", {{"content-length", "0"}}), 200);
  EXPECT_EQ(status("POST", {}), 200);
  EXPECT_EQ(status("GET", {{"content-length", "2"}}), 200);
  EXPECT_EQ(status("POST", {{"content-length", "2"}}), 415);
  EXPECT_EQ(status("POST", {{"transfer-encoding", "chunked"}}), 415);
  EXPECT_EQ(status("POST", {{"content-length", "2"}, {"content-type", "text/plain"}}), 415);
  EXPECT_EQ(status("POST", {{"content-length", "2"}, {"content-type", "application/jsonx"}}), 415);
}

}  // namespace
}  // namespace moesaic::server
