// The files of the web page, embedded when the program is built.
#pragma once

#include <span>
#include <string_view>

namespace moesaic::server {

struct WebFile {
  std::string_view path;  ///< "js/main.js"; files under "lib/" have their version in the path
  std::string_view etag;  ///< hash of the bytes in quotes
  std::string_view bytes;
  std::string_view gzip;  ///< bytes compressed with gzip; empty for fonts, which are compressed already
};

std::span<const WebFile> WebFiles();

}  // namespace moesaic::server
