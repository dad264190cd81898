#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx2-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// Uses the summation order of gemm_bf16-inl.h. 12 of 16 registers hold accumulators: an even and an odd chain
// for 6 rows of half a panel. With fewer rows, more halves are processed together, to have 8 chains in flight
// (latency 4, two per cycle). The rest are the two halves of a weight pair, the mask that extracts one of
// them, and an activation.
struct BF16Fma {
  static constexpr int kWidePanels = 2, kWideRows = 1;
  static constexpr int kTallPanels = 1, kTallRows = 6;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    constexpr int kHalves = 2 * kPanels;
    constexpr int kAtOnce = kRows <= 2 ? kHalves : 1;
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m256 total[kRows][kHalves];
    for (int m = 0; m < kRows; ++m) {
      for (int h = 0; h < kHalves; ++h) total[m][h] = _mm256_setzero_ps();
    }
    alignas(32) float x[kRows][kChunk];
    for (int64_t k = 0; k < t.k_padded; k += kChunk) {
      for (int m = 0; m < kRows; ++m) {
        Widen32(t.a + (row + m) * t.a_stride + 2 * k, x[m]);
      }
      for (int h = 0; h < kHalves; h += kAtOnce) {
        AddChunk<kRows, kHalves, kAtOnce>(x, w + 32 * k, t.panel_bytes, h, total);
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int h = 0; h < kHalves; ++h) StoreHalf256(t, row + m, panel + h / 2, h % 2, total[m][h]);
    }
  }

  // total += x w^T over one chunk, for halves [first, first + kAtOnce).
  template <int kRows, int kHalves, int kAtOnce>
  static void AddChunk(const float (&x)[kRows][kChunk], const std::byte* w, int64_t panel_bytes, int first,
                       __m256 (&total)[kRows][kHalves]) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    __m256 even[kRows][kAtOnce], odd[kRows][kAtOnce];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < kAtOnce; ++h) even[m][h] = odd[m][h] = _mm256_setzero_ps();
    }
    for (int q = 0; q < kChunk / 2; ++q) {
#pragma GCC unroll 16
      for (int h = 0; h < kAtOnce; ++h) {
        const std::byte* group = w + (first + h) / 2 * panel_bytes + 64 * q + 32 * ((first + h) % 2);
        const __m256i pair = _mm256_load_si256(reinterpret_cast<const __m256i*>(group));
        const __m256 low_weights = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        const __m256 high_weights = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          even[m][h] = _mm256_fmadd_ps(_mm256_broadcast_ss(&x[m][2 * q]), low_weights, even[m][h]);
          odd[m][h] = _mm256_fmadd_ps(_mm256_broadcast_ss(&x[m][2 * q + 1]), high_weights, odd[m][h]);
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < kAtOnce; ++h) {
        total[m][first + h] = _mm256_add_ps(total[m][first + h], _mm256_add_ps(even[m][h], odd[m][h]));
      }
    }
  }
};

}  // namespace

void GemmBF16Avx2(const GemmTile& tile) {
  const FlushDenormals flush;
  RunBlocks<BF16Fma>(tile);
}

}  // namespace moesaic::kernels::cpu
