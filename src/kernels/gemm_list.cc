#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_fp8.h"
#include "kernels/cpu/gemm_group.h"
#include "kernels/impl_list.h"
#include "kernels/ref/gemm.h"

namespace moesaic::kernels {

using runtime::Isa;
using Gemm = KernelTable::Gemm;

// Tile kernels name a vector kernel with the same bits and the row count below which it runs instead. The
// crossover was measured on Sapphire Rapids; `moesaic tune` measures it again (tuner.h).
//   bf16      vdpbf16ps is used where it is fast (CpuFeatures::fast_bf16_dots). On an Emerald Rapids with AMX
//             hidden, f32 multiply-adds are 1.3 to 1.6 times as fast from 16 rows on; with 4 and 8 rows from
//             memory they reach 0.9 and 0.8 of its speed.
//             Tiles run even single rows: in vector code a bf16 weight costs two multiply-adds and two
//             shifts, more than its share of a tile product.
//   int8      A product of 16 x 16 outputs and 64 inputs takes 16 cycles and two tile loads; vpdpbusd takes
//             8 cycles per row for the same. With weights in the L2 cache, tiles are faster from 3 rows on.
//             With weights in memory, vector loads reach 0.92 of the bandwidth and tile loads 0.8, up to the
//             8 rows for which vpdpbusd keeps up; few rows mostly come with weights in memory.
//   fp8       Vector code needs no copy of the codes: 1.4 times as fast with one or two rows.
//   groups    Tiles are faster from two whole row tiles on, with weights in the L2 cache. With 16 rows
//             vpdpbusd, which needs no unpacked copy of the codes, is 2 to 10% faster.
ImplList<Gemm> GemmImpls(tensor::PackedFormat format) {
  static constexpr Impl<Gemm> kF32[] = {
      {"gemm_f32_f32_avx512", Isa::kAvx512, {cpu::GemmF32Avx512, ref::PrepareF32, 256}},
      {"gemm_f32_f32_avx2", Isa::kAvx2, {cpu::GemmF32Avx2, ref::PrepareF32, 256}},
      {"gemm_f32_f32_ref", Isa::kRef, {ref::GemmF32, ref::PrepareF32, 256}},
  };
  static constexpr Impl<Gemm> kBF16[] = {
      {"gemm_bf16_bf16_amx",
       Isa::kAmx,
       {cpu::GemmBF16Amx, cpu::PrepareBF16Avx512, 128, cpu::GemmBF16Avx512, 0}},
      {"gemm_bf16_bf16_avx512bf16", Isa::kAvx512Bf16, {cpu::GemmBF16Avx512BF16, cpu::PrepareBF16Avx512, 128}},
      {"gemm_bf16_bf16_avx512", Isa::kAvx512, {cpu::GemmBF16Avx512, cpu::PrepareBF16Avx512, 128}},
      {"gemm_bf16_bf16_avx2", Isa::kAvx2, {cpu::GemmBF16Avx2, cpu::PrepareBF16Avx2, 128}},
      {"gemm_bf16_bf16_ref", Isa::kRef, {ref::GemmBF16, ref::PrepareBF16, 128}},
  };
  static constexpr Impl<Gemm> kI8[] = {
      {"gemm_i8_i8_amx", Isa::kAmx, {cpu::GemmI8Amx, cpu::PrepareU8Avx512, 64, cpu::GemmI8Avx512Vnni, 8}},
      {"gemm_i8_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmI8Avx512Vnni, cpu::PrepareU8Avx512, 64}},
      {"gemm_i8_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmI8AvxVnni, cpu::PrepareU8Avx2, 64}},
      {"gemm_i8_i8_avx2", Isa::kAvx2, {cpu::GemmI8Avx2, cpu::PrepareS8Avx2, 64}},
      {"gemm_i8_i8_ref", Isa::kRef, {ref::GemmI8, ref::PrepareS8, 64}},
  };
  static constexpr Impl<Gemm> kF8G128[] = {
      {"gemm_f8g128_bf16_amx",
       Isa::kAmx,
       {cpu::GemmF8G128Amx, cpu::PrepareBF16Avx512, 128, cpu::GemmF8G128Avx512, 3}},
      {"gemm_f8g128_bf16_avx512bf16",
       Isa::kAvx512Bf16,
       {cpu::GemmF8G128Avx512BF16, cpu::PrepareBF16Avx512, 128}},
      {"gemm_f8g128_bf16_avx512", Isa::kAvx512, {cpu::GemmF8G128Avx512, cpu::PrepareBF16Avx512, 128}},
      {"gemm_f8g128_bf16_avx2", Isa::kAvx2, {cpu::GemmF8G128Avx2, cpu::PrepareBF16Avx2, 128}},
      {"gemm_f8g128_bf16_ref", Isa::kRef, {ref::GemmF8G128, ref::PrepareBF16, 128}},
  };
  static constexpr Impl<Gemm> kI8G32[] = {
      {"gemm_i8g32_i8_amx",
       Isa::kAmx,
       {cpu::GemmI8G32Amx, cpu::PrepareI8G32Avx512, 80, cpu::GemmI8G32Avx512Vnni, 32}},
      {"gemm_i8g32_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmI8G32Avx512Vnni, cpu::PrepareI8G32Avx512, 80}},
      {"gemm_i8g32_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmI8G32AvxVnni, cpu::PrepareI8G32Avx2, 80}},
      {"gemm_i8g32_i8_avx2", Isa::kAvx2, {cpu::GemmI8G32Avx2, cpu::PrepareI8G32Avx2, 80}},
      {"gemm_i8g32_i8_ref", Isa::kRef, {ref::GemmI8G32, ref::PrepareI8G32, 80}},
  };
  static constexpr Impl<Gemm> kI4G32[] = {
      {"gemm_i4g32_i8_amx",
       Isa::kAmx,
       {cpu::GemmI4G32Amx, cpu::PrepareI4G32Avx512, 80, cpu::GemmI4G32Avx512Vnni, 32}},
      {"gemm_i4g32_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmI4G32Avx512Vnni, cpu::PrepareI4G32Avx512, 80}},
      {"gemm_i4g32_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmI4G32AvxVnni, cpu::PrepareI4G32Avx2, 80}},
      {"gemm_i4g32_i8_avx2", Isa::kAvx2, {cpu::GemmI4G32Avx2, cpu::PrepareI4G32Avx2, 80}},
      {"gemm_i4g32_i8_ref", Isa::kRef, {ref::GemmI4G32, ref::PrepareI4G32, 80}},
  };
  static constexpr Impl<Gemm> kMxfp4[] = {
      {"gemm_mxfp4_i8_amx",
       Isa::kAmx,
       {cpu::GemmMxfp4Amx, cpu::PrepareMxfp4Avx512, 80, cpu::GemmMxfp4Avx512Vnni, 32}},
      {"gemm_mxfp4_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmMxfp4Avx512Vnni, cpu::PrepareMxfp4Avx512, 80}},
      {"gemm_mxfp4_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmMxfp4AvxVnni, cpu::PrepareMxfp4Avx2, 80}},
      {"gemm_mxfp4_i8_avx2", Isa::kAvx2, {cpu::GemmMxfp4Avx2, cpu::PrepareMxfp4Avx2, 80}},
      {"gemm_mxfp4_i8_ref", Isa::kRef, {ref::GemmMxfp4, ref::PrepareMxfp4, 80}},
  };
  static constexpr Impl<Gemm> kNvfp4[] = {
      {"gemm_nvfp4_i8_amx",
       Isa::kAmx,
       {cpu::GemmNvfp4Amx, cpu::PrepareNvfp4Avx512, 88, cpu::GemmNvfp4Avx512Vnni, 32}},
      {"gemm_nvfp4_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmNvfp4Avx512Vnni, cpu::PrepareNvfp4Avx512, 88}},
      {"gemm_nvfp4_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmNvfp4AvxVnni, cpu::PrepareNvfp4Avx2, 88}},
      {"gemm_nvfp4_i8_avx2", Isa::kAvx2, {cpu::GemmNvfp4Avx2, cpu::PrepareNvfp4Avx2, 88}},
      {"gemm_nvfp4_i8_ref", Isa::kRef, {ref::GemmNvfp4, ref::PrepareNvfp4, 88}},
  };
  static constexpr Impl<Gemm> kQ4K[] = {
      {"gemm_q4k_i8_amx",
       Isa::kAmx,
       {cpu::GemmQ4KAmx, cpu::PrepareQ4KAvx512, 80, cpu::GemmQ4KAvx512Vnni, 32}},
      {"gemm_q4k_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmQ4KAvx512Vnni, cpu::PrepareQ4KAvx512, 80}},
      {"gemm_q4k_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmQ4KAvxVnni, cpu::PrepareQ4KAvx2, 80}},
      {"gemm_q4k_i8_avx2", Isa::kAvx2, {cpu::GemmQ4KAvx2, cpu::PrepareQ4KAvx2, 80}},
      {"gemm_q4k_i8_ref", Isa::kRef, {ref::GemmQ4K, ref::PrepareQ4K, 80}},
  };
  static constexpr Impl<Gemm> kQ6K[] = {
      {"gemm_q6k_i8_amx",
       Isa::kAmx,
       {cpu::GemmQ6KAmx, cpu::PrepareQ6KAvx512, 88, cpu::GemmQ6KAvx512Vnni, 32}},
      {"gemm_q6k_i8_avx512vnni", Isa::kAvx512Vnni, {cpu::GemmQ6KAvx512Vnni, cpu::PrepareQ6KAvx512, 88}},
      {"gemm_q6k_i8_avxvnni", Isa::kAvxVnni, {cpu::GemmQ6KAvxVnni, cpu::PrepareQ6KAvx2, 88}},
      {"gemm_q6k_i8_avx2", Isa::kAvx2, {cpu::GemmQ6KAvx2, cpu::PrepareQ6KAvx2, 88}},
      {"gemm_q6k_i8_ref", Isa::kRef, {ref::GemmQ6K, ref::PrepareQ6K, 88}},
  };
  switch (format) {
    case tensor::PackedFormat::kF32:
      return kF32;
    case tensor::PackedFormat::kBF16:
      return kBF16;
    case tensor::PackedFormat::kI8:
      return kI8;
    case tensor::PackedFormat::kF8G128:
      return kF8G128;
    case tensor::PackedFormat::kI8G32:
      return kI8G32;
    case tensor::PackedFormat::kI4G32:
      return kI4G32;
    case tensor::PackedFormat::kMxfp4:
      return kMxfp4;
    case tensor::PackedFormat::kNvfp4:
      return kNvfp4;
    case tensor::PackedFormat::kQ4K:
      return kQ4K;
    case tensor::PackedFormat::kQ6K:
      return kQ6K;
  }
  return kF32;
}

}  // namespace moesaic::kernels
