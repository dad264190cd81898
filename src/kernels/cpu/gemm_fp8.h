// GEMM micro-kernels of FP8 weights with one scale per 128 inputs (tensor/fp8_format.h). They take the bf16
// activations of GemmBF16* and widen codes to bf16, which is exact.
//
// Sums of 128 inputs are computed in the order of gemm_bf16-inl.h, from zero. Then, for the units of an
// output in order and from acc = 0,
//
//   acc = fma(sum, scale, acc)
//
// The results are bit-identical on AVX2, AVX-512 and AMX. GemmF8G128Avx512BF16 sums in vdpbf16ps's order.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void GemmF8G128Avx2(const GemmTile& tile);
void GemmF8G128Avx512(const GemmTile& tile);
void GemmF8G128Avx512BF16(const GemmTile& tile);
void GemmF8G128Amx(const GemmTile& tile);

}  // namespace moesaic::kernels::cpu
