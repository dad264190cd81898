// Reads the head of a request as RFC 9112 defines it, strictly: a message whose framing another HTTP
// implementation might read in another way is refused, so that no proxy and this server ever disagree on
// where a request ends (request smuggling).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "server/http.h"
#include "server/http_syntax.h"

namespace moesaic::server {

enum class BodyFraming { kNone, kLength, kChunked };

struct RequestHead {
  HttpRequest request;  ///< all but the body and the peer
  BodyFraming framing = BodyFraming::kNone;
  uint64_t length = 0;       ///< of kLength; UINT64_MAX when it does not fit
  bool old_version = false;  ///< HTTP/1.0
  bool keep_alive = true;
  bool expects_continue = false;  ///< the client waits for 100 (Continue)
};

/// Finds the end of a head in bytes that arrive piece by piece, each of which is looked at once.
class HeadScanner {
 public:
  /// `bytes` begins with the head, and is what the last call had with more at its end. Returns the head's
  /// length, blank line included; 0 while it is incomplete.
  size_t Scan(std::string_view bytes);
  /// Why the bytes can't become a head; Scan returns 0 then.
  const std::optional<HttpRefusal>& refusal() const { return refusal_; }
  /// The first line is complete.
  bool has_line() const { return line_ > 0; }

 private:
  size_t Refuse(const char* message);

  size_t scanned_ = 0;
  size_t line_ = 0;  // where the current line begins
  std::optional<HttpRefusal> refusal_;
};

/// Reads a whole head, as long as HeadScanner found it. After a refusal `head` has what could be read, so
/// that the answer can have the shape that the path calls for.
std::optional<HttpRefusal> ReadRequestHead(std::string_view bytes, RequestHead& head);

}  // namespace moesaic::server
