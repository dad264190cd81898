#include "proxy/protocol/response_reader.h"

#include <algorithm>
#include <charconv>

namespace moesaic::proxy {
namespace {

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return lower;
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

bool IsToken(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  });
}

bool HasToken(std::string_view list, std::string_view token) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (Trimmed(list.substr(0, comma)) == token) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

}  // namespace

std::string_view ResponseReader::Header(std::string_view name) const {
  for (const auto& [known, value] : headers_) {
    if (known == name) return value;
  }
  return {};
}

Status ResponseReader::ParseHead() {
  headers_.clear();
  std::string_view head = line_;
  const size_t end = head.find('\n');
  std::string_view status = head.substr(0, end);
  if (status.ends_with('\r')) status.remove_suffix(1);
  head.remove_prefix(end + 1);
  const bool old = status.starts_with("HTTP/1.0 ");
  if (!old && !status.starts_with("HTTP/1.1 ")) return InvalidArgument("response is not HTTP/1.1");
  const char* code = status.data() + 9;
  const auto [after, error] = std::from_chars(code, status.data() + status.size(), status_);
  if (error != std::errc() || after != code + 3 || status_ < 100 || status_ > 599) {
    return InvalidArgument("response has no status code");
  }
  while (!head.empty()) {
    const size_t line_end = head.find('\n');
    std::string_view line = head.substr(0, line_end);
    head.remove_prefix(line_end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) break;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !IsToken(line.substr(0, colon))) {
      return InvalidArgument("response has a malformed header");
    }
    const std::string_view value = Trimmed(line.substr(colon + 1));
    if (value.find('\0') != std::string_view::npos || value.find('\r') != std::string_view::npos) {
      return InvalidArgument("response has a malformed header");
    }
    headers_.emplace_back(Lower(line.substr(0, colon)), value);
  }
  line_.clear();
  if (status_ < 200) {  // an interim response: the real one follows
    if (status_ == 101) return InvalidArgument("response switches protocols");
    return OkStatus();
  }
  const std::string connection = Lower(Header("connection"));
  keep_alive_ = old ? HasToken(connection, "keep-alive") : !HasToken(connection, "close");
  const std::string coding = Lower(Header("transfer-encoding"));
  bool length = false;
  for (const auto& [name, value] : headers_) {
    if (name != "content-length") continue;
    uint64_t bytes = 0;
    const auto [rest, bad] = std::from_chars(value.data(), value.data() + value.size(), bytes);
    if (bad != std::errc() || rest != value.data() + value.size() || (length && bytes != left_)) {
      return InvalidArgument("response has an invalid Content-Length");
    }
    left_ = bytes;
    length = true;
  }
  if (status_ == 204 || status_ == 304) {
    state_ = State::kDone;
  } else if (!coding.empty()) {
    if (coding != "chunked" || length) return InvalidArgument("response has an invalid Transfer-Encoding");
    state_ = State::kChunkSize;
  } else if (length) {
    state_ = left_ == 0 ? State::kDone : State::kLength;
  } else {
    keep_alive_ = false;
    state_ = State::kUntilClose;
  }
  return OkStatus();
}

Status ResponseReader::TakeLine(std::string_view* bytes, bool* complete) {
  const size_t end = bytes->find('\n');
  *complete = end != std::string_view::npos;
  line_.append(bytes->substr(0, end));
  bytes->remove_prefix(*complete ? end + 1 : bytes->size());
  if (line_.size() > kMaxHeadBytes) return InvalidArgument("response has a line that is too long");
  if (*complete && line_.ends_with('\r')) line_.pop_back();
  return OkStatus();
}

Status ResponseReader::Consume(std::string_view bytes, std::string* body) {
  while (!bytes.empty()) {
    switch (state_) {
      case State::kHead: {
        const size_t end = bytes.find('\n');
        line_.append(bytes.substr(0, end == std::string_view::npos ? end : end + 1));
        bytes.remove_prefix(end == std::string_view::npos ? bytes.size() : end + 1);
        if (line_.size() > kMaxHeadBytes) return InvalidArgument("response head exceeds {} bytes", kMaxHeadBytes);
        if (line_.ends_with("\n\n") || line_.ends_with("\n\r\n")) RETURN_IF_ERROR(ParseHead());
        break;
      }
      case State::kLength:
      case State::kChunkData: {
        const size_t taken = static_cast<size_t>(std::min<uint64_t>(left_, bytes.size()));
        body->append(bytes.substr(0, taken));
        bytes.remove_prefix(taken);
        left_ -= taken;
        if (left_ == 0) state_ = state_ == State::kLength ? State::kDone : State::kChunkEnd;
        break;
      }
      case State::kUntilClose:
        body->append(bytes);
        bytes = {};
        break;
      case State::kChunkSize: {
        bool complete = false;
        RETURN_IF_ERROR(TakeLine(&bytes, &complete));
        if (!complete) break;
        const std::string_view size = Trimmed(std::string_view(line_).substr(0, line_.find(';')));
        const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), left_, 16);
        if (size.empty() || error != std::errc() || end != size.data() + size.size()) {
          return InvalidArgument("response has an invalid chunk size");
        }
        line_.clear();
        state_ = left_ == 0 ? State::kTrailer : State::kChunkData;
        break;
      }
      case State::kChunkEnd:
      case State::kTrailer: {
        bool complete = false;
        RETURN_IF_ERROR(TakeLine(&bytes, &complete));
        if (!complete) break;
        const bool empty = line_.empty();
        line_.clear();
        if (state_ == State::kTrailer) {
          if (empty) state_ = State::kDone;
        } else if (empty) {
          state_ = State::kChunkSize;
        } else {
          return InvalidArgument("response has a chunk without an end");
        }
        break;
      }
      case State::kDone:
        extra_ = true;
        return OkStatus();
    }
  }
  return OkStatus();
}

Status ResponseReader::Close() {
  keep_alive_ = false;
  if (state_ == State::kUntilClose) state_ = State::kDone;
  if (state_ != State::kDone) {
    return absl::UnavailableError(head_done() ? "the engine closed the connection inside the response"
                                              : "the engine closed the connection before the response");
  }
  return OkStatus();
}

}  // namespace moesaic::proxy
