#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx512-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// Uses the summation order of gemm_bf16-inl.h. Two chains per output: 6 rows x 2 panels or 3 x 4 make 24
// accumulators. The running totals stay in the L1 cache and are accessed once per 32 multiply-adds.
struct BF16Fma {
  static constexpr int kWidePanels = 4, kWideRows = 3;
  static constexpr int kTallPanels = 2, kTallRows = 6;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const std::byte* w = t.w + panel * t.panel_bytes;
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    __m512 total[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) total[m][p] = _mm512_setzero_ps();
    }
    alignas(64) float x[kRows][kChunk];
    for (int64_t k = 0; k < t.k_padded; k += kChunk) {
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        Widen32(t.a + (row + m) * t.a_stride + 2 * k, x[m]);
      }
      __m512 even[kRows][kPanels], odd[kRows][kPanels];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) even[m][p] = odd[m][p] = _mm512_setzero_ps();
      }
      for (int q = 0; q < kChunk / 2; ++q) {
        __m512 low_weights[kPanels], high_weights[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
          const __m512i pair = _mm512_load_si512(w + p * t.panel_bytes + 32 * k + 64 * q);
          low_weights[p] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
          high_weights[p] = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const __m512 x0 = _mm512_set1_ps(x[m][2 * q]);
          const __m512 x1 = _mm512_set1_ps(x[m][2 * q + 1]);
#pragma GCC unroll 16
          for (int p = 0; p < kPanels; ++p) {
            even[m][p] = _mm512_fmadd_ps(x0, low_weights[p], even[m][p]);
            odd[m][p] = _mm512_fmadd_ps(x1, high_weights[p], odd[m][p]);
          }
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
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) StoreRow512(t, row + m, panel + p, total[m][p]);
    }
  }
};

}  // namespace

void GemmBF16Avx512(const GemmTile& tile) {
  const FlushDenormals flush;
  RunBlocks<BF16Fma>(tile);
}

}  // namespace moesaic::kernels::cpu
