// How an answer is written to the wire: RFC 9112, sections 4 and 7.
#pragma once

#include <string>

#include "server/http.h"

namespace moesaic::server {

/// The status line and `headers`, without the blank line that ends a head.
std::string ResponseHead(int status, const Headers& headers);

/// One chunk of a chunked body. `piece` is not empty.
std::string Chunk(const std::string& piece);

}  // namespace moesaic::server
