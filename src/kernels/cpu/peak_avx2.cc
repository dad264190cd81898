#include <immintrin.h>

#include "kernels/cpu/peak.h"

namespace moesaic::kernels::cpu {

// Twelve chains: latency 4 times two per cycle is 8.
int64_t PeakF32Avx2(int64_t rounds) {
  __m256 acc[12] = {};
  const __m256 x = _mm256_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& a : acc) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(a) : "x"(x));
  }
  return rounds * 12 * 8 * 2;
}

// The three instructions of an exact dot of 32 signed bytes; the sign is computed once for several rows.
int64_t PeakI8Avx2(int64_t rounds) {
  __m256i acc[8] = {};
  const __m256i x = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (auto& a : acc) {
      __m256i t;
      __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0"
                       : "+x"(a), "=&x"(t)
                       : "x"(x));
    }
  }
  return rounds * 8 * 32 * 2;
}

}  // namespace moesaic::kernels::cpu
