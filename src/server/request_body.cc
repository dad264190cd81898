#include "server/request_body.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/percent.h"

namespace moesaic::server {
namespace {

constexpr size_t kMaxSizeDigits = 16;
constexpr size_t kMaxLine = 4096;
// Maximum bytes of chunk extensions and trailers, which this server ignores.
constexpr size_t kMaxOverhead = 16 << 10;

// Removes a token from the front.
bool TakeToken(std::string_view& text) {
  size_t size = 0;
  while (size < text.size() && IsTokenChar(text[size])) ++size;
  text.remove_prefix(size);
  return size > 0;
}

// Removes a quoted string from the front.
bool TakeQuoted(std::string_view& text) {
  for (size_t i = 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      text.remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

void SkipBlanks(std::string_view& text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
}

// Returns true for *( ";" name [ "=" ( token / quoted-string ) ] ).
bool AreExtensions(std::string_view text) {
  if (!IsFieldValue(text)) return false;
  while (!text.empty()) {
    SkipBlanks(text);
    if (text.empty() || text.front() != ';') return false;
    text.remove_prefix(1);
    SkipBlanks(text);
    if (!TakeToken(text)) return false;
    std::string_view after = text;
    SkipBlanks(after);
    if (after.empty() || after.front() != '=') continue;
    text = after.substr(1);
    SkipBlanks(text);
    if (text.starts_with('"') ? !TakeQuoted(text) : !TakeToken(text)) return false;
  }
  return true;
}

}  // namespace

RequestBody::RequestBody(const RequestHead& head, int64_t max_bytes)
    : max_bytes_(static_cast<uint64_t>(max_bytes)) {
  if (head.framing == BodyFraming::kChunked) state_ = State::kChunkLine;
  if (head.framing != BodyFraming::kLength) return;
  state_ = State::kLength;
  remaining_ = head.length;
  if (head.length > max_bytes_) {
    Refuse(413, fmt::format("the request's body has {} bytes; the limit is {}", head.length, max_bytes_));
  }
}

void RequestBody::Take(std::string& input) {
  std::string_view rest = input;
  while (!complete() && !refusal_ && Step(rest)) {
  }
  input.erase(0, input.size() - rest.size());
}

// Returns false when it needs more input.
bool RequestBody::Step(std::string_view& input) {
  switch (state_) {
    case State::kLength:
      return TakeData(input, State::kComplete);
    case State::kChunkData:
      return TakeData(input, State::kChunkEnd);
    case State::kChunkEnd:
      if (input.size() < 2 && (input.empty() || input == "\r")) return false;
      if (!input.starts_with("\r\n")) {
        Refuse(400, "a chunk is longer than its size says");
        return false;
      }
      input.remove_prefix(2);
      state_ = State::kChunkLine;
      return true;
    default:
      return TakeLine(input);
  }
}

bool RequestBody::TakeData(std::string_view& input, State next) {
  const size_t taken = std::min<uint64_t>(remaining_, input.size());
  bytes_.append(input.substr(0, taken));
  input.remove_prefix(taken);
  remaining_ -= taken;
  if (remaining_ > 0) return false;
  state_ = next;
  return true;
}

bool RequestBody::TakeLine(std::string_view& input) {
  const size_t end = input.substr(0, kMaxLine).find('\n');
  if (end == std::string_view::npos) {
    if (input.size() >= kMaxLine) Refuse(400, "a line of the chunked body is too long");
    return false;
  }
  if (end == 0 || input[end - 1] != '\r') {
    Refuse(400, "lines of a chunked body must end with CR LF");
    return false;
  }
  const std::string_view line = input.substr(0, end - 1);
  input.remove_prefix(end + 1);
  if (state_ == State::kChunkLine) {
    ReadChunkLine(line);
  } else {
    ReadTrailer(line);
  }
  return !refusal_;
}

void RequestBody::ReadChunkLine(std::string_view line) {
  size_t digits = 0;
  uint64_t size = 0;
  for (; digits < line.size() && base::HexValue(line[digits]) >= 0; ++digits) {
    if (digits == kMaxSizeDigits) return Refuse(400, "a chunk's size has too many digits");
    size = size * 16 + static_cast<uint64_t>(base::HexValue(line[digits]));
  }
  if (digits == 0) return Refuse(400, "a chunk must begin with its size in hexadecimal digits");
  if (!AreExtensions(line.substr(digits))) return Refuse(400, "a chunk's extensions are malformed");
  overhead_ += line.size() - digits;
  if (overhead_ > kMaxOverhead) return Refuse(400, "the chunk extensions are too long");
  if (size > max_bytes_ - bytes_.size()) {
    return Refuse(413, fmt::format("the request's body is longer than {} bytes", max_bytes_));
  }
  remaining_ = size;
  state_ = size > 0 ? State::kChunkData : State::kTrailers;
}

void RequestBody::ReadTrailer(std::string_view line) {
  if (line.empty()) {
    state_ = State::kComplete;
    return;
  }
  overhead_ += line.size();
  const size_t colon = std::min(line.find(':'), line.size());
  if (colon == line.size() || !IsToken(line.substr(0, colon)) || !IsFieldValue(line.substr(colon + 1))) {
    return Refuse(400, "a trailer of the chunked body is malformed");
  }
  if (overhead_ > kMaxOverhead) Refuse(431, "the request's trailers are too long");
}

void RequestBody::Refuse(int status, std::string message) {
  refusal_ = HttpRefusal{status, std::move(message)};
}

}  // namespace moesaic::server
