#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_avx2-inl.h"

namespace moesaic::kernels::cpu {
namespace {

struct Avx2 : Avx2Base {
  // vpmaddubsw adds pairs of u8 x s8 with saturation to 16 bits. 2 x 63 x 127 for 4- and 6-bit codes fits; 2
  // x 255 x 127 does not, so bytes are widened first.
  template <typename Format>
  static void Dot(Ints& acc, Ints codes, Ints x) {
    const Ints ones = _mm256_set1_epi16(1);
    if constexpr (Format::kBits < 8) {
      acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
    } else {
      const Ints even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                          _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
      const Ints odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
      acc = _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
    }
  }
};

}  // namespace

void GemmI8G32Avx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, I8G32>>(tile); }
void GemmI4G32Avx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, I4G32>>(tile); }
void GemmMxfp4Avx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, Mxfp4>>(tile); }
void GemmNvfp4Avx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, Nvfp4>>(tile); }
void GemmQ4KAvx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, Q4K>>(tile); }
void GemmQ6KAvx2(const GemmTile& tile) { RunBlocks<Grouped<Avx2, Q6K>>(tile); }

}  // namespace moesaic::kernels::cpu
