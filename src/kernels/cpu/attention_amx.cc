// Attention over bfloat16 or int8 keys and values on AMX tiles.
//
// Query rows are processed in groups of R = 16, or 8 if there are no more; they are the columns of a tile.
// The last group may have unused columns. For all keys of the call,
//
//   S [key][row] = K (q_high + q_low)^T     A tiles are keys as stored in the cache
//   p = bfloat16(exp(S - max))              down the lanes, each its row
//   O [row][dim] = p V                      B tiles are values, two keys interleaved
//
// where q is split into two bfloat16, with an error of 2^-18 of its value. p is rounded to one bfloat16, by
// 2^-9 at most. The divisor of O is the sum of the rounded weights, so the remaining error is the rounding of
// an average. Sums are f32.
//
// int8 is converted to bfloat16 for the tiles, which is exact. Scales of keys multiply S, those of values
// multiply p before it is rounded (the sum is then that of the unrounded weights).
//
// p is relative to a power of two: exp(S - max) = 2^(S log2 e - n), n = ceil(max log2 e). Sums of earlier
// keys with another n are therefore rescaled without rounding, by adding to their exponents (AMLA, arXiv
// 2509.25224), and only when n grows. The tiles of O then continue from them.
//
// Several groups process 32 keys in turn (36 KB with 576 dimensions). The keys stay in the L1 cache, which
// the groups' queries bypass as they stream from the L2 cache. The values are interleaved meanwhile, for all
// groups and between the products; then 64 dimensions of all values (32 KB) meet all groups. A single group,
// as in decode with grouped queries, reads everything once: it packs values in steps of 32 keys.
//
// A row's arithmetic depends only on the row. A column of S and a row of O never meet another one. A key that
// is not visible to a row has weight 0 and adds 0. Sums over keys have the same order for either R.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/attention_amx-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kSums = 4;  // partial maxima and sums of a row: enough to hide an addition's latency

// 2^f for 0 <= f < 1, a minimax fit with a relative error of 2^-18.5: weights are rounded to 2^-9.
constexpr float kPower[] = {1.0000026226043701F, 0.6930038332939148F, 0.2414427101612091F,
                            0.052011534571647644F, 0.01353413239121437F};
constexpr float kLn2 = 0.693147181F;

/// Memory of one call.
template <int R>
struct alignas(64) Memory {
  static constexpr int kGroups = R == 8 ? 1 : kAttentionRows / R;
  float scores[kGroups][kKeys][R];             // S
  float rest_scores[kGroups][kKeys][R];        // int8: scores of the dimensions from key_split on
  std::byte weights[kGroups][kSteps][R * 64];  // [step][row][32 keys]
  // Values of all keys, in ValuePacker's layout; for one group, values of two steps.
  std::byte values[(R == 8 ? 2 * kBlockTiles : kMaxValueDim / 16 * kSteps) * kTileBytes];
  float out[R][kMaxValueDim];                  // O of a group with unused rows
  std::byte keys[kBlockKeys][2 * kMaxKeyDim];  // int8: keys of a run, converted to bfloat16
  std::byte queries[kGroups][kMaxKeyDim * R * 4];
};

/// A call and values computed once for it.
template <int R>
struct Work {
  const AttentionTile& t;
  Memory<R>* m;
  Stream* stream;
  ValuePacker* packer;  // used with several groups
  std::byte* queries;   // [group][key_dim * R * 4]
  int groups;
  int seen[Memory<R>::kGroups];  // keys visible to any row of the group
  int most;                      // keys visible to any row
};

/// Keys as the A tiles load them.
struct Keys {
  const std::byte* first;
  int64_t stride;  // bytes
};

/// Multiplies 64 keys by the only group's queries over dimensions [from, to).
template <int R>
inline void Multiply64(const Work<R>& w, const Keys& keys, int from, int to, float (*products)[R]) {
  constexpr int kBytes = kTileRows * R * 4;
  constexpr int kStride = R * 4;
  Written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t tile = kTileRows * keys.stride;
  for (int s = from / kStep; s < to / kStep; ++s) {
    const std::byte* k = keys.first + 64 * s;
    const std::byte* q = w.queries + 2 * s * kBytes;
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
    w.stream->Prefetch();
  }
  _tile_stored(0, products[0], kStride);
  _tile_stored(1, products[kTileRows], kStride);
  _tile_stored(2, products[2 * kTileRows], kStride);
  _tile_stored(3, products[3 * kTileRows], kStride);
  Written();
}

