// Decodes a line of FP8 codes to bf16 in AVX-512 registers.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/fp8_codes-inl.h"
#include "kernels/cpu/gemm_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

/// Four inputs of 16 outputs: two times [16 outputs][2] bf16.
struct Fp8Pairs {
  __m512i first, second;
};

inline __m512i Table512(const uint8_t (&table)[16]) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

inline Fp8Pairs DecodeFp8(const std::byte* line) {
  const __m512i codes = _mm512_load_si512(line), nibble = _mm512_set1_epi8(15);
  const __m512i lower = _mm512_and_si512(codes, nibble);
  const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
  const __mmask64 small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(kFp8Exponent));
  const __m512i flip = _mm512_maskz_shuffle_epi8(small, Table512(kFp8SmallFlip), lower);
  const __m512i high = _mm512_xor_si512(_mm512_shuffle_epi8(Table512(kFp8High), upper), flip);
  const __m512i low =
      _mm512_mask_shuffle_epi8(_mm512_slli_epi16(lower, 4), small, Table512(kFp8SmallLow), lower);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

/// A panel's unit: its scales and its lines.
struct Fp8Unit {
  const std::byte* at;

  Fp8Unit(const GemmTile& t, int panel, int unit)
      : at(t.w + panel * t.panel_bytes + int64_t{unit} * kFp8UnitBytes) {}
  __m512 Scales() const { return _mm512_load_ps(at); }
  const std::byte* Line(int line) const { return at + kFp8ScaleBytes + 64 * line; }
};

}  // namespace
}  // namespace moesaic::kernels::cpu
