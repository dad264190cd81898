#include <immintrin.h>

#include "kernels/cpu/peak.h"

namespace moesaic::kernels::cpu {

// Twelve chains: latency 5 times two per cycle is 10.
int64_t PeakI8AvxVnni(int64_t rounds) {
  __m256i acc[12] = {};
  const __m256i x = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& a : acc) __asm__ volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(a) : "x"(x));
  }
  return rounds * 12 * 32 * 2;
}

}  // namespace moesaic::kernels::cpu
