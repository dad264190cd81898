// The tile loops of the AMX kernels, shared by int8 and bf16. A row of A is 64 bytes of prepared activations,
// a tile of B is 1 KiB of a panel (16 groups of 64 bytes, see tensor/packed.h), and C is 16 rows by 16
// outputs of 32 bits.
//
// A tile product takes 16 cycles and has a latency of 52, so four C tiles in flight keep the unit busy.
//   2 x 2  two A tiles by two panels: four products for four tile loads. For more than 16 rows; a part of
//          their K stays in the L1 cache.
//   1 x 4  one A tile by four panels: for few rows, bound by the stream of weights.
#pragma once

#include <algorithm>

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
  __m512i sums = _mm512_setzero_si512();  // read once, because for compilers the outputs may alias them
  __m512 scales = _mm512_setzero_ps();
  if constexpr (kType == TileType::kI8) {
    sums = BiasOf512(t, panel);
    scales = _mm512_loadu_ps(t.w_scales + 16 * panel);
  }
  const auto value_of = [&](int r) {
    const __m512 values = _mm512_load_ps(tile + 16 * r);
    if constexpr (kType == TileType::kBF16) return values;
    return ScaleDots512(_mm512_castps_si512(values), sums, t.a_scales[row + r], scales);
  };
  if (t.bias != nullptr || t.accumulate || ColumnsOf(t, panel) < 16) {
    for (int r = 0; r < rows; ++r) StoreRow512(t, row + r, panel, value_of(r));
    return;
  }
  float* c = t.c + row * t.c_stride + 16 * panel;
  for (int r = 0; r < rows; ++r, c += t.c_stride) _mm512_storeu_ps(c, value_of(r));
}

/// Sums of 32 rows and two panels: tiles 0 and 1 of the first 16 rows, 2 and 3 of the others.
struct alignas(64) BlockSums {
  float tile[4][kTileRows * 16];
};

/// Prefetches a tile of weights into the L2 cache.
inline void PrefetchTile(const std::byte* tile) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileBytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(tile + i), _MM_HINT_T1);
  }
}

/// Processes steps [first, last) of rows [row, row + 32) and panels [panel, panel + kPanels), kPanels 1 or 2,
/// on top of `sums` except at the first step. `next`, unless null: the panel whose steps follow, for
/// prefetching.
template <TileType kType, int kPanels>
inline void Block2x2(const GemmTile& t, int row, int panel, int64_t first, int64_t last, BlockSums& sums,
                     const std::byte* next) {
  const std::byte* a0 = t.a + row * t.a_stride;
  const std::byte* a1 = a0 + kTileRows * t.a_stride;
  const std::byte* w0 = t.w + panel * t.panel_bytes;
  const std::byte* w1 = w0 + t.panel_bytes;
  if (first == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums.tile[0], 64);
    _tile_loadd(1, sums.tile[1], 64);
    _tile_loadd(2, sums.tile[2], 64);
    _tile_loadd(3, sums.tile[3], 64);
  }
  for (int64_t s = first; s < last; ++s) {
    _tile_stream_loadd(6, w0 + kTileBytes * s, 64);
    _tile_loadd(4, a0 + 64 * s, t.a_stride);
    if (next != nullptr) PrefetchTile(next + kTileBytes * (s - first));
    MOESAIC_TILE_DOT(0, 4, 6);
    _tile_loadd(5, a1 + 64 * s, t.a_stride);
    MOESAIC_TILE_DOT(2, 5, 6);
    if constexpr (kPanels == 2) {
      _tile_stream_loadd(7, w1 + kTileBytes * s, 64);
      if (next != nullptr) PrefetchTile(next + t.panel_bytes + kTileBytes * (s - first));
      MOESAIC_TILE_DOT(1, 4, 7);
      MOESAIC_TILE_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, sums.tile[0], 64);
  _tile_stored(1, sums.tile[1], 64);
  _tile_stored(2, sums.tile[2], 64);
  _tile_stored(3, sums.tile[3], 64);
}

