// FP8 weights on AMX tiles. The codes of a unit of 128 inputs are decoded to four tiles of bf16 in the L1
// cache. They serve up to 64 rows of one panel, or up to 16 rows of four panels.
#include "kernels/cpu/amx_tiles-inl.h"
#include "kernels/cpu/fp8_avx512-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"
#include "kernels/cpu/gemm_fp8.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kSteps = kFp8Inputs / kChunk;  // tile products of a unit
constexpr int kMaxRows = 4 * kTileRows;
constexpr int kMaxPanels = 4;

// A unit of one panel: [kSteps] tiles of B.
using UnitTiles = std::byte[kSteps * kTileBytes];

template <bool kPrefetch>
inline void DecodeUnit(const Fp8Unit& unit, UnitTiles& out) {
  if constexpr (kPrefetch) _mm_prefetch(unit.at + kPrefetchBytes, _MM_HINT_T0);
#pragma GCC unroll 4
  for (int line = 0; line < kFp8Inputs / kFp8LineInputs; ++line) {
    if constexpr (kPrefetch) _mm_prefetch(unit.Line(line) + kPrefetchBytes, _MM_HINT_T0);
    const Fp8Pairs pairs = DecodeFp8(unit.Line(line));
    _mm512_store_si512(out + 128 * line, pairs.first);
    _mm512_store_si512(out + 128 * line + 64, pairs.second);
  }
}

// acc [rows][16] += sums [rows][16] * scales.
inline void AddScaled(const float* sums, __m512 scales, int rows, float* acc) {
  for (int r = 0; r < rows; ++r) {
    const __m512 sum = _mm512_load_ps(sums + 16 * r);
    _mm512_store_ps(acc + 16 * r, _mm512_fmadd_ps(sum, scales, _mm512_load_ps(acc + 16 * r)));
  }
}

// A macro, because tile numbers are immediates. One step of row tile `c`; its rows of A are loaded to tile
// `x` if there are 16, otherwise to tile 7.
#define MOESAIC_ROW_TILE(c, x)                                  \
  if ((c) < whole) {                                            \
    _tile_loadd(x, a + (c)*kTileRows * t.a_stride, t.a_stride); \
    _tile_dpbf16ps(c, x, 6);                                    \
  } else if ((c) == whole && rest > 0) {                        \
    _tile_loadd(7, a + (c)*kTileRows * t.a_stride, t.a_stride); \
    _tile_dpbf16ps(c, 7, 6);                                    \
  }

/// Multiplies rows [row, row + rows) by one panel, rows <= kMaxRows. ConfigureRows configures the tiles.
/// Stored data is loaded a unit later, after it has left the store buffer: neither tiles nor vectors wait for
/// the other.
inline void RunPanel(const GemmTile& t, int row, int rows, int panel) {
  alignas(64) float acc[kMaxRows * 16] = {};
  alignas(64) float sums[kMaxRows * 16];
  alignas(64) UnitTiles codes[2];
  const int whole = rows / kTileRows, rest = rows % kTileRows;
  const int units = t.k_padded / kFp8Inputs;
  DecodeUnit<false>(Fp8Unit(t, panel, 0), codes[0]);
  for (int u = 0; u < units; ++u) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < kSteps; ++s) {
      const std::byte* a = t.a + row * t.a_stride + int64_t{2} * (kFp8Inputs * u + kChunk * s);
      _tile_loadd(6, codes[u % 2] + kTileBytes * s, 64);
      MOESAIC_ROW_TILE(0, 4)
      MOESAIC_ROW_TILE(1, 5)
      MOESAIC_ROW_TILE(2, 4)
      MOESAIC_ROW_TILE(3, 5)
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    if (u + 1 < units) DecodeUnit<false>(Fp8Unit(t, panel, u + 1), codes[(u + 1) % 2]);
    AddScaled(sums, Fp8Unit(t, panel, u).Scales(), rows, acc);
  }
  for (int r = 0; r < rows; ++r) StoreRow512(t, row + r, panel, _mm512_load_ps(acc + 16 * r));
}
#undef MOESAIC_ROW_TILE

inline void ConfigureRows(int rows) {
  const int whole = rows / kTileRows, rest = rows % kTileRows;
  int tiles[8] = {16, 16, 16, 16, 16, 16, 16, 16};
  if (rest > 0) tiles[whole] = tiles[7] = rest;
  Configure(tiles);
}

/// Multiplies all rows, at most 16, by panels [panel, panel + kPanels), kPanels 1 or 4.
template <int kPanels>
inline void RunFew(const GemmTile& t, int panel) {
  alignas(64) float acc[kPanels][kTileRows * 16] = {};
  alignas(64) float sums[kPanels][kTileRows * 16];
  alignas(64) UnitTiles codes[2][kPanels];
  const int units = t.k_padded / kFp8Inputs;
  for (int p = 0; p < kPanels; ++p) DecodeUnit<true>(Fp8Unit(t, panel + p, 0), codes[0][p]);
  for (int u = 0; u < units; ++u) {
    const UnitTiles(&now)[kPanels] = codes[u % 2];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < kSteps; ++s) {
      _tile_loadd(4, t.a + int64_t{2} * (kFp8Inputs * u + kChunk * s), t.a_stride);
      _tile_loadd(5, now[0] + kTileBytes * s, 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (kPanels == kMaxPanels) {
        _tile_loadd(6, now[1] + kTileBytes * s, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, now[2] + kTileBytes * s, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, now[3] + kTileBytes * s, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums[0], 64);
    if constexpr (kPanels == kMaxPanels) {
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
    for (int p = 0; p < kPanels && u + 1 < units; ++p) {
      DecodeUnit<true>(Fp8Unit(t, panel + p, u + 1), codes[(u + 1) % 2][p]);
    }
    for (int p = 0; p < kPanels; ++p) AddScaled(sums[p], Fp8Unit(t, panel + p, u).Scales(), t.m, acc[p]);
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < t.m; ++r) StoreRow512(t, r, panel + p, _mm512_load_ps(acc[p] + 16 * r));
  }
}

}  // namespace

void GemmF8G128Amx(const GemmTile& t) {
  const FlushDenormals flush;  // for bias and accumulation, as in the other kernels with this summation order
  if (t.m <= kTileRows) {
    Configure({t.m, t.m, t.m, t.m, t.m, 16, 16, 16});
    int panel = 0;
    for (; panel + kMaxPanels <= t.panels; panel += kMaxPanels) RunFew<kMaxPanels>(t, panel);
    for (; panel < t.panels; ++panel) RunFew<1>(t, panel);
  } else {
    const int passes = (t.m + kMaxRows - 1) / kMaxRows;
    for (int pass = 0, row = 0; pass < passes; ++pass) {
      // Equal shares of whole tiles; the last may be smaller.
      const int tiles = (t.m - row + kTileRows - 1) / kTileRows;
      const int share = (tiles + passes - pass - 1) / (passes - pass) * kTileRows;
      const int rows = share < t.m - row ? share : t.m - row;
      ConfigureRows(rows);
      for (int panel = 0; panel < t.panels; ++panel) RunPanel(t, row, rows, panel);
      row += rows;
    }
  }
  _tile_release();
}

}  // namespace moesaic::kernels::cpu
