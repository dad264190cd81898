// vpdpbusd on 512 bits, for kernels of AVX-512 VNNI.
#pragma once

#include <immintrin.h>

namespace moesaic::kernels::cpu {
namespace {

/// acc += dot of u8 and s8, in place: GCC 12 copies and spills accumulators around the intrinsic.
inline void Dot(__m512i& acc, __m512i u8, __m512i s8) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
}
/// Broadcasts four bytes to all lanes.
inline __m512i Four(const void* bytes) {
  int four;
  __builtin_memcpy(&four, bytes, sizeof(four));
  return _mm512_set1_epi32(four);
}
/// Broadcasts eight bytes to all pairs of lanes.
inline __m512i Eight(const void* bytes) {
  int64_t eight;
  __builtin_memcpy(&eight, bytes, sizeof(eight));
  return _mm512_set1_epi64(eight);
}
/// Computes Dot with four bytes broadcast to all lanes.
inline void DotFour(__m512i& acc, __m512i u8, const void* s8) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u8), "m"(*static_cast<const int*>(s8)));
}

}  // namespace
}  // namespace moesaic::kernels::cpu
