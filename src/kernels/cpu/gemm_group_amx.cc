// Group-scaled weights on AMX tiles. A tile product gives the integer dots of one group of inputs for 16 rows
// and 16 outputs. Vector code then scales them into f32 accumulators, with the expression of all kernels of
// these formats (gemm_group_formats-inl.h). Scaling takes three instructions per row and group, 24 cycles in
// addition to 16 for the product and 16 for storing it. Tiles and vectors hardly overlap (19 ns together, 9
// and 8 separately, at 3.2 GHz). Measured with 64 rows: 1.25 times as fast as vpdpbusd for int4, 1.1 for int8
// and for groups of 16.
#include "kernels/cpu/amx_tiles-inl.h"
#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kPassRows = 64;  // rows that share the unpacked codes of a chunk
constexpr int kChunkUnits =
    8;  // units of a panel: 8 KiB of unpacked codes and 32 KiB of activations stay in the L1 cache

inline __m512i Signed(__m512i codes, int zero) {
  return _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(zero)));
}

/// Unpacks the codes of a unit to signed bytes, in the layout of a B tile: [16][16 outputs][4 inputs].
template <typename Format>
inline void Unpack(const std::byte* unit, int8_t* out) {
#pragma GCC unroll 8
  for (int pair = 0; pair < 8; ++pair) {
    const auto codes = Grouped<Avx512, Format>::Codes(unit, pair, 0);
    _mm512_store_si512(out + 128 * pair, Signed(codes.low, Format::kZero));
    _mm512_store_si512(out + 128 * pair + 64, Signed(codes.high, Format::kZero));
  }
}

/// Computes dots of one group: a is [rows][kGroup] at `stride`, codes [kGroup / 4][16 outputs][4], dots
/// [rows][16]. Four products of different groups may be in flight together.
template <int kTile>
inline void GroupDots(const std::byte* a, int64_t stride, const int8_t* codes, int32_t* dots) {
  if constexpr (kTile == 0) {
    _tile_zero(0);
    _tile_loadd(4, a, stride);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, dots, 64);
  } else if constexpr (kTile == 1) {
    _tile_zero(1);
    _tile_loadd(5, a, stride);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, dots, 64);
  } else if constexpr (kTile == 2) {
    _tile_zero(2);
    _tile_loadd(4, a, stride);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(2, 4, 6);
    _tile_stored(2, dots, 64);
  } else {
    _tile_zero(3);
    _tile_loadd(5, a, stride);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(3, dots, 64);
  }
}

/// A chunk of one panel, as row tiles read it.
template <typename Format>
struct Chunk {
  static constexpr int kGroups = kUnitInputs / Format::kGroup;
  const std::byte* panel;  // packed panel, for its scales
  int first, count;        // units
  alignas(64) int8_t codes[kChunkUnits * kUnitInputs * 16];
};

using Dots = int32_t[4][kTileRows][16];

template <typename Format>
inline void UnitDots(const std::byte* a, int64_t stride, const int8_t* codes, Dots& dots) {
  constexpr int kCodes = 16 * Format::kGroup;
  GroupDots<0>(a, stride, codes, dots[0][0]);
  GroupDots<1>(a + Format::kGroup, stride, codes + kCodes, dots[1][0]);
  if constexpr (Format::kGroup == 16) {
    GroupDots<2>(a + 32, stride, codes + 2 * kCodes, dots[2][0]);
    GroupDots<3>(a + 48, stride, codes + 3 * kCodes, dots[3][0]);
  }
}

/// Addresses 16 rows by four pointers and two strides: more pointers would be spilled.
struct TileRowPointers {
  const std::byte* at[4];
  int64_t stride, stride3;

  TileRowPointers(const std::byte* first, int64_t row_stride)
      : at{first, first + 4 * row_stride, first + 8 * row_stride, first + 12 * row_stride},
        stride(row_stride),
        stride3(3 * row_stride) {}

  const std::byte* operator[](int r) const {
    const std::byte* base = at[r / 4];
    return r % 4 == 0 ? base : r % 4 == 1 ? base + stride : r % 4 == 2 ? base + 2 * stride : base + stride3;
  }
};

