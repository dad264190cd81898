// Estimates of blocks by their boxes with int8 products, in tiles (estimate_amx.cc) and in registers
// (estimate_avx512vnni.cc), with identical bits. Requires the lanes of simd_avx512-inl.h.
//
//   scores [summary][row] = scale_c C (128 q_high + q_low)^T + share * min(scale_r R |q|^T, ball |q|_2)
//
// A part of a query is represented by q_high in int8, its remainder q_low in steps 128 times finer, and |q|
// in uint8. The errors are 1/32512 and 1/508 of its largest element. Queries are processed in groups of 16;
// groups of four elements of the 16 queries are adjacent.
#pragma once

#include "kernels/cpu/columns-inl.h"
#include "kernels/cpu/key_summary.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMaxGroups = kMaxEstimateRows / kScoreGroup;
constexpr int kInts = 64;  // elements of a step
constexpr int kFine = 128;
constexpr int kStepBytes = kInts * kScoreGroup;
constexpr int kMaxSteps = kMaxKeySummaryDim / kInts + 1;  // a second part begins with its own step
static_assert(kMaxKeySummaryDim * 127 * 128 < 1 << 24, "sums of q_high's products are exact as floats");

/// Dimensions [begin, begin + dims) of a summary's part, at most 64.
struct Step {
  int begin;
  __mmask64 mask;
};

struct alignas(64) Queries {
  std::byte queries[kMaxGroups][kMaxSteps][3][kStepBytes];  // high, low, magnitudes
  float scales[kMaxGroups][2][kScoreGroup];                 // factors of products with centers, by part
  float reaches[kMaxGroups][2][kScoreGroup];                // factors of products with radii, times share
  float norms[kMaxGroups][2][kScoreGroup];                  // norms of the rows' parts, times share
  Step steps[kMaxSteps];
  int ends[3] = {0, 0, 0};  // steps of the parts
};

inline void FindSteps(const KeySummaryEstimates& t, Queries* m) {
  const int ends[3] = {0, t.key_split, t.key_dim};
  int count = 0;
  for (int part = 0; part < 2; ++part) {
    for (int d = ends[part]; d < ends[part + 1]; d += kInts) {
      const int left = ends[part + 1] - d;
      m->steps[count++] = {d, left < kInts ? (__mmask64{1} << left) - 1 : ~__mmask64{0}};
    }
    m->ends[part + 1] = count;
  }
}

/// Loads sixteen of a row's elements, scaled; zeros after a step's end.
inline V LoadQuery(const KeySummaryEstimates& t, int row, const Step& step, int quarter) {
  const auto mask = static_cast<__mmask16>(step.mask >> 16 * quarter);
  return Mul(_mm512_maskz_loadu_ps(mask, t.q + row * t.q_stride + step.begin + 16 * quarter), Set(t.scale));
}

/// Packs four times sixteen integers as bytes, keeping their order.
template <bool kSigned>
inline __m512i PackBytes(const __m512i* x) {
  const __m512i ab = _mm512_packs_epi32(x[0], x[1]), cd = _mm512_packs_epi32(x[2], x[3]);
  const __m512i bytes = kSigned ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

/// Computes the divisor of a row's part. It is zero if the part is zero; its scale is NaN if the part is not
/// finite.
inline void MeasurePart(const KeySummaryEstimates& t, int group, int i, int part, float* inverse,
                        Queries* m) {
  V most = Zero(), squares = Zero();
  for (int s = m->ends[part]; s < m->ends[part + 1]; ++s) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const V x = LoadQuery(t, group * kScoreGroup + i, m->steps[s], quarter);
      most = Max(Abs(x), most);
      squares = Fma(x, x, squares);
    }
  }
  const float square = SumLanes(squares), largest = _mm512_reduce_max_ps(most);
  const bool some = largest > 1e-30F, finite = square - square == 0;
  *inverse = some && finite ? 127 / largest : 0;
  const float wrong = square - square;  // NaN, or 0
  m->scales[group][part][i] = (some ? largest / (127 * kFine) : 0) + wrong;
  m->reaches[group][part][i] = (some ? t.share * largest / 254 : 0) + wrong;
  m->norms[group][part][i] = t.share * __builtin_sqrtf(square);
}

