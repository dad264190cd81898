// Attention over bfloat16 or int8 keys and values on AMX tiles.
//
// Query rows are taken in groups of R = 16, or 8 when there are no more, which are the columns of a tile; the
// last group may have idle columns. For all keys of the call,
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
// Several groups go over a part of the keys or values together, so that it comes from the second-level cache
// once: 64 keys x 192 dimensions (24 KB), of which S is summed up in memory, and 64 dimensions of all values
// (32 KB), which are packed just before. One group, as in decode with grouped queries, meets everything once:
// it packs values by steps of 32 keys.
//
// A row's arithmetic depends on nothing but the row: a column of S and a row of O never meet another, a key
// that a row doesn't see has weight 0 and adds 0, and sums over keys are taken in the same order always, for
// either R.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd_avx512-inl.h"
// After the lanes:
#include "kernels/cpu/attention_amx-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kSums = 4;        // partial sums of a row's weights: enough to hide an addition's latency
constexpr int kPartDims = 192;  // of keys, while several groups meet them

/// Memory of one call.
template <int R>
struct alignas(64) Memory {
  static constexpr int kGroups = R == 8 ? 1 : kAttentionRows / R;
  float scores[kGroups][kKeys][R];             // S
  float rest_scores[kGroups][kKeys][R];        // int8: of the dimensions from key_split on
  std::byte weights[kGroups][kSteps][R * 64];  // [step][row][32 keys]
  std::byte values[kSteps][kBlockTiles][kTileBytes];
  float out[R][kMostValueDim];                // O of a group with idle rows
  std::byte keys[kRunKeys][2 * kMostKeyDim];  // int8: of a run, as bfloat16
  std::byte queries[kGroups][kMostKeyDim * R * 4];
};

/// A call and what is found out about it once.
template <int R>
struct Work {
  const AttentionTile& t;
  Memory<R>* m;
  Stream* stream;
  std::byte* queries;  // [group][key_dim * R * 4]
  int groups;
  int seen[Memory<R>::kGroups];  // keys, by any row of the group
  int most;                      // by any row
};

/// Keys as A tiles are loaded from them.
struct Keys {
  const std::byte* first;
  int64_t stride;  // bytes
};

