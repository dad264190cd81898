#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx2-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// acc += dot of u8 and s8, in place and in the VEX encoding.
inline void Dot(__m256i& acc, __m256i u8, __m256i s8) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u8), "x"(s8));
}

// Like AVX-512, with 12 of 16 registers for accumulators and two registers per panel.
struct I8 {
  static constexpr int kWidePanels = 2, kWideRows = 3;
  static constexpr int kTallPanels = 1, kTallRows = 6;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    __m256i acc[kRows][2 * kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) acc[m][h] = _mm256_setzero_si256();
    }
    const int64_t groups = t.k_padded / 4;
    for (int64_t q = 0; q < groups; ++q) {
      auto group = [&](int h) { return w + h / 2 * t.panel_bytes + 64 * q + 32 * (h % 2); };
      // The wide shape keeps its activations in registers and loads weights one by one; the tall shape does
      // the reverse.
      if constexpr (kPanels > 1) {
        __m256i x[kRows];
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) x[m] = _mm256_set1_epi32(*reinterpret_cast<const int*>(a[m] + 4 * q));
#pragma GCC unroll 16
        for (int h = 0; h < 2 * kPanels; ++h) {
          const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(group(h)));
#pragma GCC unroll 16
          for (int m = 0; m < kRows; ++m) Dot(acc[m][h], x[m], weights);
        }
      } else {
        const __m256i weights[2] = {_mm256_load_si256(reinterpret_cast<const __m256i*>(group(0))),
                                    _mm256_load_si256(reinterpret_cast<const __m256i*>(group(1)))};
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int*>(a[m] + 4 * q));
#pragma GCC unroll 16
          for (int h = 0; h < 2; ++h) Dot(acc[m][h], x, weights[h]);
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < 2 * kPanels; ++h) {
      const int* sums = t.w_sums + 16 * panel + 8 * h;
      const __m256i bias = _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums)), 7);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        StoreDots256(t, row + m, panel + h / 2, h % 2, _mm256_sub_epi32(acc[m][h], bias));
      }
    }
  }
};

}  // namespace

void GemmI8AvxVnni(const GemmTile& tile) { RunBlocks<I8>(tile); }

}  // namespace moesaic::kernels::cpu
