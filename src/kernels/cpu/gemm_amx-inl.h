// The tile loops of the AMX kernels. int8 and bf16 share them: a row of A is 64 bytes of prepared
// activations, a tile of B is 1 KiB of a panel (16 groups of 64 bytes, see tensor/packed.h), and C is 16 rows
// by 16 outputs of 32 bits.
//
// A tile product takes 16 cycles and gives its result after 52, so four C tiles in flight keep the unit busy.
//   2 x 2  two A tiles against two panels: four products for four tile loads. More than 16 rows.
//   1 x 4  one A tile against four panels: few rows, bound by the stream of weights.
#pragma once

#include "kernels/cpu/amx_tiles-inl.h"
#include "kernels/cpu/gemm_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

// A macro, because tile numbers are immediates.
enum class TileType { kI8, kBF16 };

#define MOESAIC_TILE_DOT(c, a, b)         \
  do {                                    \
    if constexpr (kType == TileType::kI8) \
      _tile_dpbusd(c, a, b);              \
    else                                  \
      _tile_dpbf16ps(c, a, b);            \
  } while (false)

template <TileType kType>
inline void StoreTile(const GemmTile& t, int row, int rows, int panel, const float* tile) {
  for (int r = 0; r < rows; ++r) {
    const __m512 values = _mm512_load_ps(tile + 16 * r);
    if constexpr (kType == TileType::kI8) {
      StoreBiasedDots512(t, row + r, panel, _mm512_castps_si512(values));
    } else {
      StoreRow512(t, row + r, panel, values);
    }
  }
}

/// Rows [row, row + 16 + second_rows) of A against panels [panel, panel + kPanels), kPanels 1 or 2.
template <TileType kType, int kPanels>
inline void Block2x2(const GemmTile& t, int row, int second_rows, int panel) {
  const std::byte* a0 = t.a + row * t.a_stride;
  const std::byte* a1 = a0 + kTileRows * t.a_stride;
  const std::byte* w0 = t.w + panel * t.panel_bytes;
  const std::byte* w1 = w0 + t.panel_bytes;
  const int64_t steps = t.panel_bytes / kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, w0 + kTileBytes * s, 64);
    _tile_loadd(4, a0 + 64 * s, t.a_stride);
    MOESAIC_TILE_DOT(0, 4, 6);
    _tile_loadd(5, a1 + 64 * s, t.a_stride);
    MOESAIC_TILE_DOT(2, 5, 6);
    if constexpr (kPanels == 2) {
      _tile_loadd(7, w1 + kTileBytes * s, 64);
      MOESAIC_TILE_DOT(1, 4, 7);
      MOESAIC_TILE_DOT(3, 5, 7);
    }
  }
  alignas(64) float c[4][kTileRows * 16];
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  _tile_stored(2, c[2], 64);
  _tile_stored(3, c[3], 64);
  for (int p = 0; p < kPanels; ++p) {
    StoreTile<kType>(t, row, kTileRows, panel + p, c[p]);
    StoreTile<kType>(t, row + kTileRows, second_rows, panel + p, c[2 + p]);
  }
}

/// Up to 16 rows of A against panels [panel, panel + kPanels), kPanels 1 or 4.
template <TileType kType, int kPanels>
inline void Block1x4(const GemmTile& t, int row, int rows, int panel) {
  const std::byte* a = t.a + row * t.a_stride;
  const std::byte* w = t.w + panel * t.panel_bytes;
  const int64_t steps = t.panel_bytes / kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, a + 64 * s, t.a_stride);
    _tile_loadd(5, w + kTileBytes * s, 64);
    MOESAIC_TILE_DOT(0, 4, 5);
    if constexpr (kPanels == 4) {
      _tile_loadd(6, w + t.panel_bytes + kTileBytes * s, 64);
      MOESAIC_TILE_DOT(1, 4, 6);
      _tile_loadd(7, w + 2 * t.panel_bytes + kTileBytes * s, 64);
      MOESAIC_TILE_DOT(2, 4, 7);
      _tile_loadd(5, w + 3 * t.panel_bytes + kTileBytes * s, 64);
      MOESAIC_TILE_DOT(3, 4, 5);
    }
  }
  alignas(64) float c[4][kTileRows * 16];
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  _tile_stored(2, c[2], 64);
  _tile_stored(3, c[3], 64);
  for (int p = 0; p < kPanels; ++p) StoreTile<kType>(t, row, rows, panel + p, c[p]);
}

/// Every panel against rows [row, row + 16 + second_rows), [row + 32, ...): `blocks` of 32, or one that is
/// smaller.
template <TileType kType>
inline void Run2x2(const GemmTile& t, int row, int blocks, int second_rows) {
  Configure({16, 16, second_rows, second_rows, 16, second_rows, 16, 16});
  int panel = 0;
  for (; panel + 2 <= t.panels; panel += 2) {
    for (int b = 0; b < blocks; ++b) Block2x2<kType, 2>(t, row + 32 * b, second_rows, panel);
  }
  for (; panel < t.panels; ++panel) {
    for (int b = 0; b < blocks; ++b) Block2x2<kType, 1>(t, row + 32 * b, second_rows, panel);
  }
}

template <TileType kType>
inline void Run1x4(const GemmTile& t, int row, int rows) {
  Configure({rows, rows, rows, rows, rows, 16, 16, 16});
  int panel = 0;
  for (; panel + 4 <= t.panels; panel += 4) Block1x4<kType, 4>(t, row, rows, panel);
  for (; panel < t.panels; ++panel) Block1x4<kType, 1>(t, row, rows, panel);
}

/// The rows of `t` from `row` on, for a kernel that takes them over.
inline GemmTile RowsFrom(const GemmTile& t, int row) {
  GemmTile rest = t;
  rest.a += row * t.a_stride;
  rest.a_scales = t.a_scales != nullptr ? t.a_scales + row : nullptr;
  rest.c += row * t.c_stride;
  rest.m -= row;
  return rest;
}

/// Runs all of `t`; what is left of fewer than `few` rows goes to `vector`, whose results are bit for bit the
/// same.
template <TileType kType>
inline void RunTiles(const GemmTile& t, int few, GemmTileFn vector) {
  const int blocks = t.m / 32;
  const int row = 32 * blocks;
  const int rest = t.m - row;
  if (blocks > 0) Run2x2<kType>(t, 0, blocks, kTileRows);
  if (rest > kTileRows) {
    Run2x2<kType>(t, row, 1, rest - kTileRows);
  } else if (rest >= few) {
    Run1x4<kType>(t, row, rest);
  }
  if (blocks > 0 || rest >= few) _tile_release();
  if (rest > 0 && rest < few) vector(RowsFrom(t, row));
}

}  // namespace
}  // namespace moesaic::kernels::cpu
