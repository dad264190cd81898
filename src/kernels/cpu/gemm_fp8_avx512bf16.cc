#include "kernels/cpu/fp8_avx512-inl.h"
#include "kernels/cpu/gemm_fp8.h"

namespace moesaic::kernels::cpu {
namespace {

// acc += dot of bf16 pairs, in place: GCC 12 copies and spills accumulators around the intrinsic.
inline void Dot(__m512& acc, __m512i a, __m512i w) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
}

// An accumulator and the sum of a unit per output: 12 of each, plus the pairs and tables.
struct Fp8Dot {
  static constexpr int kWidePanels = 4, kWideRows = 2;
  static constexpr int kTallPanels = 2, kTallRows = 6;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    __m512 acc[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) acc[m][p] = _mm512_setzero_ps();
    }
    for (int u = 0; u < t.k_padded / kFp8Inputs; ++u) {
      __m512 sums[kRows][kPanels];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) sums[m][p] = _mm512_setzero_ps();
      }
      const std::byte* codes = Fp8Unit(t, panel, u).Line(0);
      const int64_t inputs = int64_t{2} * kFp8Inputs * u;
      for (int line = 0; line < kFp8Inputs / kFp8LineInputs; ++line) {
        Fp8Pairs pairs[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
          const std::byte* at = codes + p * t.panel_bytes + 64 * line;
          if constexpr (kPanels == kWidePanels) _mm_prefetch(at + kPrefetchBytes, _MM_HINT_T0);
          pairs[p] = DecodeFp8(at);
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const auto* x = reinterpret_cast<const int*>(a[m] + inputs + 8 * line);
          const __m512i first = _mm512_set1_epi32(x[0]), second = _mm512_set1_epi32(x[1]);
#pragma GCC unroll 16
          for (int p = 0; p < kPanels; ++p) Dot(sums[m][p], first, pairs[p].first);
#pragma GCC unroll 16
          for (int p = 0; p < kPanels; ++p) Dot(sums[m][p], second, pairs[p].second);
        }
      }
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const __m512 scales = Fp8Unit(t, panel + p, u).Scales();
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) acc[m][p] = _mm512_fmadd_ps(sums[m][p], scales, acc[m][p]);
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

void GemmF8G128Avx512BF16(const GemmTile& tile) { RunBlocks<Fp8Dot>(tile); }

}  // namespace moesaic::kernels::cpu