/// Stores 8 rows of 64 bytes as columns: 8 bytes of each row are adjacent.
inline void StoreColumnsOfEights(const __m512i* rows, std::byte* columns) {
  __m512i even[4], odd[4];  // groups of eight 0, 2, 4, 6 of two rows; 1, 3, 5, 7
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    even[i] = _mm512_unpacklo_epi64(rows[2 * i], rows[2 * i + 1]);
    odd[i] = _mm512_unpackhi_epi64(rows[2 * i], rows[2 * i + 1]);
  }
  const auto store = [columns](const __m512i* pairs, int first) __attribute__((always_inline)) {
    const __m512i low[2] = {_mm512_shuffle_i64x2(pairs[0], pairs[1], 0x44),
                            _mm512_shuffle_i64x2(pairs[2], pairs[3], 0x44)};
    const __m512i high[2] = {_mm512_shuffle_i64x2(pairs[0], pairs[1], 0xee),
                             _mm512_shuffle_i64x2(pairs[2], pairs[3], 0xee)};
    _mm512_store_si512(columns + 64 * first, _mm512_shuffle_i64x2(low[0], low[1], 0x88));
    _mm512_store_si512(columns + 64 * (first + 2), _mm512_shuffle_i64x2(low[0], low[1], 0xdd));
    _mm512_store_si512(columns + 64 * (first + 4), _mm512_shuffle_i64x2(high[0], high[1], 0x88));
    _mm512_store_si512(columns + 64 * (first + 6), _mm512_shuffle_i64x2(high[0], high[1], 0xdd));
  };
  store(even, 0);
  store(odd, 1);
}

/// With kHalves, for at most 8 rows, the low parts take the positions of the other 8 rows' high parts, and
/// magnitudes are stored in columns of eight bytes.
template <bool kHalves>
inline void PackQueries(const KeySummaryEstimates& t, int group, Queries* m) {
  float inverses[2][kScoreGroup] = {};
  const int left = t.rows - group * kScoreGroup, rows = left < kScoreGroup ? left : kScoreGroup;
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i < kScoreGroup; ++i) {
      m->scales[group][part][i] = m->reaches[group][part][i] = m->norms[group][part][i] = 0;
      if (i < rows) MeasurePart(t, group, i, part, &inverses[part][i], m);
    }
  }
  for (int s = 0; s < m->ends[2]; ++s) {
    const int part = s < m->ends[1] ? 0 : 1;
    __m512i high[kScoreGroup], low[kScoreGroup], size[kScoreGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kScoreGroup; ++i) {
      high[i] = low[i] = size[i] = _mm512_setzero_si512();
      if (i >= rows) continue;  // its scores are undefined
      const V inverse = Set(inverses[part][i]);
      __m512i a[4], b[4], c[4];
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const V x = Mul(LoadQuery(t, group * kScoreGroup + i, m->steps[s], quarter), inverse);
        a[quarter] = ToInts(x);
        b[quarter] = ToInts(Mul(Sub(x, ToFloats(a[quarter])), Set(kFine)));
        c[quarter] = ToInts(Mul(Abs(x), Set(2)));
      }
      high[i] = PackBytes<true>(a);
      low[i] = PackBytes<true>(b);
      size[i] = PackBytes<false>(c);
    }
    if constexpr (kHalves) {
#pragma GCC unroll 8
      for (int i = 0; i < kScoreGroup / 2; ++i) high[kScoreGroup / 2 + i] = low[i];
    } else {
      StoreColumns(low, m->queries[group][s][1]);
    }
    StoreColumns(high, m->queries[group][s][0]);
    if (t.share == 0) continue;
    if constexpr (kHalves) {
      StoreColumnsOfEights(size, m->queries[group][s][2]);
    } else {
      StoreColumns(size, m->queries[group][s][2]);
    }
  }
}

/// Sets or adds a part's scores [16] of one summary and group: `high` and `low` are its products with the
/// center, `sizes` those with radii.
template <bool kSpread, bool kAdd>
inline void AddPart(const KeySummaryHeader& header, int group, int part, const Queries& m, __m512i high,
                    __m512i low, __m512i sizes, float* scores) {
  const V fine = Fma(Set(kFine), ToFloats(high), ToFloats(low));
  V x = Mul(Mul(fine, Load(m.scales[group][part])), Set(header.center_scale[part]));
  if constexpr (kAdd) x = Add(Load(scores), x);
  if constexpr (kSpread) {
    const V box = Mul(Mul(ToFloats(sizes), Load(m.reaches[group][part])), Set(header.radius_scale[part]));
    x = Add(x, Min(Mul(Load(m.norms[group][part]), Set(header.ball[part])), box));
  }
  Store(scores, x);
}

}  // namespace
}  // namespace moesaic::kernels::cpu