/// Multiplies 32 keys by the queries of one of several groups. The loads carry a hint so that queries do not
/// evict the keys from the L1 cache.
template <int R>
inline void Multiply32(const Work<R>& w, const Keys& keys, const std::byte* queries, int from, int to,
                       float (*products)[R]) {
  constexpr int kBytes = kTileRows * R * 4;
  constexpr int kStride = R * 4;
  Written();
  _tile_zero(0);
  _tile_zero(1);
  const int64_t tile = kTileRows * keys.stride;
  const __m512i first = _mm512_load_si512(kOrder[0]), second = _mm512_load_si512(kOrder[1]);
  const int steps = (to - from) / kStep;
  ValuePacker::Chunk chunk = w.packer->Take(steps);
  const std::byte *k = keys.first + 2 * from, *q = queries + 2 * from / kStep * kBytes;
  for (int s = 0; s < steps; ++s, k += 64, q += 2 * kBytes) {
    _tile_stream_loadd(4, q, kStride);
    _tile_stream_loadd(5, q + kBytes, kStride);
    _tile_loadd(6, k, keys.stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, k + tile, keys.stride);
    _tile_dpbf16ps(1, 7, 4);
    _tile_dpbf16ps(0, 6, 5);
    _tile_dpbf16ps(1, 7, 5);
    if (s < chunk.pairs) ValuePacker::PackNext(&chunk, first, second);
    w.stream->Prefetch();
  }
  _tile_stored(0, products[0], kStride);
  _tile_stored(1, products[kTileRows], kStride);
  Written();
}

/// Lane i is scales[i / R].
template <int R>
inline V KeyScales(const float* scales) {
  if constexpr (R == 16) return Set(scales[0]);
  return _mm512_insertf32x8(Set(scales[0]), _mm256_set1_ps(scales[1]), 1);
}

/// int8: multiplies a group's scores of keys [first, first + count) by the keys' scales.
template <int R>
inline void ScaleScores(const Work<R>& w, int g, int first, int count) {
  const AttentionTile& t = w.t;
  const std::byte* run = t.runs[first / kBlockKeys];
  const auto* scales = reinterpret_cast<const float*>(run + t.key_scales) + first % kBlockKeys;
  const auto* rest_scales = reinterpret_cast<const float*>(run + t.rest_scales) + first % kBlockKeys;
  const float(*rest)[R] = w.m->rest_scores[g] + first;
  float(*scores)[R] = w.m->scores[g] + first;
  for (int j = 0; j < count; j += kLanes / R) {
    V scaled = Mul(Load(scores[j]), KeyScales<R>(scales + j));
    if (t.key_split < t.key_dim) scaled = Fma(Load(rest[j]), KeyScales<R>(rest_scales + j), scaled);
    Store(scores[j], scaled);
  }
}

/// Computes scores of all groups for all visible keys and some more, and packs several groups' values.
template <int R, bool kSeveral>
inline void Score(const Work<R>& w) {
  constexpr int kAtOnce = kSeveral ? kStep : kBlockKeys;
  const AttentionTile& t = w.t;
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  const int split = int8 ? t.key_split : t.key_dim;
  for (int first = 0; first < w.most; first += kAtOnce) {
    Keys keys{t.runs[first / kBlockKeys] + first % kBlockKeys * t.key_stride, t.key_stride};
    if (int8) {
      WidenKeys(t, keys.first, w.most - first < kAtOnce ? w.most - first : kAtOnce, w.m->keys);
      keys = {w.m->keys[0], sizeof(w.m->keys[0])};
    }
    if constexpr (kSeveral) w.packer->Begin(first / kStep);
    for (int from = 0, to = split; from < t.key_dim; from = to, to = t.key_dim) {
      for (int g = 0; g < w.groups; ++g) {
        if (w.seen[g] <= first) continue;
        float(*products)[R] = (from == 0 ? w.m->scores : w.m->rest_scores)[g] + first;
        if constexpr (kSeveral) {
          Multiply32<R>(w, keys, w.queries + int64_t{g} * t.key_dim * R * 4, from, to, products);
        } else {
          Multiply64<R>(w, keys, from, to, products);
        }
      }
    }
    if constexpr (kSeveral) w.packer->Finish();
    for (int g = 0; int8 && g < w.groups; ++g) {
      if (w.seen[g] > first) ScaleScores<R>(w, g, first, kAtOnce);
    }
  }
}

