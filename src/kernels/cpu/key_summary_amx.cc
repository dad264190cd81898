// Scores of key summaries on AMX tiles: query rows in groups of 16, which are the columns of a tile, and
// summaries in groups of 32, which are the rows of two.
//
//   centers [summary][row] = C (q_high + q_low)^T,   spreads [summary][row] = R |q|^T
//
// Centers and radii are converted to bfloat16 for the tiles, which is exact. q is split into two bfloat16,
// with an error of 2^-18 of its value. |q| is one bfloat16, rounded up by at most 2^-7, so that spreads
// remain bounds.
#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/amx_bf16-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kGroup = 16;      // rows
constexpr int kSummaries = 32;  // processed together
constexpr int kMaxKeyDim = 576;
constexpr int kMaxRows = 128;
constexpr int kSteps = kMaxKeyDim / kStep;

struct alignas(64) Memory {
  // [group][step][high, low, |q| rounded up][dim pair][row][2]
  std::byte queries[kMaxRows / kGroup][kSteps][3][kTileBytes];
  std::byte centers[kSummaries][2 * kMaxKeyDim];
  std::byte radii[kSummaries][2 * kMaxKeyDim];
  float products[2][kSummaries][kGroup];  // with centers, with radii; of one part
  float totals[2][kSummaries][kGroup];    // of both parts
};

/// Rounds x >= 0 up to a bfloat16, in the upper half of each lane.
inline __m512i RoundedUp(V x) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff));
  return _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000U)));
}

inline void PackQueries(const KeySummaryScores& t, Memory* m) {
  for (int first = 0; first < t.rows; first += kGroup) {
    for (int s = 0; s < t.key_dim / kStep; ++s) {
      __m512i high[kGroup], low[kGroup], size[kGroup];
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; ++i) {
        high[i] = low[i] = size[i] = _mm512_setzero_si512();
        if (first + i >= t.rows) continue;
        V even, odd;
        LoadPairs(t.q + (first + i) * t.q_stride + kStep * s, &even, &odd);
        const __m512i upper_even = UpperBF16(even), upper_odd = UpperBF16(odd);
        high[i] = Pairs(upper_even, upper_odd);
        low[i] = Pairs(UpperBF16(RoundingError(even, upper_even)), UpperBF16(RoundingError(odd, upper_odd)));
        size[i] = Pairs(RoundedUp(Abs(even)), RoundedUp(Abs(odd)));
      }
      auto* tiles = m->queries[first / kGroup][s];
      StoreColumns(high, tiles[0]);
      StoreColumns(low, tiles[1]);
      StoreColumns(size, tiles[2]);
    }
  }
}

inline const KeySummaryHeader& HeaderOf(const std::byte* summary) {
  return *reinterpret_cast<const KeySummaryHeader*>(summary);
}

inline void WidenSummaries(const KeySummaryScores& t, int first, int count, Memory* m) {
  for (int i = 0; i < count; ++i) {
    const auto* centers = reinterpret_cast<const int8_t*>(&HeaderOf(t.summaries[first + i]) + 1);
    const auto* radii = reinterpret_cast<const uint8_t*>(centers + t.key_dim);
    if (first + i + 4 < t.count) {  // prefetches a few ahead: blocks are in no particular order
      for (int64_t byte = 0; byte < BoxBytes(t.key_dim); byte += 64) {
        _mm_prefetch(t.summaries[first + i + 4] + byte, _MM_HINT_T0);
      }
    }
    for (int d = 0; d < t.key_dim; d += kStep) {
      _mm512_store_si512(m->centers[i] + 2 * d, Narrow(Load(centers + d), Load(centers + d + 16)));
      _mm512_store_si512(m->radii[i] + 2 * d, Narrow(Load(radii + d), Load(radii + d + 16)));
    }
  }
}

