#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_avx2-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// vpmaddubsw multiplies unsigned by signed bytes and adds pairs with saturation to 16 bits. |w| is the
// unsigned operand and a carries the sign of the product. With w in [-128, 127] and a in [-127, 127] a pair
// is at most 2 x 128 x 127 = 32512 < 32768, so nothing saturates and the dot is exact. (The reverse, |a| and
// w with a's sign, would need -(-128), which a byte cannot hold.)
//
// Accumulators take 8 of 16 registers: each step also holds w, |w|, the signed activation and a constant of
// ones.
struct I8 {
  static constexpr int kWidePanels = 2, kWideRows = 2;
  static constexpr int kTallPanels = 1, kTallRows = 4;

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[kRows][2 * kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) acc[m][h] = _mm256_setzero_si256();
    }
    const int64_t groups = t.k_padded / 4;
    for (int64_t q = 0; q < groups; ++q) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) {
        const std::byte* group = w + h / 2 * t.panel_bytes + 64 * q + 32 * (h % 2);
        const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(group));
        const __m256i magnitudes = _mm256_abs_epi8(weights);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int*>(a[m] + 4 * q));
          const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, weights));
          acc[m][h] = _mm256_add_epi32(acc[m][h], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int h = 0; h < 2 * kPanels; ++h) StoreDots256(t, row + m, panel + h / 2, h % 2, acc[m][h]);
    }
  }
};

}  // namespace

void GemmI8Avx2(const GemmTile& tile) { RunBlocks<I8>(tile); }

}  // namespace moesaic::kernels::cpu
