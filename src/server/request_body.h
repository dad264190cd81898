// Decodes the body of a request from pieces: RFC 9112, sections 6 and 7.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/http_syntax.h"
#include "server/request_head.h"

namespace moesaic::server {

class RequestBody {
 public:
  RequestBody() = default;
  RequestBody(const RequestHead& head, int64_t max_bytes);

  /// Moves the bytes of the body from the front of `input` to bytes(). Leaves bytes that follow the body.
  void Take(std::string& input);
  bool complete() const { return state_ == State::kComplete; }
  /// The refusal of a malformed or too long body. Its connection cannot be used after it.
  const std::optional<HttpRefusal>& refusal() const { return refusal_; }
  std::string& bytes() { return bytes_; }

 private:
  enum class State { kLength, kChunkLine, kChunkData, kChunkEnd, kTrailers, kComplete };

  bool Step(std::string_view& input);
  bool TakeData(std::string_view& input, State next);
  bool TakeLine(std::string_view& input);
  void ReadChunkLine(std::string_view line);
  void ReadTrailer(std::string_view line);
  void Refuse(int status, std::string message);

  State state_ = State::kComplete;
  uint64_t max_bytes_ = 0;
  uint64_t remaining_ = 0;  // bytes of the body, or of this chunk
  size_t overhead_ = 0;     // bytes of chunk extensions and trailers
  std::string bytes_;
  std::optional<HttpRefusal> refusal_;
};

}  // namespace moesaic::server
