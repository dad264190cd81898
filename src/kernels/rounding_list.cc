#include "kernels/cpu/rounding.h"
#include "kernels/impl_list.h"
#include "kernels/ref/rounding.h"

namespace moesaic::kernels {

using runtime::Isa;

ImplList<Rounding> RoundingImpls(NumberGrid grid) {
#define MOESAIC_ROUNDING_IMPLS(name, g)                      \
  {                                                          \
    {name "_avx512", Isa::kAvx512, cpu::kRoundingAvx512[g]}, \
        {name "_avx2", Isa::kAvx2, cpu::kRoundingAvx2[g]}, { \
      name "_ref", Isa::kRef, ref::kRounding[g]              \
    }                                                        \
  }
  static const Impl<Rounding> kImpls[kNumberGrids][3] = {
      MOESAIC_ROUNDING_IMPLS("round_int8", 0), MOESAIC_ROUNDING_IMPLS("round_int4", 1),
      MOESAIC_ROUNDING_IMPLS("round_e2m1", 2), MOESAIC_ROUNDING_IMPLS("round_e4m3", 3)};
#undef MOESAIC_ROUNDING_IMPLS
  return kImpls[static_cast<int>(grid)];
}

}  // namespace moesaic::kernels
