#include "kernels/cpu/gemm_amx-inl.h"
#include "kernels/cpu/peak.h"

namespace moesaic::kernels::cpu {
namespace {

template <TileType kType>
inline void Products(int64_t rounds) {
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(6);
  for (int64_t i = 0; i < rounds; ++i) {
    MOESAIC_TILE_DOT(0, 4, 6);
    MOESAIC_TILE_DOT(1, 4, 6);
    MOESAIC_TILE_DOT(2, 4, 6);
    MOESAIC_TILE_DOT(3, 4, 6);
  }
  _tile_release();
}

}  // namespace

int64_t PeakI8Amx(int64_t rounds) {
  Products<TileType::kI8>(rounds);
  return rounds * 4 * 16 * 16 * 64 * 2;
}

int64_t PeakBF16Amx(int64_t rounds) {
  Products<TileType::kBF16>(rounds);
  return rounds * 4 * 16 * 16 * 32 * 2;
}

}  // namespace moesaic::kernels::cpu