/// Loads one number per row of a group into every lane of the row; `rest` for unused rows.
template <int R>
inline V LoadRows(const float* rows, int count, float rest) {
  const __mmask16 mask = count < 16 ? FirstLanes(count) : static_cast<__mmask16>(0xffff);
  const V x = _mm512_mask_loadu_ps(Set(rest), mask, rows);
  return R == 16 ? x : _mm512_shuffle_f32x4(x, x, 0x44);
}

/// Computes the exponent n to which a group's weights are relative, from the largest scores. If there are
/// sums of earlier keys, they are rescaled to it and returned in *sum.
template <int R>
inline V Power(const Work<R>& w, int g, int rows, V max, V* sum) {
  const AttentionTile& t = w.t;
  V n = _mm512_roundscale_ps(Mul(max, Set(kLog2E)), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  if (!t.resume) return n;
  // The integer from which max was computed: exact up to 2^21, and larger scores are less precise than a
  // power.
  const V before = Round(Mul(LoadRows<R>(t.max + g * R, rows, -__builtin_inff()), Set(kLog2E)));
  n = Max(n, before);
  // -inf - -inf, for a row that has seen no key, is NaN: Max returns the other operand.
  const V shift = Max(Sub(before, n), Set(-256.0F));
  alignas(64) float shifts[kLanes];
  Store(shifts, shift);
  for (int i = 0; i < rows; ++i) {
    if (shifts[i] == 0) continue;
    RescaleAvx512(t.acc + (g * R + i) * t.acc_stride, t.value_dim, static_cast<int>(-shifts[i]));
  }
  *sum = Scale(LoadRows<R>(t.sum + g * R, rows, 0), shift);
  return n;
}

/// Converts a group's scores to weights in A tiles, and writes max and sum. Weights from `seen` to the end of
/// a step are 0. kAll: there are R rows, and all keys are visible to all of them. kPrefetch: also prefetches
/// the next keys here; with several groups, the products leave enough room for that.
template <int R, bool kAll, bool kPrefetch>
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
  const auto visible_or = [&](int j, V x, V other) {
    return kAll ? x : SelectLess(AddInts(lane_key, SetInts(j)), visible, x, other);
  };
  const V nothing = Set(-__builtin_inff());
  V most[kSums] = {nothing, nothing, nothing, nothing};
  for (int j = 0; j < seen;) {  // whole steps of scores exist
#pragma GCC unroll 4
    for (int u = 0; u < kSums; ++u, j += kAtOnce) {
      most[u] = Max(most[u], visible_or(j, Load(scores[j]), nothing));
    }
  }
  V max = Max(Max(most[0], most[1]), Max(most[2], most[3]));
  if constexpr (R == 8) max = Max(max, Swap<8>(max));
  V earlier = Zero();
  const V n = Power<R>(w, g, rows, max, &earlier);
  // A row that sees no key has -inf; a finite substitute keeps -inf - -inf from becoming NaN.
  const V base = Sub(Zero(), Max(Set(-3.0e38F), n));
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  V sum[kSums] = {Zero(), Zero(), Zero(), Zero()};
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);  // bfloat16
  // weights of kAtOnce keys, with the nearest bfloat16 in the upper half
  const auto weight_of = [&](int j, V* total) {
    const V x = Max(Set(-126.0F), Fma(Load(scores[j]), Set(kLog2E), base));
    const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    V p = Fma(f, Set(kPower[4]), Set(kPower[3]));
    p = Fma(f, p, Set(kPower[2]));
    p = Fma(f, p, Set(kPower[1]));
    p = Fma(f, p, Set(kPower[0]));
    p = visible_or(j, Scale(p, x), Zero());  // Scale takes the floor of x
    if (int8) {
      const auto* scales = reinterpret_cast<const float*>(t.runs[j / kBlockKeys] + t.value_scales);
      *total = Add(*total, p);
      p = visible_or(j, Mul(p, KeyScales<R>(scales + j % kBlockKeys)), Zero());
    }
    return _mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000));
  };
  const auto pairs_of = [&](__m512i even, __m512i odd, V* total) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    const __m512i pairs =
        _mm512_ternarylogic_epi32(odd, upper, _mm512_srli_epi32(even, 16), 0xea);  // a & b | c
    if (!int8) *total = _mm512_dpbf16_ps(*total, (__m512bh)pairs, (__m512bh)ones);
    return pairs;
  };
  // Sums of bfloat16 are over pairs 0 .. 7 and 8 .. 15 of every step, those of int8 over every fourth key.
  // With two keys in a vector, its halves are two of these.
  for (int s = 0; s * kStep < seen; ++s) {
    const int key = s * kStep;
    __m512i pairs[16];
    if constexpr (R == 16) {
#pragma GCC unroll 2
      for (int i = 0; i < 16; ++i) {
        const __m512i even = weight_of(key + 2 * i, &sum[2 * i % kSums]);
        pairs[i] = pairs_of(even, weight_of(key + 2 * i + 1, &sum[(2 * i + 1) % kSums]), &sum[i / 8]);
        if constexpr (kPrefetch) w.stream->Prefetch();
      }
      StoreColumns(pairs, w.m->weights[g][s]);
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < 16; ++i) {
        pairs[i] = weight_of(key + 2 * i, &sum[i % 2]);
        if constexpr (kPrefetch) w.stream->Prefetch();
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        pairs[i] = pairs_of(_mm512_shuffle_i32x4(pairs[i], pairs[8 + i], 0x44),
                            _mm512_shuffle_i32x4(pairs[i], pairs[8 + i], 0xee), &sum[0]);
      }
      StoreColumns8(pairs, w.m->weights[g][s]);
    }
  }
  V total = R == 16 && int8 ? Add(Add(sum[0], sum[2]), Add(sum[1], sum[3])) : Add(sum[0], sum[1]);
  if constexpr (R == 8) total = Add(total, Swap<8>(total));
  const __mmask16 mask = rows < 16 ? FirstLanes(rows) : static_cast<__mmask16>(0xffff);
  _mm512_mask_storeu_ps(t.max + first, mask, Mul(n, Set(kLn2)));
  _mm512_mask_storeu_ps(t.sum + first, mask, Add(earlier, total));
}