/// Adds a chunk to acc [16][16] of a tile of rows. `scales` points to the activation scales of the chunk's
/// first group and the tile's first row. Corrections, which only formats with minima read, follow
/// `corrections` bytes after them. The products of the next unit are in flight while the dots of one are
/// scaled.
template <typename Format, int kRows>
inline void AddChunk(const std::byte* a, int64_t stride, const TileRowPointers& scales, int64_t corrections,
                     const Chunk<Format>& chunk, float* acc) {
  alignas(64) Dots dots[2];
  __m512 totals[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) totals[r] = _mm512_load_ps(acc + 16 * r);
  UnitDots<Format>(a, stride, chunk.codes, dots[0]);
  for (int u = 0; u < chunk.count; ++u) {
    if (u + 1 < chunk.count) {
      UnitDots<Format>(a + kUnitInputs * (u + 1), stride, chunk.codes + 1024 * (u + 1), dots[(u + 1) % 2]);
    }
    const std::byte* unit = UnitAt<Format>(chunk.panel, chunk.first + u);
    const std::byte* super = kHasSuper<Format> ? SuperAt<Format>(chunk.panel, chunk.first + u) : unit;
#pragma GCC unroll 4
    for (int g = 0; g < Chunk<Format>::kGroups; ++g) {
      const __m512 weights = Grouped<Avx512, Format>::Scales(unit, super, g, 0);
      const int64_t at = sizeof(float) * (2 * u + g * Format::kGroup / kActivationGroup);
      const int32_t* of_group = dots[u % 2][g][0];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(of_group + 16 * r));
        const __m512 activation = _mm512_set1_ps(*reinterpret_cast<const float*>(scales[r] + at));
        totals[r] = _mm512_fmadd_ps(_mm512_mul_ps(dot, activation), weights, totals[r]);
      }
      if constexpr (Format::kMinimum) {
        const __m512 minima = Grouped<Avx512, Format>::Minima(unit, super, g, 0);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const __m512 sum = _mm512_set1_ps(*reinterpret_cast<const float*>(scales[r] + at + corrections));
          totals[r] = _mm512_fnmadd_ps(sum, minima, totals[r]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) _mm512_store_ps(acc + 16 * r, totals[r]);
}

/// Processes a tile of `rows` < 16 rows. Scales are copied, so that missing rows have scales too; their sums
/// are not stored.
template <typename Format>
inline void AddChunkToFew(const std::byte* a, int64_t stride, const std::byte* scales, int64_t corrections,
                          int rows, const Chunk<Format>& chunk, float* acc) {
  float copies[kTileRows][2][2 * kChunkUnits] = {};
  for (int r = 0; r < rows; ++r) {
    const std::byte* from = scales + r * stride;
    __builtin_memcpy(copies[r][0], from, sizeof(float) * 2 * chunk.count);
    if constexpr (Format::kMinimum) {
      __builtin_memcpy(copies[r][1], from + corrections, sizeof(float) * 2 * chunk.count);
    }
  }
  const TileRowPointers from(reinterpret_cast<const std::byte*>(copies), sizeof copies[0]);
  if (rows > 8) {
    AddChunk<Format, 16>(a, stride, from, sizeof copies[0][0], chunk, acc);
  } else {
    AddChunk<Format, 8>(a, stride, from, sizeof copies[0][0], chunk, acc);
  }
}

template <typename Format>
inline void ConfigureGroups(int rows) {
  constexpr int kCodeRows = Format::kGroup / 4;
  Configure({rows, rows, rows, rows, rows, rows, kCodeRows, kCodeRows},
            {64, 64, 64, 64, Format::kGroup, Format::kGroup, 64, 64});
}

/// Multiplies rows [row, row + rows) by one panel, rows <= kPassRows.
template <typename Format>
inline void RunPass(const GemmTile& t, int row, int rows, int panel) {
  alignas(64) float acc[kPassRows * 16] = {};
  Chunk<Format> chunk;
  chunk.panel = t.w + panel * t.panel_bytes;
  const int64_t corrections = t.k_padded / 8;  // after the scales
  const int units = t.k_padded / kUnitInputs;
  const int whole = rows / kTileRows * kTileRows;
  for (int first = 0; first < units; first += kChunkUnits) {
    chunk.first = first;
    chunk.count = units - first < kChunkUnits ? units - first : kChunkUnits;
    for (int u = 0; u < chunk.count; ++u) {
      Unpack<Format>(UnitAt<Format>(chunk.panel, first + u), chunk.codes + 1024 * u);
    }
    const std::byte* a = t.a + row * t.a_stride + int64_t{first} * kUnitInputs;
    const std::byte* scales = t.a + row * t.a_stride + t.k_padded + int64_t{first} * 2 * sizeof(float);
    if (whole > 0) ConfigureGroups<Format>(kTileRows);
    for (int r = 0; r < whole; r += kTileRows) {
      const TileRowPointers of_tile(scales + r * t.a_stride, t.a_stride);
      AddChunk<Format, 16>(a + r * t.a_stride, t.a_stride, of_tile, corrections, chunk, acc + 16 * r);
    }
    if (whole == rows) continue;
    ConfigureGroups<Format>(rows - whole);
    AddChunkToFew(a + whole * t.a_stride, t.a_stride, scales + whole * t.a_stride, corrections, rows - whole,
                  chunk, acc + 16 * whole);
  }
  const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(Format::kUnit), _mm512_loadu_ps(t.w_scales + 16 * panel));
  for (int r = 0; r < rows; ++r) {
    StoreRow512(t, row + r, panel, _mm512_mul_ps(_mm512_load_ps(acc + 16 * r), scale));
  }
}

template <typename Format>
inline void RunTiles(const GemmTile& t) {
  for (int row = 0; row < t.m;) {
    // A small remainder after whole passes is not worth its own pass: the last two passes are of equal size.
    const int left = t.m - row;
    int rows = left < kPassRows ? left : kPassRows;
    if (left > kPassRows && left < kPassRows + kTileRows) rows = kPassRows / 2;
    for (int panel = 0; panel < t.panels; ++panel) RunPass<Format>(t, row, rows, panel);
    row += rows;
  }
  _tile_release();
}

}  // namespace

void GemmI8G32Amx(const GemmTile& tile) { RunTiles<I8G32>(tile); }
void GemmI4G32Amx(const GemmTile& tile) { RunTiles<I4G32>(tile); }
void GemmMxfp4Amx(const GemmTile& tile) { RunTiles<Mxfp4>(tile); }
void GemmNvfp4Amx(const GemmTile& tile) { RunTiles<Nvfp4>(tile); }
void GemmQ4KAmx(const GemmTile& tile) { RunTiles<Q4K>(tile); }
void GemmQ6KAmx(const GemmTile& tile) { RunTiles<Q6K>(tile); }

}  // namespace moesaic::kernels::cpu
