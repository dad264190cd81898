// Attention over bfloat16 or int8 keys and values on AMX tiles.
//
// Query rows are taken in groups of 16, which are the columns of a tile; the last group has idle columns.
// Values are packed once a call, queries once a group. Then, for all keys of the call,
//
//   S [key][row] = K (q_high + q_low)^T     A tiles are keys as they lie in the cache
//   p = bfloat16(exp(S - max))              down the lanes, each its row
//   O [row][dim] = p V                      B tiles are values, two keys interleaved
//
// with q split into two bfloat16, which leaves out 2^-18 of it. p is rounded to one, by 2^-9 at most, and the
// sum that O is divided by is of the rounded ones, so what remains is the rounding of an average. Sums are
// f32.
//
// int8 becomes bfloat16 on its way into the tiles, which holds it exactly; scales of keys multiply S, those
// of values p before it is rounded (the sum is then of the unrounded ones).
//
// A row's arithmetic depends on nothing but the row: a column of S and a row of O never meet another, a key
// that a row doesn't see has weight 0 and adds 0, and sums over keys are taken in the same order always.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd_avx512-inl.h"
// After the lanes:
#include "kernels/cpu/amx_bf16-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kRunKeys = 64;
constexpr int kGroup = 16;        // rows of a group
constexpr int kMostKeyDim = 576;  // DeepSeek's latent and rope part
constexpr int kMostValueDim = 512;
constexpr int kValueTiles = kMostValueDim / kGroup;
constexpr int kSums = 4;  // partial sums of a row's weights: enough to hide an addition's latency

constexpr int kKeys = kAttentionRuns * kRunKeys;
constexpr int kSteps = kKeys / kStep;

/// Memory of one call: the values of all runs, and one group at a time.
struct alignas(64) Memory {
  std::byte values[kSteps][kValueTiles][kTileBytes];      // [step][tile][key pair][16 dims][2]
  std::byte queries[2][kMostKeyDim / kStep][kTileBytes];  // [high, low][step][dim pair][row][2]
  float scores[kKeys][kGroup];                            // S
  float rest_scores[kKeys][kGroup];                       // int8: of the dimensions from key_split on
  std::byte weights[kSteps][kTileBytes];                  // [step][row][32 keys]
  float out[kGroup][kMostValueDim];                       // O of a group with idle rows
  std::byte keys[kKeys][2 * kMostKeyDim];                 // int8: as bfloat16
};

/// Keys as A tiles are loaded from them.
struct Rows {
  const std::byte* first;
  int64_t stride;  // bytes
};

/// Lines that will be wanted later, asked for in this order: the processor's own prefetcher takes them for a
/// stream and helps.
struct Ahead {
  const std::byte* first;
  int lines;
};

/// One run of 64 keys: how many of them any row sees, and how far to the keys that come next.
struct Run {
  const std::byte* keys;
  int seen;
  int64_t next;  // bytes, or 0
};

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
    StoreColumns(high, m->queries[0][s]);
    StoreColumns(low, m->queries[1][s]);
  }
}

/// Makes bfloat16 of the run's seen keys, rounded up to 32, from row `to` on, and asks for the next run's.
inline void WidenKeys(const AttentionTile& t, const Run& run, int to, Memory* m) {
  const int rows = (run.seen + kStep - 1) / kStep * kStep;
  for (int key = 0; key < rows; ++key) {
    const std::byte* from = run.keys + key * t.key_stride;
    for (int d = 0; d < t.key_dim; d += kStep) {
      if (run.next != 0 && d % 64 == 0) _mm_prefetch(from + d + run.next, _MM_HINT_T1);
      const auto* keys = reinterpret_cast<const int8_t*>(from + d);
      _mm512_store_si512(m->keys[to + key] + 2 * d, Narrow(Load(keys), Load(keys + 16)));
    }
  }
}

