#include "server/request_head.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/request_target.h"

namespace moesaic::server {
namespace {

using Refusal = std::optional<HttpRefusal>;

Refusal Bad(std::string message) { return HttpRefusal{400, std::move(message)}; }

// Returns the values of one field's lines, in order.
std::vector<std::string_view> ValuesOf(const RequestHead& head, std::string_view name) {
  std::vector<std::string_view> values;
  for (const auto& [key, value] : head.request.headers) {
    if (key == name) values.push_back(value);
  }
  return values;
}

// Returns the members of a list field from all of its lines, in lower case.
std::vector<std::string> MembersOf(const RequestHead& head, std::string_view name) {
  std::vector<std::string> members;
  for (const std::string_view value : ValuesOf(head, name)) {
    for (const std::string_view member : ListMembers(value)) members.push_back(Lower(member));
  }
  return members;
}

Refusal ReadVersion(std::string_view text, RequestHead& head) {
  const auto digit = [&text](size_t i) { return text[i] >= '0' && text[i] <= '9'; };
  if (text.size() != 8 || !text.starts_with("HTTP/") || text[6] != '.' || !digit(5) || !digit(7)) {
    return Bad("the request line must be METHOD TARGET HTTP/1.1, with one space between");
  }
  // A later minor version is read as 1.1 (RFC 9110, section 2.5).
  if (text[5] != '1') return HttpRefusal{505, "only HTTP/1.1 and HTTP/1.0 are supported"};
  head.old_version = text[7] == '0';
  return std::nullopt;
}

Refusal ReadRequestLine(std::string_view line, RequestHead& head, std::optional<std::string>& authority) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last || !IsToken(line.substr(0, first))) {
    return Bad("the request line must be METHOD TARGET HTTP/1.1, with one space between");
  }
  HttpRequest& request = head.request;
  request.method = line.substr(0, first);
  if (auto refusal = ReadVersion(line.substr(last + 1), head)) return refusal;
  if (request.method == "CONNECT") {
    return HttpRefusal{501, fmt::format("the method {} is not supported", request.method)};
  }
  RequestTarget target;
  auto refusal = ReadTarget(request.method, line.substr(first + 1, last - first - 1), target);
  request.path = std::move(target.path);
  request.query = std::move(target.query);
  authority = std::move(target.authority);
  return refusal;
}

Refusal ReadField(std::string_view line, RequestHead& head) {
  if (line.front() == ' ' || line.front() == '\t') return Bad("folded header lines are not accepted");
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !IsToken(line.substr(0, colon))) {
    return Bad("a header line must be NAME: VALUE, with no space before the colon");
  }
  std::string name = Lower(line.substr(0, colon));
  const std::string_view value = TrimBlanks(line.substr(colon + 1));
  if (!IsFieldValue(value)) return Bad(fmt::format("the header {} has a control character", name));
  head.request.headers.emplace_back(std::move(name), value);
  return std::nullopt;
}

Refusal ReadHost(const std::optional<std::string>& authority, RequestHead& head) {
  const auto hosts = ValuesOf(head, "host");
  if (hosts.empty() && !head.old_version) return Bad("HTTP/1.1 needs a Host header");
  if (hosts.size() > 1) return Bad("there is more than one Host header");
  if (!hosts.empty() && !IsHost(hosts.front())) return Bad("the Host header is malformed");
  if (!authority) return std::nullopt;
  // The URI of the request line overrides the Host field (RFC 9112, section 3.2.2).
  for (auto& [name, value] : head.request.headers) {
    if (name == "host") value = *authority;
  }
  if (hosts.empty()) head.request.headers.emplace_back("host", *authority);
  return std::nullopt;
}

