// Prints instruction sets by name in GoogleTest's messages.
#pragma once

#include <ostream>

#include "runtime/cpu_features.h"

namespace moesaic::runtime {

inline void PrintTo(Isa isa, std::ostream* out) { *out << IsaName(isa); }

}  // namespace moesaic::runtime
