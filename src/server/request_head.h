// Reads the head of a request strictly by RFC 9112. A proxy and this server must agree on the end of a
// request (request smuggling). So it refuses a message whose framing another HTTP implementation might read
// in another way.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "server/http.h"
#include "server/http_syntax.h"

namespace moesaic::server {

enum class BodyFraming { kNone, kLength, kChunked };

struct RequestHead {
  HttpRequest request;  ///< the request without the body and the peer
  BodyFraming framing = BodyFraming::kNone;
  uint64_t length = 0;       ///< length for kLength; UINT64_MAX when it does not fit
  bool old_version = false;  ///< true for HTTP/1.0
  bool keep_alive = true;
  bool expects_continue = false;  ///< true if the client waits for 100 (Continue)
};

/// Finds the end of a head in bytes that arrive piece by piece. It scans each byte once.
class HeadScanner {
 public:
  /// `bytes` begins with the head. It is the `bytes` of the last call with more bytes appended. Returns the
  /// head's length with its blank line, or 0 while it is incomplete.
  size_t Scan(std::string_view bytes);
  /// The refusal of bytes that cannot begin a head. Scan returns 0 for them.
  const std::optional<HttpRefusal>& refusal() const { return refusal_; }
  /// Returns true if the first line is complete.
  bool has_line() const { return line_ > 0; }

 private:
  size_t Refuse(const char* message);

  size_t scanned_ = 0;
  size_t line_ = 0;  // offset of the current line
  std::optional<HttpRefusal> refusal_;
};

/// Reads a complete head of the length that HeadScanner found. After a refusal, `head` has the parts that
/// could be read, so that the path decides the form of the error.
std::optional<HttpRefusal> ReadRequestHead(std::string_view bytes, RequestHead& head);

}  // namespace moesaic::server