/// acc [R][acc_stride] = p V for a group and T tiles of values from dimension d on; adds to acc if the call
/// resumes. Values are packed already or, with kPack, a step at a time.
template <int R, int T, bool kPack>
inline void AddValues(const Work<R>& w, int g, int d, float* acc, int64_t acc_stride) {
  static_assert(T == 1 || T == 4);
  const int steps = (w.seen[g] + kStep - 1) / kStep;
  const int64_t stride = acc_stride * static_cast<int64_t>(sizeof(float));
  if (w.t.resume) {
    Written();  // rescaled or copied with ordinary stores
    _tile_loadd(0, acc, stride);
    if constexpr (T == 4) {
      _tile_loadd(1, acc + 16, stride);
      _tile_loadd(2, acc + 32, stride);
      _tile_loadd(3, acc + 48, stride);
    }
  } else {
    _tile_zero(0);
    if constexpr (T == 4) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  std::byte* packed = kPack ? w.m->values : w.m->values + ValuePacker::Offset(d, 0, T);
  if (kPack && steps > 0) PackValues<T>(w.t, 0, w.most, d, w.stream, packed);
  for (int s = 0; s < steps; ++s) {
    // Packs the next step, so that its stores have reached the cache when the tiles load it.
    if (kPack && s + 1 < steps) {
      PackValues<T>(w.t, s + 1, w.most, d, w.stream, packed + (s + 1) % 2 * T * kTileBytes);
    }
    Written();
    const std::byte* values = packed + (kPack ? s % 2 : s) * T * kTileBytes;
    _tile_loadd(4, w.m->weights[g][s], 64);
    if constexpr (!kPack) w.stream->Prefetch();
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (T == 4) {
      _tile_loadd(7, values + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, values + 2 * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, values + 3 * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, acc, stride);
  if constexpr (T == 4) {
    _tile_stored(1, acc + 16, stride);
    _tile_stored(2, acc + 32, stride);
    _tile_stored(3, acc + 48, stride);
  }
  Written();
}

/// Computes all groups' sums over T tiles of values from dimension d on.
template <int R, int T, bool kSeveral>
inline void AddBlock(const Work<R>& w, int d) {
  const AttentionTile& t = w.t;
  const bool whole = t.rows % R == 0;  // otherwise acc ends with the last group's last row
  float* last = whole ? t.acc + (w.groups - 1) * R * t.acc_stride + d : w.m->out[0] + d;
  const int64_t last_stride = whole ? t.acc_stride : kMaxValueDim;
  for (int g = 0; g + 1 < w.groups; ++g) {
    AddValues<R, T, !kSeveral>(w, g, d, t.acc + g * R * t.acc_stride + d, t.acc_stride);
  }
  AddValues<R, T, !kSeveral>(w, w.groups - 1, d, last, last_stride);
}

/// Copies the last group's sums, if it has unused rows, to separate memory or back.
template <int R>
inline void CopyLast(const Work<R>& w, bool back) {
  const AttentionTile& t = w.t;
  for (int i = t.rows / R * R; i < t.rows; ++i) {
    float *acc = t.acc + i * t.acc_stride, *own = w.m->out[i % R];
    for (int d = 0; d < t.value_dim; d += 16) {
      if (back) {
        Store(acc + d, Load(own + d));
      } else {
        Store(own + d, Load(acc + d));
      }
    }
  }
}

template <int R, bool kSeveral>
inline void Run(const AttentionTile& t) {
  Memory<R> m;
  Work<R> w{t,  &m, nullptr, nullptr, t.packed_q == nullptr ? m.queries[0] : t.packed_q, (t.rows + R - 1) / R,
            {}, 0};
  int least[Memory<R>::kGroups];
  for (int g = 0; g < w.groups; ++g) {
    w.seen[g] = 0;
    least[g] = (g + 1) * R <= t.rows ? kKeys : 0;
    for (int i = g * R; i < t.rows && i < (g + 1) * R; ++i) {
      w.seen[g] = t.visible[i] > w.seen[g] ? t.visible[i] : w.seen[g];
      least[g] = t.visible[i] < least[g] ? t.visible[i] : least[g];
    }
    w.most = w.seen[g] > w.most ? w.seen[g] : w.most;
    if (t.packed_q != nullptr && t.q_is_packed) continue;
    PackQueries<R>(t, g * R, w.queries + int64_t{g} * t.key_dim * R * 4);
  }
  const int tiles = t.value_dim / 16, blocks = tiles / kBlockTiles + tiles % kBlockTiles;
  const int at_once = kSeveral ? kStep : kBlockKeys, steps = (w.most + kStep - 1) / kStep;
  const int products = (w.most + at_once - 1) / at_once * (t.key_dim / kStep);
  // Several groups: all within the scores, which take half of the time.
  Stream stream(t, kSeveral ? w.groups * products : products + steps * 16 + steps * 16 * blocks);
  ValuePacker packer(t, w.most, m.values);
  w.stream = &stream;
  w.packer = &packer;

  Configure({16, 16, 16, 16, 16, 16, 16, 16}, {4 * R, 4 * R, 4 * R, 4 * R, 4 * R, 4 * R, 64, 64});
  Score<R, kSeveral>(w);
  for (int g = 0; g < w.groups; ++g) {
    if (least[g] == w.seen[g] && least[g] % kStep == 0) {
      Softmax<R, true, !kSeveral>(w, g);
    } else {
      Softmax<R, false, !kSeveral>(w, g);
    }
  }
  if constexpr (R != 16) Configure({R, R, R, R, R, 16, 16, 16});
  if (t.resume) CopyLast<R>(w, false);
  int tile = 0;
  for (; tile + kBlockTiles <= tiles; tile += kBlockTiles) AddBlock<R, kBlockTiles, kSeveral>(w, 16 * tile);
  for (; tile < tiles; ++tile) AddBlock<R, 1, kSeveral>(w, 16 * tile);
  Written();
  _tile_release();
  CopyLast<R>(w, true);
}

}  // namespace

void AttentionAmx(const AttentionTile& t) {
  const bool fits = t.key_dim % kStep == 0 && t.key_dim <= kMaxKeyDim && t.value_dim % 16 == 0 &&
                    t.value_dim <= kMaxValueDim;
  const bool int8 = t.kv_dtype == tensor::DType::kI8;
  if (t.kv_dtype == tensor::DType::kF32 || !fits || (int8 && t.key_split % kStep != 0)) {
    return AttentionAvx512(t);
  }
  if (t.rows <= 8) {
    Run<8, false>(t);
  } else if (t.rows <= 16) {
    Run<16, false>(t);
  } else {
    Run<16, true>(t);
  }
}

}  // namespace moesaic::kernels::cpu
