#include "kernels/cpu/fp8_avx512-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"
#include "kernels/cpu/gemm_fp8.h"

namespace moesaic::kernels::cpu {
namespace {

// Two chains per output, like GemmBF16Avx512; sums of a unit and of all units stay in the L1 cache.
struct Fp8Fma {
  static constexpr int kWidePanels = 4, kWideRows = 2;
  static constexpr int kTallPanels = 2, kTallRows = 6;
  static constexpr int kChunkLines = kChunk / kFp8LineInputs;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    __m512 acc[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_setzero_ps();
    }
    for (int u = 0; u < t.k_padded / kFp8Inputs; ++u) AddUnit<kRows, kPanels>(t, row, panel, u, acc);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) StoreRow512(t, row + m, panel + p, acc[m][p]);
    }
  }

  template <int kRows, int kPanels>
  static void AddUnit(const GemmTile& t, int row, int panel, int unit, __m512 (&acc)[kRows][kPanels]) {
    const std::byte* w = Fp8Unit(t, panel, unit).at;
    __m512 total[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) total[m][p] = _mm512_setzero_ps();
    }
    alignas(64) float x[kRows][kChunk];
    for (int k = 0; k < kFp8Inputs; k += kChunk) {
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        Widen32(t.a + (row + m) * t.a_stride + int64_t{2} * (unit * kFp8Inputs + k), x[m]);
      }
      __m512 even[kRows][kPanels], odd[kRows][kPanels];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) even[m][p] = odd[m][p] = _mm512_setzero_ps();
      }
      const std::byte* lines = w + kFp8ScaleBytes + 64 * (k / kFp8LineInputs);
      if constexpr (kPanels == kWidePanels) {
        for (int line = 0; line < kChunkLines; ++line) {
#pragma GCC unroll 16
          for (int p = 0; p < kPanels; ++p) {
            const std::byte* codes = lines + p * t.panel_bytes + 64 * line;
            const Fp8Pairs pairs = DecodeFp8(codes);
            _mm_prefetch(codes + kPrefetchBytes, _MM_HINT_T0);
            AddPair<kRows, kPanels>(x, 4 * line, pairs.first, p, even, odd);
            AddPair<kRows, kPanels>(x, 4 * line + 2, pairs.second, p, even, odd);
          }
        }
      } else {  // many rows: 24 accumulators leave no registers for decoding in between
        __m512i pairs[kPanels][2 * kChunkLines];
        for (int p = 0; p < kPanels; ++p) {
          for (int line = 0; line < kChunkLines; ++line) {
            const Fp8Pairs both = DecodeFp8(lines + p * t.panel_bytes + 64 * line);
            pairs[p][2 * line] = both.first;
            pairs[p][2 * line + 1] = both.second;
          }
        }
        for (int q = 0; q < 2 * kChunkLines; ++q) {
#pragma GCC unroll 16
          for (int p = 0; p < kPanels; ++p) AddPair<kRows, kPanels>(x, 2 * q, pairs[p][q], p, even, odd);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
          total[m][p] = _mm512_add_ps(total[m][p], _mm512_add_ps(even[m][p], odd[m][p]));
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      const __m512 scales = Fp8Unit(t, panel + p, unit).Scales();
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) acc[m][p] = _mm512_fmadd_ps(total[m][p], scales, acc[m][p]);
    }
  }

  // Processes inputs [at, at + 2) of a chunk.
  template <int kRows, int kPanels>
  static void AddPair(const float (&x)[kRows][kChunk], int at, __m512i pair, int p,
                      __m512 (&even)[kRows][kPanels], __m512 (&odd)[kRows][kPanels]) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    const __m512 low_weights = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 high_weights = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      even[m][p] = _mm512_fmadd_ps(_mm512_set1_ps(x[m][at]), low_weights, even[m][p]);
      odd[m][p] = _mm512_fmadd_ps(_mm512_set1_ps(x[m][at + 1]), high_weights, odd[m][p]);
    }
  }
};

}  // namespace

void GemmF8G128Avx512(const GemmTile& tile) {
  const FlushDenormals flush;
  RunBlocks<Fp8Fma>(tile);
}

}  // namespace moesaic::kernels::cpu
