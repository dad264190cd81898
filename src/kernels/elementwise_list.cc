#include "kernels/cpu/elementwise.h"
#include "kernels/impl_list.h"
#include "kernels/ref/elementwise.h"

namespace moesaic::kernels {

using runtime::Isa;

ImplList<RmsNormRowFn> RmsNormImpls() {
  static constexpr Impl<RmsNormRowFn> kImpls[] = {{"rms_norm_f32_avx512", Isa::kAvx512, cpu::RmsNormAvx512},
                                                  {"rms_norm_f32_avx2", Isa::kAvx2, cpu::RmsNormAvx2},
                                                  {"rms_norm_f32_ref", Isa::kRef, ref::RmsNorm}};
  return kImpls;
}

ImplList<SiluMulRowFn> SiluMulImpls() {
  static constexpr Impl<SiluMulRowFn> kImpls[] = {{"silu_mul_f32_avx512", Isa::kAvx512, cpu::SiluMulAvx512},
                                                  {"silu_mul_f32_avx2", Isa::kAvx2, cpu::SiluMulAvx2},
                                                  {"silu_mul_f32_ref", Isa::kRef, ref::SiluMul}};
  return kImpls;
}

ImplList<AxpyRowFn> AxpyImpls() {
  static constexpr Impl<AxpyRowFn> kImpls[] = {{"axpy_f32_avx512", Isa::kAvx512, cpu::AxpyAvx512},
                                               {"axpy_f32_avx2", Isa::kAvx2, cpu::AxpyAvx2},
                                               {"axpy_f32_ref", Isa::kRef, ref::Axpy}};
  return kImpls;
}

ImplList<AxpbyRowFn> AxpbyImpls() {
  static constexpr Impl<AxpbyRowFn> kImpls[] = {{"axpby_f32_avx512", Isa::kAvx512, cpu::AxpbyAvx512},
                                                {"axpby_f32_avx2", Isa::kAvx2, cpu::AxpbyAvx2},
                                                {"axpby_f32_ref", Isa::kRef, ref::Axpby}};
  return kImpls;
}

ImplList<RopeRowFn> RopeHalfImpls() {
  static constexpr Impl<RopeRowFn> kImpls[] = {{"rope_half_f32_avx512", Isa::kAvx512, cpu::RopeHalfAvx512},
                                               {"rope_half_f32_avx2", Isa::kAvx2, cpu::RopeHalfAvx2},
                                               {"rope_half_f32_ref", Isa::kRef, ref::RopeHalf}};
  return kImpls;
}

ImplList<RopeRowFn> RopeInterleavedImpls() {
  static constexpr Impl<RopeRowFn> kImpls[] = {
      {"rope_interleaved_f32_avx512", Isa::kAvx512, cpu::RopeInterleavedAvx512},
      {"rope_interleaved_f32_avx2", Isa::kAvx2, cpu::RopeInterleavedAvx2},
      {"rope_interleaved_f32_ref", Isa::kRef, ref::RopeInterleaved}};
  return kImpls;
}

ImplList<RescaleRowFn> RescaleImpls() {
  static constexpr Impl<RescaleRowFn> kImpls[] = {{"rescale_f32_avx512", Isa::kAvx512, cpu::RescaleAvx512},
                                                  {"rescale_f32_ref", Isa::kRef, ref::Rescale}};
  return kImpls;
}

}  // namespace moesaic::kernels
