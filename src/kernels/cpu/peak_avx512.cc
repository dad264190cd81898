#include <immintrin.h>

#include "kernels/cpu/peak.h"

namespace moesaic::kernels::cpu {

int64_t PeakF32Avx512(int64_t rounds) {
  __m512 acc[12] = {};
  const __m512 x = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& a : acc) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(a) : "v"(x));
  }
  return rounds * 12 * 16 * 2;
}

}  // namespace moesaic::kernels::cpu
