#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// FMA has latency 4 and runs two per cycle, so 8 chains keep both units busy. 24 of 32 registers hold
// accumulators (2 x 12 or 4 x 6), the rest weights and one broadcast activation.
struct F32 {
  static constexpr int kWidePanels = 4, kWideRows = 6;
  static constexpr int kTallPanels = 2, kTallRows = 12;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m512 acc[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < t.k_padded; ++k) {
      __m512 weights[kPanels];
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const std::byte* group = w + p * t.panel_bytes + 64 * k;
        if constexpr (kPanels == kWidePanels) _mm_prefetch(group + kPrefetchBytes, _MM_HINT_T0);
        weights[p] = _mm512_load_ps(group);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const __m512 x = _mm512_set1_ps(*reinterpret_cast<const float*>(a[m] + 4 * k));
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_fmadd_ps(x, weights[p], acc[m][p]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) StoreRow512(t, row + m, panel + p, acc[m][p]);
    }
  }
};

}  // namespace

void GemmF32Avx512(const GemmTile& tile) { RunBlocks<F32>(tile); }

}  // namespace moesaic::kernels::cpu