/// Processes up to 16 rows of A and panels [panel, panel + kPanels), kPanels 1 or 4.
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

// Steps of K in one part: 32 rows are 32 KiB of the 48 KiB L1 cache of processors with AMX.
constexpr int64_t kPartSteps = 16;
// Pairs of panels whose sums are kept from part to part of K.
constexpr int kMaxPairs = 4;

/// Multiplies 16 + second_rows rows by `panels` panels, at most 2 * kMaxPairs. A part of K of the rows is
/// used for all panels before the next part. It stays in the L1 cache, which the panels bypass
/// (`tileloaddt1`). A tile product takes 7 ns, compared with 10 to 11 if rows and panels both come from the
/// L2 cache, and 5 at the peak (Sapphire Rapids). `prefetch`: the panels may be in memory and are prefetched.
template <TileType kType>
inline void RowsPastPanels(const GemmTile& t, int row, int second_rows, int panel, int panels,
                           bool prefetch) {
  const int64_t steps = t.panel_bytes / kTileBytes;
  BlockSums sums[kMaxPairs];
  for (int64_t step = 0; step < steps; step += kPartSteps) {
    const int64_t end = std::min(step + kPartSteps, steps);
    for (int p = 0; p < panels; p += 2) {
      const int together = std::min(panels - p, 2);
      const std::byte* next = nullptr;
      if (prefetch && p + 2 < panels) {
        next = t.w + (panel + p + 2) * t.panel_bytes + step * kTileBytes;
      } else if (prefetch) {
        next = end < steps ? t.w + panel * t.panel_bytes + end * kTileBytes
                           : t.w + (panel + panels) * t.panel_bytes;  // prefetches the most likely next panel
      }
      if (together == 2) {
        Block2x2<kType, 2>(t, row, panel + p, step, end, sums[p / 2], next);
      } else {
        Block2x2<kType, 1>(t, row, panel + p, step, end, sums[p / 2], next);
      }
      if (end < steps) continue;
      for (int i = 0; i < together; ++i) {
        StoreTile<kType>(t, row, kTileRows, panel + p + i, sums[p / 2].tile[i]);
        StoreTile<kType>(t, row + kTileRows, second_rows, panel + p + i, sums[p / 2].tile[2 + i]);
      }
    }
  }
}

/// Multiplies every panel by rows [row, row + 16 + second_rows), [row + 32, ...): `blocks` blocks of 32 rows,
/// or one smaller block.
template <TileType kType>
inline void Run2x2(const GemmTile& t, int row, int blocks, int second_rows) {
  Configure({16, 16, second_rows, second_rows, 16, second_rows, 16, 16});
  for (int panel = 0; panel < t.panels; panel += 2 * kMaxPairs) {
    const int panels = std::min(t.panels - panel, 2 * kMaxPairs);
    for (int b = 0; b < blocks; ++b) {
      RowsPastPanels<kType>(t, row + 32 * b, second_rows, panel, panels, row + b == 0);
    }
  }
}

template <TileType kType>
inline void Run1x4(const GemmTile& t, int row, int rows) {
  Configure({rows, rows, rows, rows, rows, 16, 16, 16});
  int panel = 0;
  for (; panel + 4 <= t.panels; panel += 4) Block1x4<kType, 4>(t, row, rows, panel);
  for (; panel < t.panels; ++panel) Block1x4<kType, 1>(t, row, rows, panel);
}

/// Returns the rows of `t` from `row` on, for another kernel.
inline GemmTile RowsFrom(const GemmTile& t, int row) {
  GemmTile rest = t;
  rest.a += row * t.a_stride;
  rest.a_scales = t.a_scales != nullptr ? t.a_scales + row : nullptr;
  rest.c += row * t.c_stride;
  rest.m -= row;
  return rest;
}

/// Runs all of `t`. A remainder of fewer than `few` rows goes to `vector`, whose results are bit-identical.
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
