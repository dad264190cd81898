// Returns memory that is not read any more to the system.
#pragma once

#include <cstddef>

#include "runtime/memory.h"

namespace moesaic::runtime {

/// Returns whole pages of [first, first + bytes) of a buffer, huge pages where it uses them. They then read
/// as zeros.
void ReleasePages(const Buffer& buffer, size_t first, size_t bytes);

}  // namespace moesaic::runtime
