#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// vdpbf16ps: latency 6, one or two a cycle (Sapphire Rapids, Zen 5), so 12 chains are enough; 24
// accumulators.
struct BF16Dot {
  static constexpr int kWidePanels = 4, kWideRows = 6;
  static constexpr int kTallPanels = 2, kTallRows = 12;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m512 acc[kRows][kPanels];
    for (int m = 0; m < kRows; ++m) {
      for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_setzero_ps();
    }
    const int64_t groups = t.k_padded / 2;
#pragma GCC unroll 2
    for (int64_t q = 0; q < groups; ++q) {
      __m512bh weights[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        weights[p] = (__m512bh)_mm512_load_si512(w + p * t.panel_bytes + 64 * q);
      }
      for (int m = 0; m < kRows; ++m) {
        const auto x = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int*>(a[m] + 4 * q));
        for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_dpbf16_ps(acc[m][p], x, weights[p]);
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int p = 0; p < kPanels; ++p) StoreRow512(t, row + m, panel + p, acc[m][p]);
    }
  }
};

}  // namespace

void GemmBF16Avx512BF16(const GemmTile& tile) { RunBlocks<BF16Dot>(tile); }

}  // namespace moesaic::kernels::cpu
