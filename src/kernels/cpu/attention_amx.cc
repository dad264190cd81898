// Attention over bfloat16 or int8 keys and values on AMX tiles.
//
// Query rows are taken in groups of 16, which are the columns of a tile; the last group has idle columns.
// Then for the keys of one run, with q and the weights p each split into two bfloat16, high + low:
//
//   S [key][row] = K (q_high + q_low)^T     A tiles are keys as they lie in the cache
//   p = exp(S - max)                        down the lanes, each its row
//   O [row][dim] = (p_high + p_low) V       B tiles are values, two keys interleaved
//
// Sums are f32 and what the split leaves out is below 2^-18 of q or p, so results are as good as those of f32
// arithmetic on the same keys and values up to 64 roundings.
//
// int8 becomes bfloat16 on its way into the tiles, which holds it exactly; scales of keys multiply S, those
// of values p before it is split.
//
// A row's arithmetic depends on nothing but the row: a column of S and a row of O never meet another, a key
// that a row doesn't see has weight 0 and adds 0, and sums over keys are taken in the same order always.
#include "kernels/cpu/amx_tiles-inl.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd_avx512-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kRunKeys = 64;
constexpr int kGroup = 16;        // rows of a group
constexpr int kStep = 32;         // bfloat16 in a row of a tile
constexpr int kMostKeyDim = 576;  // DeepSeek's latent and rope part
constexpr int kMostValueDim = 512;
constexpr int kValueTiles = kMostValueDim / kGroup;
constexpr int kSums = 4;  // partial sums of a row's weights: enough to hide an addition's latency

/// Memory of one call: the values of the run, and one group at a time.
struct alignas(64) Memory {
  std::byte values[kRunKeys / kStep][kValueTiles][kTileBytes];  // [step][tile][key pair][16 dims][2]
  std::byte queries[2][kMostKeyDim / kStep][kTileBytes];        // [high, low][step][dim pair][row][2]
  float products[2][kRunKeys][kGroup];                          // S of the high and of the low part
  float rest_products[2][kRunKeys][kGroup];                     // int8: of the dimensions from key_split on
  float scores[kRunKeys][kGroup];                               // S, then p
  std::byte weights[2][kRunKeys / kStep][kTileBytes];           // [high, low][step][row][32 keys]
  float out[2][2][kTileRows][kGroup];                           // two value tiles at a time
  float keep[kGroup];
  std::byte keys[kRunKeys][2 * kMostKeyDim];  // int8: of the run, as bfloat16
};

/// Keys as A tiles are loaded from them.
struct Rows {
  const std::byte* first;
  int64_t stride;  // bytes
};

/// What was written before is in memory now: GCC doesn't know that tile loads read.
inline void Written() { __asm__ volatile("" : : : "memory"); }

/// Rows become columns, of 32 bits each.
inline void Transpose16(__m512i* r) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
  }
}

/// The nearest bfloat16, in the upper half of each lane. NaN may be lost; RoundingError then has it.
inline __m512i UpperBF16(V x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000U)));
}
inline V RoundingError(V x, __m512i upper) { return Sub(x, _mm512_castsi512_ps(upper)); }

/// Lane i: even's bfloat16 below odd's.
inline __m512i Pairs(__m512i even, __m512i odd) { return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd); }

/// Even and odd dimensions of 32 floats.
inline void LoadPairs(const float* p, V* even, V* odd) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const V a = Load(p), b = Load(p + 16);
  *even = _mm512_permutex2var_ps(a, evens, b);
  *odd = _mm512_permutex2var_ps(a, odds, b);
}

/// Stores 16 rows of 16 bfloat16 pairs as a B tile of each part.
inline void StoreColumns(__m512i* high, __m512i* low, std::byte* high_tile, std::byte* low_tile) {
  Transpose16(high);
  Transpose16(low);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_store_si512(high_tile + 64 * i, high[i]);
    _mm512_store_si512(low_tile + 64 * i, low[i]);
  }
}

