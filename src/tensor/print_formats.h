// Prints element types and packed formats by name in GoogleTest's messages.
#pragma once

#include <ostream>

#include "tensor/dtype.h"
#include "tensor/packed.h"

namespace moesaic::tensor {

inline void PrintTo(DType dtype, std::ostream* out) { *out << DTypeName(dtype); }
inline void PrintTo(PackedFormat format, std::ostream* out) { *out << PackedFormatName(format); }

}  // namespace moesaic::tensor
