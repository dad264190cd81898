// Shared by the AVX2 and AVX-VNNI kernels of group-scaled formats: everything except the dot product.
#pragma once

#include "kernels/cpu/gemm_avx2-inl.h"
#include "kernels/cpu/gemm_group-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// 16 registers: two per panel, so that accumulators, dots and codes of 1 x 2 rows take 12.
struct Avx2Base {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kOutputs = 8;
  static constexpr int kWidePanels = 1, kWideRows = 1;
  static constexpr int kTallPanels = 1, kTallRows = 2;

  static Ints Load(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static Ints Broadcast(const std::byte* p) { return _mm256_set1_epi32(*reinterpret_cast<const int*>(p)); }
  static Floats BroadcastFloat(const std::byte* p) {
    return _mm256_set1_ps(*reinterpret_cast<const float*>(p));
  }
  static Floats Same(float value) { return _mm256_set1_ps(value); }
  static Floats Zero() { return _mm256_setzero_ps(); }
  static Floats LoadFloats(const float* p) { return _mm256_loadu_ps(p); }
  static Ints LowNibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Ints HighNibbles(Ints v) { return LowNibbles(_mm256_srli_epi16(v, 4)); }
  static Ints LookUp(Ints codes) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2M1Codes));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
  }
  static Floats HalfScales(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Inserts bits [2 which, 2 which + 2) of `high` above the four bits of `low`.
  static Ints WithHighBits(Ints low, Ints high, int which) {
    const Ints moved = which == 0   ? _mm256_slli_epi16(high, 4)
                       : which == 1 ? _mm256_slli_epi16(high, 2)
                       : which == 2 ? high
                                    : _mm256_srli_epi16(high, 2);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }
  static Floats UnsignedBytes(const std::byte* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Floats SignedBytes(const std::byte* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Ints ZeroInts() { return _mm256_setzero_si256(); }
  static Floats NegativeMultiplyAdd(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
  static Floats E4M3Scales(const std::byte* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 7));
  }
  static Floats ToFloats(Ints v) { return _mm256_cvtepi32_ps(v); }
  static Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static void Prefetch(const std::byte* p) { _mm_prefetch(p + kPrefetchBytes, _MM_HINT_T0); }
  static void Store(const GemmTile& t, int row, int panel, int part, Floats value) {
    StoreHalf256(t, row, panel, part, value);
  }
};

}  // namespace
}  // namespace moesaic::kernels::cpu
