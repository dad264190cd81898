// Recognizes Git LFS pointers: the short text that git checks out when Git LFS has not fetched a file.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::base {

inline constexpr std::string_view kLfsPointer = "version https://git-lfs.github.com/spec/";

/// Returns DataLoss with the command to run if `begin`, the first bytes of `file`, is an LFS pointer.
inline Status CheckFetched(std::string_view begin, const std::string& file) {
  if (!begin.starts_with(kLfsPointer)) return OkStatus();
  return DataLoss(
      "{}: this is a Git LFS pointer and not the file itself; run \"git lfs pull\" in its repository, or "
      "download the file again",
      file);
}

}  // namespace moesaic::base
