#include "kernels/cpu/attention.h"
#include "kernels/impl_list.h"
#include "kernels/ref/attention.h"

namespace moesaic::kernels {

ImplList<AttentionTileFn> AttentionImpls(tensor::DType kv_dtype) {
  static constexpr Impl<AttentionTileFn> kImpls[] = {
      {"attention_bf16_bf16x2_amx", runtime::Isa::kAmx, cpu::AttentionAmx},
      {"attention_f32_avx512", runtime::Isa::kAvx512, cpu::AttentionAvx512},
      {"attention_f32_avx2", runtime::Isa::kAvx2, cpu::AttentionAvx2},
      {"attention_f32_ref", runtime::Isa::kRef, ref::Attention},
  };
  // The AMX kernel multiplies in bf16 and delegates f32 keys and values to the next.
  const ImplList<AttentionTileFn> impls = kImpls;
  return kv_dtype == tensor::DType::kF32 ? impls.subspan(1) : impls;
}

}  // namespace moesaic::kernels
