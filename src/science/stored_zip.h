// Zip archives without compression (PKWARE APPNOTE 6.3), as PyTorch writes them.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "base/status.h"

namespace moesaic::science {

using ByteSpan = std::span<const std::byte>;

/// Returns the bytes of every entry by name. They are parts of `bytes`.
StatusOr<std::map<std::string, ByteSpan>> ParseStoredZip(ByteSpan bytes, const std::string& name);

}  // namespace moesaic::science
