// Loops of dot-product instructions on registers only: the upper bound of a GEMM's speed.
#pragma once

#include <cstdint>

namespace moesaic::kernels::cpu {

// Each runs `rounds` rounds and returns the number of operations; a multiplication and an addition count as
// two.
int64_t PeakF32Avx2(int64_t rounds);
int64_t PeakI8Avx2(int64_t rounds);
int64_t PeakI8AvxVnni(int64_t rounds);
int64_t PeakF32Avx512(int64_t rounds);
int64_t PeakI8Avx512Vnni(int64_t rounds);
int64_t PeakBF16Avx512BF16(int64_t rounds);
int64_t PeakI8Amx(int64_t rounds);
int64_t PeakBF16Amx(int64_t rounds);

}  // namespace moesaic::kernels::cpu
