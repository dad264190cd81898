// Rounding functions of each instruction set; rounding.h documents them.
#pragma once

#include "kernels/rounding.h"

namespace moesaic::kernels::cpu {

extern const Rounding kRoundingAvx2[kNumberGrids], kRoundingAvx512[kNumberGrids];

}  // namespace moesaic::kernels::cpu