/// Multiplies 32 summaries by a group's queries over dimensions [from, to).
inline void Multiply(int group, int from, int to, Memory* m) {
  constexpr int64_t kStride = sizeof(m->centers[0]);
  Written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int s = from / kStep; s < to / kStep; ++s) {
    const auto* queries = m->queries[group][s];
    _tile_loadd(4, m->centers[0] + 64 * s, kStride);
    _tile_loadd(5, m->centers[kTileRows] + 64 * s, kStride);
    _tile_loadd(6, queries[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, queries[1], 64);
    _tile_dpbf16ps(0, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(4, m->radii[0] + 64 * s, kStride);
    _tile_loadd(5, m->radii[kTileRows] + 64 * s, kStride);
    _tile_loadd(6, queries[2], 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, m->products[0][0], 64);
  _tile_stored(1, m->products[0][kTileRows], 64);
  _tile_stored(2, m->products[1][0], 64);
  _tile_stored(3, m->products[1][kTileRows], 64);
  Written();
}

/// totals (+)= the part's products, scaled, and bounded by its ball.
inline void AddPart(const KeySummaryScores& t, int first, int count, int part, V norms, bool add, Memory* m) {
  for (int i = 0; i < count; ++i) {
    const KeySummaryHeader& header = HeaderOf(t.summaries[first + i]);
    const V box = Mul(Load(m->products[1][i]), Set(header.radius_scale[part]));
    V center = Mul(Load(m->products[0][i]), Set(header.center_scale[part]));
    V spread = Min(Mul(norms, Set(header.ball[part])), box);
    if (add) {
      center = Add(Load(m->totals[0][i]), center);
      spread = Add(Load(m->totals[1][i]), spread);
    }
    Store(m->totals[0][i], center);
    Store(m->totals[1][i], spread);
  }
}

/// Writes totals [32][16] as rows of scores.
inline void WriteRows(const float (*totals)[kGroup], int count, int rows, float* out, int64_t stride) {
  for (int half = 0; half < count; half += kTileRows) {
    const int columns = count - half < kTileRows ? count - half : kTileRows;
    __m512i block[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) block[i] = _mm512_load_si512(totals[half + i]);
    Transpose(block);
    alignas(64) float transposed[kTileRows][kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(transposed[i], block[i]);
    const __mmask16 mask = columns < kTileRows ? FirstLanes(columns) : static_cast<__mmask16>(0xffff);
    for (int i = 0; i < rows; ++i) {
      _mm512_mask_storeu_ps(out + i * stride + half, mask, _mm512_load_ps(transposed[i]));
    }
  }
}

}  // namespace

void KeySummaryScoresAmx(const KeySummaryScores& t) {
  const bool fits =
      t.key_dim % kStep == 0 && t.key_split % kStep == 0 && t.key_dim <= kMaxKeyDim && t.rows <= kMaxRows;
  if (!fits) return KeySummaryScoresAvx512(t);
  Memory m;
  PackQueries(t, &m);
  for (auto& totals : m.totals) {  // unused rows of the last tile are transposed with the others
    for (auto& total : totals) Store(total, Zero());
  }
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  const int ends[3] = {0, t.key_split, t.key_dim};
  for (int first = 0; first < t.count; first += kSummaries) {
    const int count = t.count - first < kSummaries ? t.count - first : kSummaries;
    WidenSummaries(t, first, count, &m);
    for (int row = 0; row < t.rows; row += kGroup) {
      const int rows = t.rows - row < kGroup ? t.rows - row : kGroup;
      for (int part = 0; part < 2; ++part) {
        if (ends[part] == ends[part + 1]) continue;
        alignas(64) float norms[kGroup] = {};
        for (int i = 0; i < rows; ++i) norms[i] = t.q_norms[2 * (row + i) + part];
        Multiply(row / kGroup, ends[part], ends[part + 1], &m);
        AddPart(t, first, count, part, Load(norms), part == 1, &m);
      }
      WriteRows(m.totals[0], count, rows, t.centers + row * t.stride + first, t.stride);
      WriteRows(m.totals[1], count, rows, t.spreads + row * t.stride + first, t.stride);
    }
  }
  _tile_release();
}

}  // namespace moesaic::kernels::cpu
