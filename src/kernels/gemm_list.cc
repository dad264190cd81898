#include "kernels/cpu/gemm.h"
#include "kernels/impl_list.h"
#include "kernels/ref/gemm.h"

namespace moesaic::kernels {

using runtime::Isa;
using Gemm = KernelTable::Gemm;

ImplList<Gemm> GemmImpls(tensor::PackedFormat format) {
  static constexpr Impl<Gemm> kF32[] = {
      {"gemm_f32_f32_avx512", Isa::kAvx512, {cpu::GemmF32Avx512, ref::PrepareF32, 4}},
      {"gemm_f32_f32_avx2", Isa::kAvx2, {cpu::GemmF32Avx2, ref::PrepareF32, 4}},
      {"gemm_f32_f32_ref", Isa::kRef, {ref::GemmF32, ref::PrepareF32, 4}},
  };
  static constexpr Impl<Gemm> kBF16[] = {
      {"gemm_bf16_bf16_amx", Isa::kAmx, {cpu::GemmBF16Amx, cpu::PrepareBF16Avx512, 2}},
      {"gemm_bf16_bf16_avx512bf16", Isa::kAvx512Bf16, {cpu::GemmBF16Avx512BF16, cpu::PrepareBF16Avx512, 2}},
      {"gemm_bf16_bf16_avx512", Isa::kAvx512, {cpu::GemmBF16Avx512, cpu::PrepareBF16Avx512, 2}},
      {"gemm_bf16_bf16_avx2", Isa::kAvx2, {cpu::GemmBF16Avx2, cpu::PrepareBF16Avx2, 2}},
      {"gemm_bf16_bf16_ref", Isa::kRef, {ref::GemmBF16, ref::PrepareBF16, 2}},
  };
  static constexpr Impl<Gemm> kI8[] = {
      {"gemm_i8_i8_amx", Isa::kAmx, {cpu::GemmI8Amx, cpu::PrepareU8Avx512, 1}},
      {"gemm_i8_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmI8Avx512Vnni, cpu::PrepareU8Avx512, 1}},
      {"gemm_i8_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmI8AvxVnni, cpu::PrepareU8Avx2, 1}},
      {"gemm_i8_i8_avx2", Isa::kAvx2, {cpu::GemmI8Avx2, cpu::PrepareS8Avx2, 1}},
      {"gemm_i8_i8_ref", Isa::kRef, {ref::GemmI8, ref::PrepareS8, 1}},
  };
  switch (format) {
    case tensor::PackedFormat::kF32:
      return kF32;
    case tensor::PackedFormat::kBF16:
      return kBF16;
    case tensor::PackedFormat::kI8:
      return kI8;
  }
  return kF32;
}

}  // namespace moesaic::kernels
