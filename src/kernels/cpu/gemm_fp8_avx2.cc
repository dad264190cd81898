#include "kernels/cpu/fp8_codes-inl.h"
#include "kernels/cpu/gemm_avx2-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"
#include "kernels/cpu/gemm_fp8.h"

namespace moesaic::kernels::cpu {
namespace {

inline __m256i Table256(const uint8_t (&table)[16]) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// Four inputs of 8 outputs: two times [8 outputs][2] bf16.
struct Pairs {
  __m256i first, second;
};

inline Pairs Decode(const std::byte* half_line) {
  const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(half_line));
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i lower = _mm256_and_si256(codes, nibble);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
  const __m256i exponent = _mm256_and_si256(codes, _mm256_set1_epi8(kFp8Exponent));
  const __m256i small = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
  const __m256i flip = _mm256_and_si256(small, _mm256_shuffle_epi8(Table256(kFp8SmallFlip), lower));
  const __m256i high = _mm256_xor_si256(_mm256_shuffle_epi8(Table256(kFp8High), upper), flip);
  const __m256i low = _mm256_blendv_epi8(_mm256_slli_epi16(lower, 4),
                                         _mm256_shuffle_epi8(Table256(kFp8SmallLow), lower), small);
  return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}

// Uses the summation order of gemm_fp8.h. 16 registers hold an even and an odd chain for 3 rows of half a
// panel, the three tables, and temporaries of decoding.
struct Fp8Fma {
  static constexpr int kWidePanels = 1, kWideRows = 1;
  static constexpr int kTallPanels = 1, kTallRows = 3;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    static_assert(kPanels == 1);
    __m256 acc[kRows][2];
    for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int u = 0; u < t.k_padded / kFp8Inputs; ++u) {
      const std::byte* unit = t.w + panel * t.panel_bytes + int64_t{u} * kFp8UnitBytes;
      __m256 total[kRows][2];
      for (int m = 0; m < kRows; ++m) total[m][0] = total[m][1] = _mm256_setzero_ps();
      alignas(32) float x[kRows][kChunk];
      for (int k = 0; k < kFp8Inputs; k += kChunk) {
        for (int m = 0; m < kRows; ++m) {
          Widen32(t.a + (row + m) * t.a_stride + int64_t{2} * (u * kFp8Inputs + k), x[m]);
        }
        const std::byte* lines = unit + kFp8ScaleBytes + 64 * (k / kFp8LineInputs);
        for (int half = 0; half < 2; ++half) AddChunk<kRows>(x, lines + 32 * half, half, total);
      }
      for (int half = 0; half < 2; ++half) {
        const __m256 scales = _mm256_load_ps(reinterpret_cast<const float*>(unit) + 8 * half);
        for (int m = 0; m < kRows; ++m) acc[m][half] = _mm256_fmadd_ps(total[m][half], scales, acc[m][half]);
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int half = 0; half < 2; ++half) StoreHalf256(t, row + m, panel, half, acc[m][half]);
    }
  }

  template <int kRows>
  static void AddChunk(const float (&x)[kRows][kChunk], const std::byte* half_lines, int half,
                       __m256 (&total)[kRows][2]) {
    __m256 even[kRows], odd[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) even[m] = odd[m] = _mm256_setzero_ps();
    for (int line = 0; line < kChunk / kFp8LineInputs; ++line) {
      const Pairs pairs = Decode(half_lines + 64 * line);
      AddPair<kRows>(x, 4 * line, pairs.first, even, odd);
      AddPair<kRows>(x, 4 * line + 2, pairs.second, even, odd);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      total[m][half] = _mm256_add_ps(total[m][half], _mm256_add_ps(even[m], odd[m]));
    }
  }

  template <int kRows>
  static void AddPair(const float (&x)[kRows][kChunk], int at, __m256i pair, __m256 (&even)[kRows],
                      __m256 (&odd)[kRows]) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    const __m256 low_weights = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
    const __m256 high_weights = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      even[m] = _mm256_fmadd_ps(_mm256_broadcast_ss(&x[m][at]), low_weights, even[m]);
      odd[m] = _mm256_fmadd_ps(_mm256_broadcast_ss(&x[m][at + 1]), high_weights, odd[m]);
    }
  }
};

}  // namespace

void GemmF8G128Avx2(const GemmTile& tile) {
  const FlushDenormals flush;
  RunBlocks<Fp8Fma>(tile);
}

}  // namespace moesaic::kernels::cpu