Refusal ReadTransferEncoding(RequestHead& head) {
  const auto codings = MembersOf(head, "transfer-encoding");
  if (head.old_version) return Bad("HTTP/1.0 has no Transfer-Encoding");
  if (!ValuesOf(head, "content-length").empty()) {
    return Bad("Transfer-Encoding and Content-Length exclude each other");
  }
  // Only a last "chunked" delimits a request's body (RFC 9112, section 6.3).
  const bool once = std::count(codings.begin(), codings.end(), "chunked") == 1;
  const bool tokens = std::all_of(codings.begin(), codings.end(), IsToken);
  if (!once || !tokens || codings.back() != "chunked") {
    return Bad("the Transfer-Encoding of a request must be \"chunked\"");
  }
  if (codings.size() > 1) {
    return HttpRefusal{501, fmt::format("the transfer coding {} is not supported", codings.front())};
  }
  head.framing = BodyFraming::kChunked;
  return std::nullopt;
}

Refusal ReadContentLength(RequestHead& head) {
  const auto lengths = ValuesOf(head, "content-length");
  if (lengths.empty()) return std::nullopt;
  if (lengths.size() > 1) return Bad("there is more than one Content-Length header");
  const std::string_view text = lengths.front();
  const bool digits = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (text.empty() || !digits) return Bad("Content-Length must be a decimal number");
  uint64_t length = 0;
  for (const char c : text) {
    const auto digit = static_cast<uint64_t>(c - '0');
    length = length > (UINT64_MAX - digit) / 10 ? UINT64_MAX : length * 10 + digit;
  }
  head.length = length;
  head.framing = length > 0 ? BodyFraming::kLength : BodyFraming::kNone;
  return std::nullopt;
}

Refusal ReadFraming(RequestHead& head) {
  if (!ValuesOf(head, "transfer-encoding").empty()) return ReadTransferEncoding(head);
  return ReadContentLength(head);
}

void ReadConnection(RequestHead& head) {
  const auto options = MembersOf(head, "connection");
  const auto has = [&options](const char* option) {
    return std::find(options.begin(), options.end(), option) != options.end();
  };
  head.keep_alive = !has("close") && (!head.old_version || has("keep-alive"));
}

Refusal ReadExpect(RequestHead& head) {
  for (const std::string& member : MembersOf(head, "expect")) {
    if (member != "100-continue") {
      return HttpRefusal{417, "the only expectation that can be met is \"100-continue\""};
    }
    head.expects_continue = !head.old_version;
  }
  return std::nullopt;
}

}  // namespace

size_t HeadScanner::Refuse(const char* message) {
  refusal_ = HttpRefusal{400, message};
  return 0;
}

size_t HeadScanner::Scan(std::string_view bytes) {
  if (refusal_) return 0;
  if (scanned_ == 0 && !bytes.empty() && !IsTokenChar(bytes.front())) {
    // Refused at once, since a TLS client sends no complete line.
    return Refuse(bytes.front() == '\x16' ? "this port speaks plain HTTP, not TLS: use http://"
                                          : "not an HTTP request: it must begin with a method");
  }
  for (; scanned_ < bytes.size(); ++scanned_) {
    const char c = bytes[scanned_];
    if (c == '\r') {
      if (scanned_ + 1 == bytes.size()) return 0;  // scanned again with the byte after it
      if (bytes[scanned_ + 1] != '\n') return Refuse("not an HTTP request: CR without LF");
      const bool blank = scanned_ == line_;
      line_ = scanned_ + 2;
      ++scanned_;
      if (blank) return line_;
    } else if (c == '\n') {
      return Refuse("not an HTTP request: lines must end with CR LF");
    }
  }
  return 0;
}

std::optional<HttpRefusal> ReadRequestHead(std::string_view bytes, RequestHead& head) {
  const auto line = [&bytes] {
    const size_t end = std::min(bytes.find("\r\n"), bytes.size());
    const std::string_view taken = bytes.substr(0, end);
    bytes.remove_prefix(std::min(end + 2, bytes.size()));
    return taken;
  };
  std::optional<std::string> authority;
  if (auto refusal = ReadRequestLine(line(), head, authority)) return refusal;
  for (std::string_view field = line(); !field.empty(); field = line()) {
    if (auto refusal = ReadField(field, head)) return refusal;
  }
  ReadConnection(head);
  if (auto refusal = ReadHost(authority, head)) return refusal;
  if (auto refusal = ReadFraming(head)) return refusal;
  return ReadExpect(head);
}

}  // namespace moesaic::server
