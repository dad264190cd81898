// Rounding in the compiler's plain code: what the others are tested against.
#pragma once

#include "kernels/rounding.h"

namespace moesaic::kernels::ref {

extern const Rounding kRounding[kNumberGrids];

}  // namespace moesaic::kernels::ref
