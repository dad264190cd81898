#include "server/response_text.h"

#include <fmt/format.h>

#include <boost/beast/http/status.hpp>

namespace moesaic::server {

std::string ResponseHead(int status, const Headers& headers) {
  const auto reason = boost::beast::http::obsolete_reason(static_cast<boost::beast::http::status>(status));
  std::string text = fmt::format("HTTP/1.1 {} {}\r\n", status, std::string(reason.data(), reason.size()));
  for (const auto& [name, value] : headers) text += fmt::format("{}: {}\r\n", name, value);
  return text;
}

std::string Chunk(const std::string& piece) { return fmt::format("{:x}\r\n{}\r\n", piece.size(), piece); }

}  // namespace moesaic::server