inline void PackQueries(const AttentionTile& t, int first, int rows, Memory* m) {
  for (int s = 0; s < t.key_dim / kStep; ++s) {
    __m512i high[kGroup], low[kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) {
      high[i] = low[i] = _mm512_setzero_si512();
      if (i >= rows) continue;
      V even, odd;
      LoadPairs(t.q + (first + i) * t.q_stride + kStep * s, &even, &odd);
      const __m512i upper_even = UpperBF16(even), upper_odd = UpperBF16(odd);
      high[i] = Pairs(upper_even, upper_odd);
      low[i] = Pairs(UpperBF16(RoundingError(even, upper_even)), UpperBF16(RoundingError(odd, upper_odd)));
    }
    StoreColumns(high, low, m->queries[0][s], m->queries[1][s]);
  }
}

/// Sixteen int8 as floats, which have them in their upper halves.
inline __m512i Widen(__m128i x) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))); }

/// Makes bfloat16 of keys [0, keys), rounded up to 32, and asks for the next run's.
inline Rows WidenKeys(const AttentionTile& t, int keys, int64_t next, Memory* m) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(kUpper);
  const int rows = (keys + kStep - 1) / kStep * kStep;
  for (int key = 0; key < rows; ++key) {
    const std::byte* from = t.keys + key * t.key_stride;
    for (int d = 0; d < t.key_dim; d += kStep) {
      if (next != 0 && d % 64 == 0) _mm_prefetch(from + d + next, _MM_HINT_T1);
      const __m512i a = Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + d)));
      const __m512i b = Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + d + 16)));
      _mm512_store_si512(m->keys[key] + 2 * d, _mm512_permutex2var_epi16(a, upper, b));
    }
  }
  return {.first = m->keys[0], .stride = sizeof(m->keys[0])};
}

/// Interleaves int8 values as PackValues does others.
inline void PackInt8Values(const AttentionTile& t, int keys, int64_t next, Memory* m) {
  const int steps = (keys + kStep - 1) / kStep;
  for (int key = 0; key < steps * kStep; key += 2) {
    const __mmask16 even = key < keys ? 0xffff : 0, odd = key + 1 < keys ? 0xffff : 0;
    const std::byte* values = t.values + key * t.value_stride;
    std::byte* to = m->values[key / kStep][0] + key % kStep / 2 * 64;
    for (int d = 0; d < t.value_dim; d += kGroup, to += kTileBytes) {
      const std::byte* at = values + d;
      if (next != 0 && d % 64 == 0) {
        _mm_prefetch(at + next, _MM_HINT_T1);
        _mm_prefetch(at + t.value_stride + next, _MM_HINT_T1);
      }
      const __m512i a = Widen(_mm_maskz_loadu_epi8(even, at));
      const __m512i b = Widen(_mm_maskz_loadu_epi8(odd, at + t.value_stride));
      _mm512_store_si512(to, Pairs(a, b));
    }
  }
}

/// Asks for 64 floats.
inline void PrefetchScales(const float* scales, int64_t next) {
  for (int i = 0; i < 4; ++i) {
    _mm_prefetch(reinterpret_cast<const std::byte*>(scales) + next + 64 * i, _MM_HINT_T1);
  }
}

/// Interleaves the values of keys [0, keys) two by two, zeros from there to the end of a step: values that no
/// row sees may be anything. Asks for the next run's values on the way.
inline void PackValues(const AttentionTile& t, int keys, int64_t next, Memory* m) {
  alignas(64) static constexpr uint16_t kOrder[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i first = _mm512_load_si512(kOrder[0]), second = _mm512_load_si512(kOrder[1]);
  const int steps = (keys + kStep - 1) / kStep;
  for (int key = 0; key < steps * kStep; key += 2) {
    const __mmask32 even = key < keys ? ~0U : 0, odd = key + 1 < keys ? ~0U : 0;
    const std::byte* values = t.values + key * t.value_stride;
    std::byte* to = m->values[key / kStep][0] + key % kStep / 2 * 64;
    for (int d = 0; d < t.value_dim; d += kStep, to += 2 * kTileBytes) {
      const __mmask32 dims = t.value_dim - d < kStep ? 0xffffU : ~0U;
      const std::byte* at = values + 2 * d;
      if (next != 0) {
        _mm_prefetch(at + next, _MM_HINT_T1);
        _mm_prefetch(at + t.value_stride + next, _MM_HINT_T1);
      }
      const __m512i a = _mm512_maskz_loadu_epi16(even & dims, at);
      const __m512i b = _mm512_maskz_loadu_epi16(odd & dims, at + t.value_stride);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, first, b));
      if (dims == ~0U) _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(a, second, b));
    }
  }
}

