#include "kernels/cpu/route.h"
#include "kernels/impl_list.h"
#include "kernels/ref/route.h"

namespace moesaic::kernels {

ImplList<RouteFn> RouteImpls() {
  static constexpr Impl<RouteFn> kImpls[] = {
      {"route_f32_avx512", runtime::Isa::kAvx512, cpu::RouteAvx512},
      {"route_f32_ref", runtime::Isa::kRef, ref::Route},
  };
  return kImpls;
}

}  // namespace moesaic::kernels
