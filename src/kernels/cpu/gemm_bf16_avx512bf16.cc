#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// acc += dot of bf16 pairs, in place: GCC 12 copies and spills accumulators around the intrinsic.
inline void Dot(__m512& acc, __m512i a, __m512i w) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
}

// vdpbf16ps has latency 6. Its throughput is one in two cycles on Sapphire Rapids (where AMX does this work)
// and two per cycle on Zen 5, so 12 chains suffice; there are 24 accumulators.
struct BF16Dot {
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
    const int64_t groups = t.k_padded / 2;
    for (int64_t q = 0; q < groups; ++q) {
      __m512i weights[kPanels];
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) weights[p] = _mm512_load_si512(w + p * t.panel_bytes + 64 * q);
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
      for (int p = 0; p < kPanels; ++p) StoreRow512(t, row + m, panel + p, acc[m][p]);
    }
  }
};

}  // namespace

void GemmBF16Avx512BF16(const GemmTile& tile) { RunBlocks<BF16Dot>(tile); }

}  // namespace moesaic::kernels::cpu
