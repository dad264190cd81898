// Rounding compiled without instruction-set flags: the reference of its tests.
#pragma once

#include "kernels/rounding.h"

namespace moesaic::kernels::ref {

extern const Rounding kRounding[kNumberGrids];

}  // namespace moesaic::kernels::ref