/// The products of 64 keys with a group's queries over dimensions [from, to), added to those that are there
/// if `add`.
template <int R>
inline void Multiply(const Keys& keys, const std::byte* queries, int from, int to, bool add, Stream* stream,
                     float (*products)[R]) {
  constexpr int kBytes = kTileRows * R * 4;
  constexpr int kStride = R * 4;
  Written();
  if (add) {
    _tile_loadd(0, products[0], kStride);
    _tile_loadd(1, products[kTileRows], kStride);
    _tile_loadd(2, products[2 * kTileRows], kStride);
    _tile_loadd(3, products[3 * kTileRows], kStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t tile = kTileRows * keys.stride;
  for (int s = from / kStep; s < to / kStep; ++s) {
    const std::byte* k = keys.first + 64 * s;
    const std::byte* q = queries + 2 * s * kBytes;
    _tile_loadd(4, q, kStride);
    _tile_loadd(5, q + kBytes, kStride);
    _tile_loadd(6, k, keys.stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, k + tile, keys.stride);
    _tile_dpbf16ps(1, 7, 4);
    _tile_dpbf16ps(0, 6, 5);
    _tile_dpbf16ps(1, 7, 5);
    _tile_loadd(6, k + 2 * tile, keys.stride);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(7, k + 3 * tile, keys.stride);
    _tile_dpbf16ps(3, 7, 4);
    _tile_dpbf16ps(2, 6, 5);
    _tile_dpbf16ps(3, 7, 5);
    stream->Ask();
  }
  _tile_stored(0, products[0], kStride);
  _tile_stored(1, products[kTileRows], kStride);
  _tile_stored(2, products[2 * kTileRows], kStride);
  _tile_stored(3, products[3 * kTileRows], kStride);
  Written();
}

/// Lane i is scales[i / R].
template <int R>
inline V KeyScales(const float* scales) {
  if constexpr (R == 16) return Set(scales[0]);
  return _mm512_insertf32x8(Set(scales[0]), _mm256_set1_ps(scales[1]), 1);
}

/// int8: multiplies a group's scores of a run by the keys' scales.
template <int R>
inline void ScaleScores(const AttentionTile& t, const std::byte* run, const float (*rest)[R],
                        float (*scores)[R]) {
  const auto* scales = reinterpret_cast<const float*>(run + t.key_scales);
  const auto* rest_scales = reinterpret_cast<const float*>(run + t.rest_scales);
  for (int j = 0; j < kRunKeys; j += kLanes / R) {
    V scaled = Mul(Load(scores[j]), KeyScales<R>(scales + j));
    if (t.key_split < t.key_dim) scaled = Fma(Load(rest[j]), KeyScales<R>(rest_scales + j), scaled);
    Store(scores[j], scaled);
  }
}

/// Scores of all groups with the keys that they see, and with some more.
template <int R>
inline void Score(const Work<R>& w) {
  const AttentionTile& t = w.t;
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  const int split = int8 ? t.key_split : t.key_dim;
  const int part = w.groups > 1 ? kPartDims : kMostKeyDim;
  for (int first = 0; first < w.most; first += kRunKeys) {
    const std::byte* run = t.runs[first / kRunKeys];
    Keys keys{run, t.key_stride};
    if (int8) {
      WidenKeys(t, run, w.most - first < kRunKeys ? w.most - first : kRunKeys, w.m->keys);
      keys = {w.m->keys[0], sizeof(w.m->keys[0])};
    }
    for (int from = 0, to = 0; from < t.key_dim; from = to) {
      const int begin = from < split ? 0 : split, end = from < split ? split : t.key_dim;
      to = end - from < part ? end : from + part;
      for (int g = 0; g < w.groups; ++g) {
        if (w.seen[g] <= first) continue;
        float(*products)[R] = (begin == 0 ? w.m->scores : w.m->rest_scores)[g] + first;
        Multiply<R>(keys, w.queries + int64_t{g} * t.key_dim * R * 4, from, to, from > begin, w.stream,
                    products);
      }
    }
    for (int g = 0; int8 && g < w.groups; ++g) {
      if (w.seen[g] > first) ScaleScores<R>(t, run, w.m->rest_scores[g] + first, w.m->scores[g] + first);
    }
  }
}

/// Turns a group's scores into weights as A tiles, and writes max and sum. Weights from `seen` to the end of
/// a step are 0.
template <int R>
inline void Softmax(const Work<R>& w, int g) {
  constexpr int kAtOnce = kLanes / R;  // keys of a vector
  const AttentionTile& t = w.t;
  const int first = g * R, rows = t.rows - first < R ? t.rows - first : R, seen = w.seen[g];
  const float(*scores)[R] = w.m->scores[g];
  alignas(64) int32_t limits[kLanes], lane_keys[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    limits[i] = i % R < rows ? t.visible[first + i % R] : 0;
    lane_keys[i] = i / R;
  }
  const VI visible = LoadInts(limits), lane_key = LoadInts(lane_keys);
  const V nothing = Set(-__builtin_inff());
  V most[kSums] = {nothing, nothing, nothing, nothing};
  for (int j = 0; j < seen;) {  // whole runs of scores are there
#pragma GCC unroll 4
    for (int u = 0; u < kSums; ++u, j += kAtOnce) {
      most[u] = Max(most[u], SelectLess(AddInts(lane_key, SetInts(j)), visible, Load(scores[j]), nothing));
    }
  }
  V max = Max(Max(most[0], most[1]), Max(most[2], most[3]));
  if constexpr (R == 8) max = Max(max, Swap<8>(max));
  // A row that sees no key has maximum -inf; a finite stand-in keeps -inf - -inf from becoming NaN.
  const V base = Max(Set(-3.0e38F), max);
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  V sum[kSums] = {Zero(), Zero(), Zero(), Zero()};
  const auto weight_of = [&](int j, V* total) {  // of kAtOnce keys, as bfloat16 in the upper half
    const VI key = AddInts(lane_key, SetInts(j));
    V p = SelectLess(key, visible, Exp(Sub(Load(scores[j]), base)), Zero());
    if (int8) {
      const auto* scales = reinterpret_cast<const float*>(t.runs[j / kRunKeys] + t.value_scales);
      *total = Add(*total, p);
      p = SelectLess(key, visible, Mul(p, KeyScales<R>(scales + j % kRunKeys)), Zero());
    }
    const __m512i rounded = UpperBF16(p);
    if (!int8) *total = Add(*total, _mm512_castsi512_ps(rounded));
    return rounded;
  };
  for (int s = 0; s * kStep < seen; ++s) {
    const int key = s * kStep;
    __m512i pairs[16];
    if constexpr (R == 16) {
#pragma GCC unroll 2
      for (int i = 0; i < 16; ++i) {
        const __m512i even = weight_of(key + 2 * i, &sum[2 * i % kSums]);
        pairs[i] = Pairs(even, weight_of(key + 2 * i + 1, &sum[(2 * i + 1) % kSums]));
        w.stream->Ask();
      }
      StoreColumns(pairs, w.m->weights[g][s]);
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < 16; ++i) {  // the halves of sum[0] and sum[1] are the others' four
        pairs[i] = weight_of(key + 2 * i, &sum[i % 2]);
        w.stream->Ask();
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        pairs[i] = Pairs(_mm512_shuffle_i32x4(pairs[i], pairs[8 + i], 0x44),
                         _mm512_shuffle_i32x4(pairs[i], pairs[8 + i], 0xee));
      }
      StoreColumns8(pairs, w.m->weights[g][s]);
    }
  }
  V total = Add(sum[0], sum[1]);
  if constexpr (R == 16) {
    total = Add(Add(sum[0], sum[2]), Add(sum[1], sum[3]));
  } else {
    total = Add(total, Swap<8>(total));
  }
  const __mmask16 mask = rows < 16 ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
  _mm512_mask_storeu_ps(t.max + first, mask, max);
  _mm512_mask_storeu_ps(t.sum + first, mask, total);
}

/// acc [R][acc_stride] = p V for a group and T tiles of values from dimension d on, which are packed already
/// or, with kPack, a step at a time.
template <int R, int T, bool kPack>
inline void AddValues(const Work<R>& w, int g, int d, float* acc, int64_t acc_stride) {
  static_assert(T == 1 || T == 4);
  const int steps = (w.seen[g] + kStep - 1) / kStep;
  _tile_zero(0);
  if constexpr (T == 4) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  if (kPack && steps > 0) PackValues<T>(w.t, 0, w.most, d, w.stream, w.m->values[0][0]);
  for (int s = 0; s < steps; ++s) {
    // The step after this one: when tiles load what was stored, it has then reached the cache.
    if (kPack && s + 1 < steps) {
      PackValues<T>(w.t, s + 1, w.most, d, w.stream, w.m->values[(s + 1) % 2][0]);
    }
    Written();
    const auto* values = w.m->values[kPack ? s % 2 : s];
    _tile_loadd(4, w.m->weights[g][s], 64);
    _tile_loadd(6, values[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (T == 4) {
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
  if constexpr (T == 4) {
    _tile_stored(1, acc + 16, stride);
    _tile_stored(2, acc + 32, stride);
    _tile_stored(3, acc + 48, stride);
  }
  Written();
}

/// All groups' sums over T tiles of values from dimension d on.
template <int R, int T>
inline void AddBlock(const Work<R>& w, int d) {
  const AttentionTile& t = w.t;
  const bool whole = t.rows % R == 0;  // else acc ends with the last group's last real row
  float* last = whole ? t.acc + (w.groups - 1) * R * t.acc_stride + d : w.m->out[0] + d;
  const int64_t last_stride = whole ? t.acc_stride : kMostValueDim;
  if (w.groups == 1) return AddValues<R, T, true>(w, 0, d, last, last_stride);
  for (int s = 0; s * kStep < w.most; ++s) PackValues<T>(t, s, w.most, d, w.stream, w.m->values[s][0]);
  for (int g = 0; g + 1 < w.groups; ++g) {
    AddValues<R, T, false>(w, g, d, t.acc + g * R * t.acc_stride + d, t.acc_stride);
  }
  AddValues<R, T, false>(w, w.groups - 1, d, last, last_stride);
}

template <int R>
inline void Run(const AttentionTile& t) {
  Memory<R> m;
  Work<R> w{t, &m, nullptr, t.packed_q == nullptr ? m.queries[0] : t.packed_q, (t.rows + R - 1) / R, {}, 0};
  for (int g = 0; g < w.groups; ++g) {
    w.seen[g] = 0;
    for (int i = g * R; i < t.rows && i < (g + 1) * R; ++i) {
      w.seen[g] = t.visible[i] > w.seen[g] ? t.visible[i] : w.seen[g];
    }
    w.most = w.seen[g] > w.most ? w.seen[g] : w.most;
    if (t.packed_q != nullptr && t.q_is_packed) continue;
    PackQueries<R>(t, g * R, w.queries + int64_t{g} * t.key_dim * R * 4);
  }
  const int tiles = t.value_dim / 16, blocks = tiles / kBlockTiles + tiles % kBlockTiles;
  const int runs = (w.most + kRunKeys - 1) / kRunKeys, steps = (w.most + kStep - 1) / kStep;
  Stream stream(t, w.groups * (runs * t.key_dim / kStep + steps * 16) + steps * 16 * blocks);
  w.stream = &stream;

  Configure({16, 16, 16, 16, 16, 16, 16, 16}, {4 * R, 4 * R, 4 * R, 4 * R, 4 * R, 4 * R, 64, 64});
  Score<R>(w);
  for (int g = 0; g < w.groups; ++g) Softmax<R>(w, g);
  if constexpr (R != 16) Configure({R, R, R, R, R, 16, 16, 16});
  int tile = 0;
  for (; tile + kBlockTiles <= tiles; tile += kBlockTiles) AddBlock<R, kBlockTiles>(w, 16 * tile);
  for (; tile < tiles; ++tile) AddBlock<R, 1>(w, 16 * tile);
  Written();
  _tile_release();
  for (int i = t.rows / R * R; i < t.rows; ++i) {
    for (int d = 0; d < t.value_dim; d += 16) Store(t.acc + i * t.acc_stride + d, Load(m.out[i % R] + d));
  }
}

}  // namespace

void AttentionAmx(const AttentionTile& t) {
  const bool fits = t.key_dim % kStep == 0 && t.key_dim <= kMostKeyDim && t.value_dim % 16 == 0 &&
                    t.value_dim <= kMostValueDim;
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  if (t.kv_dtype == tensor::DType::kF32 || !fits || (int8 && t.key_split % kStep != 0)) {
    return AttentionAvx512(t);
  }
  if (t.rows <= 8) {
    Run<8>(t);
  } else {
    Run<16>(t);
  }
}

}  // namespace moesaic::kernels::cpu