/// The products of keys [0, keys), rounded up to 32, with the group's queries over dimensions [from, to).
inline void Multiply(const Rows& k, int keys, int from, int to, int64_t next, const Memory& m,
                     float (*products)[kRunKeys][kGroup]) {
  Written();
  for (int key = 0; key < keys; key += 2 * kTileRows) {
    const std::byte* k0 = k.first + key * k.stride;
    const std::byte* k1 = k0 + kTileRows * k.stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = from / kStep; s < to / kStep; ++s) {
      _tile_loadd(6, m.queries[0][s], 64);
      _tile_loadd(4, k0 + 64 * s, k.stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, k1 + 64 * s, k.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, m.queries[1][s], 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      if (next == 0) continue;
      for (int i = 0; i < kTileRows; ++i) {
        _mm_prefetch(k0 + next + i * k.stride + 64 * s, _MM_HINT_T1);
        _mm_prefetch(k1 + next + i * k.stride + 64 * s, _MM_HINT_T1);
      }
    }
    _tile_stored(0, products[0][key], 64);
    _tile_stored(1, products[1][key], 64);
    _tile_stored(2, products[0][key + kTileRows], 64);
    _tile_stored(3, products[1][key + kTileRows], 64);
  }
}

inline V ScoreOf(const AttentionTile& t, bool int8, int key, const Memory& m) {
  const V products = Add(Load(m.products[0][key]), Load(m.products[1][key]));
  if (!int8) return products;
  const V score = Mul(products, Set(t.key_scales[key]));
  if (t.key_split == t.key_dim) return score;
  return Fma(Add(Load(m.rest_products[0][key]), Load(m.rest_products[1][key])), Set(t.rest_scales[key]),
             score);
}

/// Turns products into weights, and updates max, sum and keep. Weights from `keys` to the end of a step are
/// 0.
inline void Softmax(const AttentionTile& t, int first, int rows, int keys, VI visible, Memory* m) {
  const V nothing = Set(-__builtin_inff());
  const V before = _mm512_mask_loadu_ps(nothing, FirstLanes(rows), t.max + first);
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  V max = before;
  for (int j = 0; j < keys; ++j) {
    const V seen = SelectLess(SetInts(j), visible, ScoreOf(t, int8, j, *m), nothing);
    Store(m->scores[j], seen);
    max = Max(max, seen);
  }
  // A row that has seen no key yet has maximum -inf; a finite stand-in keeps -inf - -inf from becoming NaN.
  const V base = Max(Set(-3.0e38F), max);
  V sum[kSums] = {Zero(), Zero(), Zero(), Zero()};
  for (int j = 0; j < keys; ++j) {
    const V score = Load(m->scores[j]);
    const V weight = SelectLess(SetInts(j), visible, Exp(Sub(score, base)), Zero());
    Store(m->scores[j], int8 ? Mul(weight, Set(t.value_scales[j])) : weight);
    sum[j % kSums] = Add(sum[j % kSums], weight);
  }
  for (int j = keys; j % kStep != 0; ++j) Store(m->scores[j], Zero());
  const V keep = Exp(Sub(before, base));
  _mm512_store_ps(m->keep, keep);
  const V total = Add(Add(sum[0], sum[2]), Add(sum[1], sum[3]));
  const __mmask16 mask = rows < kGroup ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
  _mm512_mask_storeu_ps(t.max + first, mask, max);
  _mm512_mask_storeu_ps(t.sum + first, mask, Fma(_mm512_maskz_loadu_ps(mask, t.sum + first), keep, total));
}

