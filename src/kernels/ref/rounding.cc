#include "kernels/ref/rounding.h"

#include "kernels/rounding-inl.h"

namespace moesaic::kernels::ref {

const Rounding kRounding[kNumberGrids] = MOESAIC_ROUNDING_TABLE;

}  // namespace moesaic::kernels::ref
