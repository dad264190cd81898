// NumPy's .npy format, version 1.0, for f32 matrices.
#pragma once

#include <cstdint>
#include <string>

namespace moesaic::app {

/// Returns the header of a C-ordered little-endian f32 array [rows, columns]. The values follow it.
std::string NpyHeader(int64_t rows, int64_t columns);

}  // namespace moesaic::app
