#include <immintrin.h>

#include "kernels/cpu/peak.h"

namespace moesaic::kernels::cpu {

int64_t PeakI8Avx512Vnni(int64_t rounds) {
  __m512i acc[12] = {};
  const __m512i x = _mm512_setzero_si512();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& a : acc) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(a) : "v"(x));
  }
  return rounds * 12 * 64 * 2;
}

}  // namespace moesaic::kernels::cpu
