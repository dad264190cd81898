// For tests of parsers: files with random damage.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/placement/random.h"

namespace moesaic::parallel {

/// `bytes` with a byte changed, or up to eight removed, at each of one to four random places.
inline std::string Damaged(std::string bytes, Random& random) {
  for (int edits = 1 + random.Below(4); edits > 0; --edits) {
    const size_t at = random.Below(static_cast<int>(bytes.size()));
    if (random.Below(4) == 0) {
      bytes.erase(at, 1 + random.Below(8));
      if (bytes.empty()) bytes = " ";
    } else {
      bytes[at] =
          random.Below(2) ? static_cast<char>(random.Below(256)) : "0123456789[]{},-.e\""[random.Below(19)];
    }
  }
  return bytes;
}

}  // namespace moesaic::parallel
