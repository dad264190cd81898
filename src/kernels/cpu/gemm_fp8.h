// The GEMM micro-kernels of FP8 weights with a scale for 128 inputs (tensor/fp8_format.h). They take bf16
// activations as GemmBF16* do, and multiply them with the bf16 that every code exactly is.
//
// Sums of 128 inputs go in the order of gemm_bf16-inl.h, from zero; then, for the units of an output in order
// and from acc = 0,
//
//   acc = fma(sum, scale, acc)
//
// bit for bit the same on AVX2, AVX-512 and AMX. GemmF8G128Avx512BF16 sums in vdpbf16ps's order.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void GemmF8G128Avx2(const GemmTile& tile);
void GemmF8G128Avx512(const GemmTile& tile);
void GemmF8G128Avx512BF16(const GemmTile& tile);
void GemmF8G128Amx(const GemmTile& tile);

}  // namespace moesaic::kernels::cpu
