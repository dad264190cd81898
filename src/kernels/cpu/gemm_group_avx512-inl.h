// Group-scaled formats in registers of 16 outputs, for the kernels of AVX-512 VNNI and AMX.
#pragma once

#include "kernels/cpu/gemm_avx512-inl.h"
#include "kernels/cpu/gemm_group-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// Accumulators and dots take a register each per row and panel. With the codes of a pair that leaves 4 x 2
// (wide) and 2 x 6 (tall) of 32 registers. Each group starts a new chain of dots, so that later groups hide
// the latency of one chain.
struct Avx512 {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kOutputs = 16;
  static constexpr int kWidePanels = 4, kWideRows = 2;
  static constexpr int kTallPanels = 2, kTallRows = 6;

  static Ints Load(const std::byte* p) { return _mm512_load_si512(p); }
  static Ints Broadcast(const std::byte* p) { return _mm512_set1_epi32(*reinterpret_cast<const int*>(p)); }
  static Floats BroadcastFloat(const std::byte* p) {
    return _mm512_set1_ps(*reinterpret_cast<const float*>(p));
  }
  static Floats Same(float value) { return _mm512_set1_ps(value); }
  static Floats Zero() { return _mm512_setzero_ps(); }
  static Floats LoadFloats(const float* p) { return _mm512_loadu_ps(p); }
  static Ints LowNibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Ints HighNibbles(Ints v) { return LowNibbles(_mm512_srli_epi16(v, 4)); }
  static Ints LookUp(Ints codes) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2M1Codes));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  }
  static Floats HalfScales(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // Inserts bits [2 which, 2 which + 2) of `high` above the four bits of `low`.
  static Ints WithHighBits(Ints low, Ints high, int which) {
    const Ints moved = which == 0   ? _mm512_slli_epi16(high, 4)
                       : which == 1 ? _mm512_slli_epi16(high, 2)
                       : which == 2 ? high
                                    : _mm512_srli_epi16(high, 2);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
  }
  static Floats UnsignedBytes(const std::byte* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Floats SignedBytes(const std::byte* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Ints ZeroInts() { return _mm512_setzero_si512(); }
  static Floats NegativeMultiplyAdd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
  static Floats E4M3Scales(const std::byte* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
  }
  // In place: GCC 12 copies and spills accumulators around the intrinsic.
  template <typename Format>
  static void Dot(Ints& acc, Ints codes, Ints x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
  }
  static Floats ToFloats(Ints v) { return _mm512_cvtepi32_ps(v); }
  static Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static void Prefetch(const std::byte* p) { _mm_prefetch(p + kPrefetchBytes, _MM_HINT_T0); }
  static void Store(const GemmTile& t, int row, int panel, int /*part*/, Floats value) {
    StoreRow512(t, row, panel, value);
  }
};

}  // namespace
}  // namespace moesaic::kernels::cpu
