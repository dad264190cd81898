// Writes the heads and chunks of answers: RFC 9112, sections 4 and 7.
#pragma once

#include <string>

#include "server/http.h"

namespace moesaic::server {

/// Returns the status line and `headers`, without the blank line that ends a head.
std::string ResponseHead(int status, const Headers& headers);

/// Returns one chunk of a chunked body. `piece` must not be empty.
std::string Chunk(const std::string& piece);

}  // namespace moesaic::server
