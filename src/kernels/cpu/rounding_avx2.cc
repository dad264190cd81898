#include "kernels/cpu/rounding.h"
#include "kernels/rounding-inl.h"

namespace moesaic::kernels::cpu {

const Rounding kRoundingAvx2[kNumberGrids] = MOESAIC_ROUNDING_TABLE;

}  // namespace moesaic::kernels::cpu
