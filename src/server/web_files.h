// The files of web/, as they were when the program was built.
#pragma once

#include <span>
#include <string_view>

namespace moesaic::server {

struct WebFile {
  std::string_view path;  // "js/chat.js"
  std::string_view bytes;
};

std::span<const WebFile> WebFiles();

}  // namespace moesaic::server
