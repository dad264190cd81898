#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx512-inl.h"
#include "kernels/cpu/vnni-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// vpdpbusd has latency 5 and runs two per cycle, so 10 chains keep both units busy; 24 accumulators, as for
// f32.
struct I8 {
  static constexpr int kWidePanels = 4, kWideRows = 6;
  static constexpr int kTallPanels = 2, kTallRows = 12;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m512i acc[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_setzero_si512();
    }
    const int64_t groups = t.k_padded / 4;
    for (int64_t q = 0; q < groups; ++q) {
      __m512i weights[kPanels];
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const std::byte* group = w + p * t.panel_bytes + 64 * q;
        if constexpr (kPanels == kWidePanels) _mm_prefetch(group + kPrefetchBytes, _MM_HINT_T0);
        weights[p] = _mm512_load_si512(group);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const __m512i x = _mm512_set1_epi32(*reinterpret_cast<const int*>(a[m] + 4 * q));
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) Dot(acc[m][p], x, weights[p]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) StoreBiasedDots512(t, row + m, panel + p, acc[m][p]);
    }
  }
};

}  // namespace

void GemmI8Avx512Vnni(const GemmTile& tile) { RunBlocks<I8>(tile); }

}  // namespace moesaic::kernels::cpu
