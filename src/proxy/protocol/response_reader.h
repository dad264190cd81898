// Parses HTTP/1.1 responses of engines as they arrive, in pieces of any size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moesaic::proxy {

/// Reads one response. Consume() returns bytes of the body as they arrive, without the chunked framing.
class ResponseReader {
 public:
  /// Maximum bytes of the status line and headers together, and of one chunk-size line.
  static constexpr size_t kMaxHeadBytes = 64 << 10;

  /// `head`: the response answers a HEAD request and ends with its headers.
  explicit ResponseReader(bool head = false) : head_only_(head) {}

  /// Consumes the next bytes of the connection and appends body bytes to `body`. An error means that the
  /// connection is unusable. Bytes after the end of the response make it unusable for a next request.
  Status Consume(std::string_view bytes, std::string* body);
  /// Called when the engine closed the connection. Returns an error if the response is incomplete.
  Status Close();

  bool head_done() const { return state_ > State::kHead; }
  bool done() const { return state_ == State::kDone; }
  /// Returns whether the connection may carry another request. Valid once done() is true.
  bool keep_alive() const { return keep_alive_ && !extra_; }
  int status() const { return status_; }
  /// Names are in lower case, in the engine's order.
  const std::vector<std::pair<std::string, std::string>>& headers() const { return headers_; }
  std::string_view Header(std::string_view name) const;

 private:
  enum class State { kHead, kLength, kUntilClose, kChunkSize, kChunkData, kChunkEnd, kTrailer, kDone };
  Status ParseHead();
  Status TakeLine(std::string_view* bytes, bool* complete);

  State state_ = State::kHead;
  bool head_only_;
  std::string line_;  // the head, or an incomplete line
  uint64_t left_ = 0;
  int status_ = 0;
  bool keep_alive_ = true;
  bool extra_ = false;
  std::vector<std::pair<std::string, std::string>> headers_;
};

}  // namespace moesaic::proxy