/// Interleaves int8 values as PackValues does others.
inline void PackInt8Values(const AttentionTile& t, const Run& run, int step, int64_t next, Memory* m) {
  const int steps = (run.seen + kStep - 1) / kStep;
  for (int key = 0; key < steps * kStep; key += 2) {
    const __mmask16 even = key < run.seen ? 0xffff : 0, odd = key + 1 < run.seen ? 0xffff : 0;
    const std::byte* values = run.keys + t.value_offset + key * t.value_stride;
    std::byte* to = m->values[step + key / kStep][0] + key % kStep / 2 * 64;
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
inline void PrefetchScales(const std::byte* scales) {
  for (int i = 0; i < 4; ++i) _mm_prefetch(scales + 64 * i, _MM_HINT_T1);
}

/// Interleaves the run's seen values two by two, zeros from there to the end of a step: values that no row
/// sees may be anything. They become steps `step`, ... Asks for the next run's values on the way.
inline void PackValues(const AttentionTile& t, const Run& run, int step, int64_t next, Memory* m) {
  alignas(64) static constexpr uint16_t kOrder[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i first = _mm512_load_si512(kOrder[0]), second = _mm512_load_si512(kOrder[1]);
  const int steps = (run.seen + kStep - 1) / kStep;
  for (int key = 0; key < steps * kStep; key += 2) {
    const __mmask32 even = key < run.seen ? ~0U : 0, odd = key + 1 < run.seen ? ~0U : 0;
    const std::byte* values = run.keys + t.value_offset + key * t.value_stride;
    std::byte* to = m->values[step + key / kStep][0] + key % kStep / 2 * 64;
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

/// The products of 16 kTiles keys with the group's queries over dimensions [from, to). A tile of keys, which
/// comes from the second-level cache, is loaded once for both halves of the queries; a sum that waits for its
/// first half lets the next tiles' go ahead.
template <int kTiles>
inline void Multiply(const Rows& k, int from, int to, const Ahead& ahead, const Memory& m,
                     float (*products)[kGroup]) {
  static_assert(kTiles == 2 || kTiles == 4);
  Written();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t tile = kTileRows * k.stride;
  const int steps = (to - from) / kStep;
  for (int s = from / kStep; s < to / kStep; ++s) {
    const std::byte* keys = k.first + 64 * s;
    _tile_loadd(4, m.queries[0][s], 64);
    _tile_loadd(5, m.queries[1][s], 64);
    _tile_loadd(6, keys, k.stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, keys + tile, k.stride);
    _tile_dpbf16ps(1, 7, 4);
    _tile_dpbf16ps(0, 6, 5);
    _tile_dpbf16ps(1, 7, 5);
    if constexpr (kTiles == 4) {
      _tile_loadd(6, keys + 2 * tile, k.stride);
      _tile_dpbf16ps(2, 6, 4);
      _tile_loadd(7, keys + 3 * tile, k.stride);
      _tile_dpbf16ps(3, 7, 4);
      _tile_dpbf16ps(2, 6, 5);
      _tile_dpbf16ps(3, 7, 5);
    }
    const int done = s - from / kStep;
    for (int i = ahead.lines * done / steps; i < ahead.lines * (done + 1) / steps; ++i) {
      _mm_prefetch(ahead.first + int64_t{64} * i, _MM_HINT_T1);
    }
  }
  _tile_stored(0, products[0], 64);
  _tile_stored(1, products[kTileRows], 64);
  if constexpr (kTiles == 4) {
    _tile_stored(2, products[2 * kTileRows], 64);
    _tile_stored(3, products[3 * kTileRows], 64);
  }
}

/// Scores of the run's keys [0, seen), and of some more.
inline void ScoreRun(const AttentionTile& t, const Rows& k, int seen, const Ahead& next, int first_key,
                     Memory* m) {
  const auto multiply = [&](int from, int to, const Ahead& ahead, float(*products)[kGroup]) {
    if (seen > 2 * kTileRows) {
      Multiply<4>(k, from, to, ahead, *m, products + first_key);
    } else {
      Multiply<2>(k, from, to, ahead, *m, products + first_key);
    }
  };
  const int split = t.kv_dtype == tensor::DType::kI8 ? t.key_split : t.key_dim;
  multiply(0, split, next, m->scores);
  if (split < t.key_dim) multiply(split, t.key_dim, {}, m->rest_scores);
}

/// int8: multiplies the scores of a run by its scales.
inline void ScaleScores(const AttentionTile& t, const std::byte* keys, int seen, int first_key, Memory* m) {
  const auto* scales = reinterpret_cast<const float*>(keys + t.key_scales);
  const auto* rest_scales = reinterpret_cast<const float*>(keys + t.rest_scales);
  for (int j = 0; j < seen; ++j) {
    float* score = m->scores[first_key + j];
    V scaled = Mul(Load(score), Set(scales[j]));
    if (t.key_split < t.key_dim) {
      scaled = Fma(Load(m->rest_scores[first_key + j]), Set(rest_scales[j]), scaled);
    }
    Store(score, scaled);
  }
}

inline float ValueScale(const AttentionTile& t, int key) {
  const std::byte* scales = t.runs[key / kRunKeys] + t.value_scales;
  return reinterpret_cast<const float*>(scales)[key % kRunKeys];
}

/// Turns scores into weights as A tiles, and writes max and sum. Weights from `keys` to the end of a step are
/// 0.
inline void Softmax(const AttentionTile& t, int first, int rows, int keys, VI visible, Memory* m) {
  const V nothing = Set(-__builtin_inff());
  V max = nothing;
  for (int j = 0; j < keys; ++j) {
    max = Max(max, SelectLess(SetInts(j), visible, Load(m->scores[j]), nothing));
  }
  // A row that sees no key has maximum -inf; a finite stand-in keeps -inf - -inf from becoming NaN.
  const V base = Max(Set(-3.0e38F), max);
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  V sum[kSums] = {Zero(), Zero(), Zero(), Zero()};
  const auto weight_of = [&](int j) {  // as bfloat16 in the upper half
    if (j >= keys) return _mm512_setzero_si512();
    const V p = SelectLess(SetInts(j), visible, Exp(Sub(Load(m->scores[j]), base)), Zero());
    const __m512i rounded = UpperBF16(int8 ? Mul(p, Set(ValueScale(t, j))) : p);
    sum[j % kSums] = Add(sum[j % kSums], int8 ? p : _mm512_castsi512_ps(rounded));
    return rounded;
  };
  for (int s = 0; s * kStep < keys; ++s) {
    __m512i pairs[kGroup];
#pragma GCC unroll 2
    for (int i = 0; i < kGroup; ++i) {
      const __m512i even = weight_of(kStep * s + 2 * i);
      pairs[i] = Pairs(even, weight_of(kStep * s + 2 * i + 1));
    }
    StoreColumns(pairs, m->weights[s]);
  }
  const __mmask16 mask = rows < kGroup ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
  _mm512_mask_storeu_ps(t.max + first, mask, max);
  _mm512_mask_storeu_ps(t.sum + first, mask, Add(Add(sum[0], sum[2]), Add(sum[1], sum[3])));
}

/// acc = p V for 16 rows and kTiles value tiles from first_tile on.
template <int kTiles>
inline void AddValues(float* acc, int64_t acc_stride, int first_tile, int steps, const Memory& m) {
  static_assert(kTiles == 1 || kTiles == 4);
  Written();
  _tile_zero(0);
  if constexpr (kTiles == 4) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int s = 0; s < steps; ++s) {
    const auto* values = &m.values[s][first_tile];
    _tile_loadd(4, m.weights[s], 64);
    _tile_loadd(6, values[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTiles == 4) {
      _tile_loadd(7, values[1], 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, values[2], 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, values[3], 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  const int64_t stride = acc_stride * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, acc, stride);
  if constexpr (kTiles == 4) {
    _tile_stored(1, acc + kGroup, stride);
    _tile_stored(2, acc + 2 * kGroup, stride);
    _tile_stored(3, acc + 3 * kGroup, stride);
  }
  Written();
}

/// All value dimensions of a group, of whose 16 rows `rows` are real.
inline void AddAllValues(const AttentionTile& t, int first, int rows, int steps, Memory* m) {
  const bool whole = rows == kGroup;  // else the tiles are stored aside: acc ends with the last real row
  float* acc = whole ? t.acc + first * t.acc_stride : m->out[0];
  const int64_t stride = whole ? t.acc_stride : kMostValueDim;
  const int tiles = t.value_dim / kGroup;
  int tile = 0;
  for (; tile + 4 <= tiles; tile += 4) AddValues<4>(acc + tile * kGroup, stride, tile, steps, *m);
  for (; tile < tiles; ++tile) AddValues<1>(acc + tile * kGroup, stride, tile, steps, *m);
  if (whole) return;
  for (int i = 0; i < rows; ++i) {
    float* to = t.acc + (first + i) * t.acc_stride;
    for (int d = 0; d < t.value_dim; d += kGroup) Store(to + d, Load(m->out[i] + d));
  }
}

inline int Largest(const int* visible, int rows) {
  int most = 0;
  for (int i = 0; i < rows; ++i) most = visible[i] > most ? visible[i] : most;
  return most;
}

/// Packs values, and keys where they need it; fills `runs` as far as keys are seen.
inline void PackRuns(const AttentionTile& t, int keys, Run* runs, Memory* m) {
  for (int i = 0; i * kRunKeys < keys; ++i) {
    const std::byte* now = t.runs[i];
    const int left = keys - i * kRunKeys;
    const std::byte* next = left <= kRunKeys ? t.after[0] : t.runs[i + 1];
    const int step = i * kRunKeys / kStep;
    Run& run = runs[i];
    run = {.keys = now, .seen = left < kRunKeys ? left : kRunKeys, .next = next == nullptr ? 0 : next - now};
    const int64_t next_values = t.value_offset == 0 ? 0 : run.next;
    if (t.kv_dtype != tensor::DType::kI8) {
      PackValues(t, run, step, next_values, m);
      continue;
    }
    WidenKeys(t, run, i * kRunKeys, m);
    PackInt8Values(t, run, step, next_values, m);
    if (run.next == 0) continue;
    PrefetchScales(next + t.key_scales);
    PrefetchScales(next + (t.value_offset == 0 ? t.rest_scales : t.value_scales));
  }
}

/// What a group asks for while it is multiplied with run i. Once is enough, so the first does; but for
/// latents, whose values are the keys and have all been packed by then, each group asks for its part of the
/// run that takes this one's place in the next call: a memory's worth of latency is then behind all groups'
/// work.
inline Ahead AheadOf(const AttentionTile& t, const Run& run, int i, int first) {
  const int lines = static_cast<int>(kRunKeys * t.key_stride / 64);
  if (t.value_offset != 0) return {run.keys + run.next, first == 0 && run.next != 0 ? lines : 0};
  if (t.after[i] == nullptr) return {};
  const int groups = (t.rows + kGroup - 1) / kGroup, group = first / kGroup;
  const int from = lines * group / groups;
  return {t.after[i] + int64_t{64} * from, lines * (group + 1) / groups - from};
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
  Memory m;
  Run runs[kAttentionRuns];
  PackRuns(t, keys, runs, &m);
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  for (int first = 0; first < t.rows; first += kGroup) {
    const int rows = t.rows - first < kGroup ? t.rows - first : kGroup;
    const int seen = Largest(t.visible + first, rows);
    const __mmask16 mask = rows < kGroup ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
    PackQueries(t, first, rows, &m);
    for (int i = 0; i * kRunKeys < seen; ++i) {
      const int left = seen - i * kRunKeys;
      const int run_seen = left < kRunKeys ? left : kRunKeys;
      const Rows k = int8 ? Rows{m.keys[i * kRunKeys], sizeof(m.keys[0])} : Rows{runs[i].keys, t.key_stride};
      ScoreRun(t, k, run_seen, int8 ? Ahead{} : AheadOf(t, runs[i], i, first), i * kRunKeys, &m);
      Written();
      if (int8) ScaleScores(t, runs[i].keys, run_seen, i * kRunKeys, &m);
    }
    Softmax(t, first, rows, seen, _mm512_maskz_loadu_epi32(mask, t.visible + first), &m);
    AddAllValues(t, first, rows, (seen + kStep - 1) / kStep, &m);
  }
  _tile_release();
}

}  // namespace moesaic::kernels::cpu
