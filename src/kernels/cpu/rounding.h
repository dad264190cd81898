// The roundings of each instruction set; what they compute is said in rounding.h.
#pragma once

#include "kernels/rounding.h"

namespace moesaic::kernels::cpu {

extern const Rounding kRoundingAvx2[kNumberGrids], kRoundingAvx512[kNumberGrids];

}  // namespace moesaic::kernels::cpu
