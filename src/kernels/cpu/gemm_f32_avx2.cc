#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx2-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// 12 of 16 registers hold accumulators: 6 rows of one panel (two registers each), or 3 rows of two.
struct F32 {
  static constexpr int kWidePanels = 2, kWideRows = 3;
  static constexpr int kTallPanels = 1, kTallRows = 6;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m256 acc[kRows][2 * kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) acc[m][h] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < t.k_padded; ++k) {
      auto group = [&](int h) { return w + h / 2 * t.panel_bytes + 64 * k + 32 * (h % 2); };
      // The wide shape keeps its activations in registers and loads weights one by one; the tall shape does
      // the reverse.
      if constexpr (kPanels > 1) {
        __m256 x[kRows];
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m)
          x[m] = _mm256_broadcast_ss(reinterpret_cast<const float*>(a[m] + 4 * k));
#pragma GCC unroll 16
        for (int h = 0; h < 2 * kPanels; ++h) {
          const __m256 weights = _mm256_load_ps(reinterpret_cast<const float*>(group(h)));
#pragma GCC unroll 16
          for (int m = 0; m < kRows; ++m) acc[m][h] = _mm256_fmadd_ps(x[m], weights, acc[m][h]);
        }
      } else {
        const __m256 weights[2] = {_mm256_load_ps(reinterpret_cast<const float*>(group(0))),
                                   _mm256_load_ps(reinterpret_cast<const float*>(group(1)))};
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const __m256 x = _mm256_broadcast_ss(reinterpret_cast<const float*>(a[m] + 4 * k));
#pragma GCC unroll 16
          for (int h = 0; h < 2; ++h) acc[m][h] = _mm256_fmadd_ps(x, weights[h], acc[m][h]);
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) StoreHalf256(t, row + m, panel + h / 2, h % 2, acc[m][h]);
    }
  }
};

}  // namespace

void GemmF32Avx2(const GemmTile& tile) { RunBlocks<F32>(tile); }

}  // namespace moesaic::kernels::cpu
