// Feeds bytes to the readers of requests. Checks that the result does not depend on the size of the pieces,
// and that accepted requests end where Boost.Beast, another implementation, ends them.
#include <algorithm>
#include <boost/beast/http.hpp>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "server/request_body.h"
#include "server/request_head.h"

namespace moesaic::server {
namespace {

namespace http = boost::beast::http;

constexpr int64_t kMaxBody = 1 << 16;

struct Outcome {
  RequestHead head;
  std::string body;
  size_t consumed = 0;
  int refused = 0;
  bool complete = false;

  bool operator==(const Outcome& other) const {
    const HttpRequest &a = head.request, &b = other.head.request;
    return a.method == b.method && a.path == b.path && a.query == b.query && a.headers == b.headers &&
           body == other.body && consumed == other.consumed && refused == other.refused &&
           complete == other.complete;
  }
};

// Reads one request from pieces of `size` bytes, as a connection does.
Outcome ReadInPieces(std::string_view bytes, size_t size) {
  Outcome outcome;
  HeadScanner scanner;
  std::optional<RequestBody> body;
  std::string input;
  size_t taken = 0;
  while (taken < bytes.size() && outcome.refused == 0 && !outcome.complete) {
    input += bytes.substr(taken, size);
    taken = std::min(taken + size, bytes.size());
    if (!body) {
      const size_t end = scanner.Scan(input);
      if (scanner.refusal()) outcome.refused = scanner.refusal()->status;
      if (end == 0) continue;
      const auto refusal = ReadRequestHead(std::string_view(input).substr(0, end), outcome.head);
      input.erase(0, end);
      if (refusal) {
        outcome.refused = refusal->status;
        break;
      }
      body.emplace(outcome.head, kMaxBody);
    }
    if (!body->refusal()) body->Take(input);
    if (body->refusal()) outcome.refused = body->refusal()->status;
    outcome.complete = body->complete();
  }
  if (outcome.complete) {
    outcome.body = body->bytes();
    outcome.consumed = taken - input.size();
  }
  return outcome;
}

void Require(bool condition) {
  if (!condition) std::abort();
}

// Checks that Beast, where it accepts the request too, ends it at the same byte with the same contents.
void CompareWithBeast(std::string_view bytes, const Outcome& outcome) {
  http::request_parser<http::string_body> parser;
  parser.eager(true);
  parser.header_limit(UINT32_MAX);
  parser.body_limit(static_cast<uint64_t>(kMaxBody));
  size_t at = 0;
  boost::beast::error_code error;
  while (!parser.is_done() && at < bytes.size()) {
    const size_t taken = parser.put(boost::asio::buffer(bytes.data() + at, bytes.size() - at), error);
    at += taken;
    if (error || taken == 0) break;
  }
  if (error && error != http::error::need_more) return;
  Require(parser.is_done());
  Require(at == outcome.consumed);
  const auto& head = parser.get();
  Require(head.body() == outcome.body);
  Require(std::string(head.method_string()) == outcome.head.request.method);
  Require((head.version() == 10) == outcome.head.old_version);
  Require(parser.chunked() == (outcome.head.framing == BodyFraming::kChunked));
}

}  // namespace
}  // namespace moesaic::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::server;
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Outcome whole = ReadInPieces(bytes, bytes.size());
  Require(whole == ReadInPieces(bytes, data[0] % 16U + 1U));
  for (const auto& [name, value] : whole.head.request.headers) Require(IsToken(name) && IsFieldValue(value));
  if (whole.complete) CompareWithBeast(bytes, whole);
  return 0;
}