/// Lays the weights out as A tiles.
inline void PackWeights(int steps, Memory* m) {
  for (int s = 0; s < steps; ++s) {
    __m512i high[kGroup], low[kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const V even = Load(m->scores[kStep * s + 2 * i]), odd = Load(m->scores[kStep * s + 2 * i + 1]);
      const __m512i upper_even = UpperBF16(even), upper_odd = UpperBF16(odd);
      high[i] = Pairs(upper_even, upper_odd);
      low[i] = Pairs(UpperBF16(RoundingError(even, upper_even)), UpperBF16(RoundingError(odd, upper_odd)));
    }
    StoreColumns(high, low, m->weights[0][s], m->weights[1][s]);
  }
}

/// acc = acc * keep + p V for the group's rows.
inline void AddValues(const AttentionTile& t, int first, int rows, int steps, Memory* m) {
  Written();
  _tile_loadd(4, m->weights[0][0], 64);
  _tile_loadd(5, m->weights[1][0], 64);
  if (steps > 1) {
    _tile_loadd(6, m->weights[0][1], 64);
    _tile_loadd(7, m->weights[1][1], 64);
  }
  for (int tile = 0; tile < t.value_dim / kGroup; ++tile) {
    auto& out = m->out[tile % 2];
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, m->values[0][tile], 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_dpbf16ps(1, 5, 2);
    if (steps > 1) {
      _tile_loadd(3, m->values[1][tile], 64);
      _tile_dpbf16ps(0, 6, 3);
      _tile_dpbf16ps(1, 7, 3);
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    float* acc = t.acc + first * t.acc_stride + kGroup * tile;
    for (int i = 0; i < rows; ++i, acc += t.acc_stride) {
      Store(acc, Fma(Load(acc), Set(m->keep[i]), Add(Load(out[0][i]), Load(out[1][i]))));
    }
  }
}

inline int Largest(const int* visible, int rows) {
  int most = 0;
  for (int i = 0; i < rows; ++i) most = visible[i] > most ? visible[i] : most;
  return most;
}

}  // namespace

void AttentionAmx(const AttentionTile& t) {
  const bool fits = t.key_dim % kStep == 0 && t.key_dim <= kMostKeyDim && t.value_dim % kGroup == 0 &&
                    t.value_dim <= kMostValueDim;
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  if (t.kv_dtype == tensor::DType::kF32 || !fits || (int8 && t.key_split % kStep != 0)) {
    return AttentionAvx512(t);
  }
  const int keys = Largest(t.visible, t.rows);
  if (keys == 0) return;
  Memory m;
  const bool shared = t.values == t.keys;
  Rows k = {.first = t.keys, .stride = t.key_stride};
  if (int8) {
    k = WidenKeys(t, keys, t.next, &m);
    PackInt8Values(t, keys, shared ? 0 : t.next, &m);
    if (t.next != 0) {
      PrefetchScales(t.key_scales, t.next);
      PrefetchScales(shared ? t.rest_scales : t.value_scales, t.next);
    }
  } else {
    PackValues(t, keys, shared ? 0 : t.next, &m);
  }
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  for (int first = 0; first < t.rows; first += kGroup) {
    const int rows = t.rows - first < kGroup ? t.rows - first : kGroup;
    const int seen = Largest(t.visible + first, rows);
    if (seen == 0) continue;
    const __mmask16 mask = rows < kGroup ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
    const VI visible = _mm512_maskz_loadu_epi32(mask, t.visible + first);
    const int steps = (seen + kStep - 1) / kStep;
    PackQueries(t, first, rows, &m);
    const int split = int8 ? t.key_split : t.key_dim;
    Multiply(k, seen, 0, split, first == 0 && !int8 ? t.next : 0, m, m.products);
    if (split < t.key_dim) Multiply(k, seen, split, t.key_dim, 0, m, m.rest_products);
    Softmax(t, first, rows, seen, visible, &m);
    PackWeights(steps, &m);
    AddValues(t, first, rows, steps, &m);
  }
  _tile_release();
}

}  // namespace moesaic::kernels::cpu
