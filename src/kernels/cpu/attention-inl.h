// The attention micro-kernel over the lanes of simd_<isa>-inl.h, which must be included first.
//
// Keys are widened to f32, kLanes of them at a time, and transposed so that each 128-bit lane holds four
// dimensions of one key; a register has every fourth key. This takes less work than columns of one dimension
// each, and a quarter of the final sums of whole rows. Packed keys stay in the L1 cache, a piece of the
// dimensions at a time, while all queries use them. Four elements of a query, repeated in every 128 bits,
// meet four registers, and the sums of kDotRows rows stay in registers. Scores, and the weights computed from
// them, are stored as [row][key]. Query rows are processed in groups of R. With several groups, values are
// widened to f32 too, a strip of dimensions at a time.
//
// A row's arithmetic must not depend on R, on its position in the group or on its neighbours
// (exec_context.h):
// - A dot product is four sums over a piece, of dimensions 4 apart, ascending. Sums 2 apart are added, then
//   neighbours, then pieces.
// - The sum of a row's weights is kLanes partial sums, of keys j, j + kLanes, j + 2 kLanes ... A tree adds
//   partial sums 2 apart, then neighbours, then those 4 and 8 apart (SumEach).
// - Values are added key by key. A key that is not visible to a row has weight 0 and adds 0, if its value is
//   finite.
//
// int8: a key's scale multiplies its sum over a piece, a value's scale its weight. The inner loops thus
// differ from those of other types only in the load.
//
// Prefetches of the next run are spread evenly over the time of the current one, because a processor has a
// limited number of outstanding lines (16 on Golden Cove). They go in address order, so that the hardware
// prefetcher runs ahead. A quarter of the keys is prefetched while the current keys are packed, and the rest
// during the dot products. A quarter of the values is prefetched during softmax, and the rest while the
// current values are added.
//
// The loops are in noinline functions. Inlined into their callers they would share registers with them and
// become up to a sixth slower, depending on the compiler's decisions.
#pragma once

#include <type_traits>

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

constexpr int kPackDims = 256;  // dimensions of a piece of kLanes keys: 16 KB, or 8 KB with 8 lanes
// maximum rows of a group: kLanes sums in registers hide the latency of the FMAs
constexpr int kMaxRows = kLanes / 2;
constexpr int kDotRows = kLanes / 4;  // rows whose dot products run together: this many sums
constexpr int kStrip = 2 * kLanes;    // value dimensions of a strip
constexpr int kMaxGroups = kAttentionRows / kMaxRows;
static_assert(kBlockKeys % kLanes == 0);

// One run of keys of the tile, with its own pointers; max, sum and acc continue from the previous run.
struct KeyRun {
  const float* q;
  int64_t q_stride;
  const std::byte* keys;
  int64_t key_stride;
  const std::byte* values;
  int64_t value_stride;
  int64_t next;         // bytes from these keys and values to those of the next run, for prefetching, or 0
  int64_t next_scales;  // the same for scales
  int rows, key_dim, value_dim;
  int visible[kAttentionRows];
  float *max, *sum, *acc;
  int64_t acc_stride;
  const float *key_scales, *rest_scales, *value_scales;
  int key_split;
};

/// Query rows [first, first + rows), padded to `size`, and the number of keys visible to any of them.
struct Group {
  int first, rows, size, keys;
};

struct alignas(64) Memory {
  float scores[kAttentionRows][kBlockKeys];  // replaced by weights
  float keep[kMaxGroups][kLanes];            // factors of the sums of earlier runs
  float keys[kPackDims * kLanes];
  float values[kBlockKeys * kStrip];
  Group groups[kMaxGroups];
  int count;  // number of groups
};

/// Calls f with the size of a group as a constant.
template <typename F>
inline void WithSize(int size, const F& f) {
  if (size == kMaxRows) return f(std::integral_constant<int, kMaxRows>{});
  if constexpr (kMaxRows > 4) {
    if (size == 4) return f(std::integral_constant<int, 4>{});
  }
  if (size == 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

inline void FindGroups(const KeyRun& t, Memory* m) {
  m->count = 0;
  for (int first = 0; first < t.rows; first += kMaxRows) {
    const int rows = t.rows - first < kMaxRows ? t.rows - first : kMaxRows;
    Group& g = m->groups[m->count++];
    // A group with unused rows reads the keys once; several smaller groups would read them several times.
    g = {first, rows, rows > 4 ? kMaxRows : (rows > 2 ? 4 : rows), 0};
    for (int i = first; i < first + rows; ++i) g.keys = t.visible[i] > g.keys ? t.visible[i] : g.keys;
  }
}

// Prefetches `count` elements from p on into the L1 (3) or L2 cache (2).
template <typename T, int kLevel>
inline void Prefetch(const char* p, int count) {
  for (int byte = 0; byte < count * static_cast<int>(sizeof(T)); byte += 64)
    __builtin_prefetch(p + byte, 0, kLevel);
}

/// Widens the 16 bytes of elements in each 128-bit lane to f32 and stores groups of four kStep floats apart.
template <typename T, int kStep>
inline void StoreWidened(VI x, float* to) {
  const VI zero = SetInts(0);
  if constexpr (std::is_same_v<T, float>) {
    Store(to, AsFloats(x));
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    Store(to, AsFloats(MixLowShorts(zero, x)));
    Store(to + kStep, AsFloats(MixHighShorts(zero, x)));
  } else {
    const VI low = MixLowBytes(zero, x), high = MixHighBytes(zero, x);
    Store(to, ToFloats(ShiftRight<24>(MixLowShorts(zero, low))));
    Store(to + kStep, ToFloats(ShiftRight<24>(MixHighShorts(zero, low))));
    Store(to + 2 * kStep, ToFloats(ShiftRight<24>(MixLowShorts(zero, high))));
    Store(to + 3 * kStep, ToFloats(ShiftRight<24>(MixHighShorts(zero, high))));
  }
}

/// Packs `dims` dimensions of kLanes keys as f32, [dimension / 4][4 registers][kLanes / 4 keys][4
/// dimensions]. Register i holds the keys i, i + 4 ... Data after the last dimension is undefined. Prefetches
/// a quarter of the bytes read, from `ahead` on.
template <bool kAhead, typename T>
[[gnu::noinline]] void PackKeys(const T* keys, int64_t stride, int dims, const char* ahead, float* packed) {
  constexpr int kPart = 16 / sizeof(T), kStep = 4 * kLanes;
  const int64_t bytes = 4 * stride * static_cast<int64_t>(sizeof(T));
  for (int d = 0; d < dims; d += kPart, packed += kStep * kPart / 4) {
    if constexpr (kAhead) {
      Prefetch<char, 2>(ahead, 4 * kLanes);
      ahead += 4 * kLanes;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const T* from = keys + i * stride + d;
      const bool half = kPart > 8 && dims - d < kPart;
      StoreWidened<T, kStep>(half ? LoadHalfParts(from, bytes) : LoadParts(from, bytes), packed + i * kLanes);
    }
  }
}

/// Computes dot products of R rows with the packed keys into scores [R][kBlockKeys], adding to them with
/// `add`. Prefetches kPrefetchBytes bytes per eight dimensions, from `ahead` on.
template <int R, int kPrefetchBytes, typename T>
[[gnu::noinline]] void Dots(const float* q, int64_t q_stride, const float* packed, int dims, bool add,
                            const float* scales, const char* ahead, float* scores) {
  constexpr bool kScaled = std::is_same_v<T, int8_t>;
  V sum[4 * R];
#pragma GCC unroll 16
  for (int i = 0; i < 4 * R; ++i) sum[i] = Zero();
  for (int d = 0; d < dims; d += 8) {
    Prefetch<char, 2>(ahead, kPrefetchBytes);
    ahead += kPrefetchBytes;
#pragma GCC unroll 2
    for (int four = d; four < d + 8; four += 4, packed += 4 * kLanes) {
      V key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) key[i] = InRegister(Load(packed + i * kLanes));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V x = InRegister(RepeatFour(q + r * q_stride + four));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[4 * r + i] = Fma(x, key[i], sum[4 * r + i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* to = scores + r * kBlockKeys;
    V x = SumFourIn128(sum + 4 * r);
    if constexpr (kScaled) x = Mul(x, Load(scales));
    Store(to, add ? Add(Load(to), x) : x);
  }
}

/// Computes a group's products with kLanes packed keys. With kPrefetch it prefetches three quarters of the
/// bytes packed, from `ahead` on.
template <bool kPrefetch, typename T>
inline void DotsOfGroup(const Group& g, const float* q, int64_t q_stride, const float* packed, int dims,
                        bool add, const float* scales, const char* ahead, float* scores) {
  WithSize(g.size, [&](auto size) {
    constexpr int kRows = size < kDotRows ? size : kDotRows;
    constexpr int kEach = kPrefetch ? 6 * kLanes * int{sizeof(T)} * kRows / size : 0;
    for (int r = 0; r < size; r += kRows, ahead += kEach * dims / 8) {
      Dots<kRows, kEach, T>(q + r * q_stride, q_stride, packed, dims, add, scales, ahead,
                            scores + r * kBlockKeys);
    }
  });
}

/// Computes the scores of all groups; undefined where a key is not visible to a row.
template <typename T>
inline void Scores(const KeyRun& t, Memory* m) {
  const int64_t stride = t.key_stride / static_cast<int64_t>(sizeof(T));
  const int split = std::is_same_v<T, int8_t> ? t.key_split : t.key_dim;
  const char* ahead = reinterpret_cast<const char*>(t.keys) + t.next;
  for (int key = 0; key < kBlockKeys; key += kLanes) {
    const T* keys = reinterpret_cast<const T*>(t.keys) + key * stride;
    for (int d = 0, dims; d < t.key_dim; d += dims) {
      const int left = (d < split ? split : t.key_dim) - d;
      dims = left < kPackDims ? left : kPackDims;
      const int64_t bytes = dims * kLanes * static_cast<int64_t>(sizeof(T));
      const float* scales = (d < split ? t.key_scales : t.rest_scales) + key;
      bool first = true;  // groups that see these keys
      for (int i = 0; i < m->count; ++i) {
        const Group& g = m->groups[i];
        if (g.keys <= key) continue;
        const float* q = t.q + g.first * t.q_stride + d;
        float* scores = m->scores[g.first] + key;
        if (first && t.next != 0) {
          PackKeys<true>(keys + d, stride, dims, ahead, m->keys);
          DotsOfGroup<true, T>(g, q, t.q_stride, m->keys, dims, d > 0, scales, ahead + bytes / 4, scores);
        } else {
          if (first) PackKeys<false>(keys + d, stride, dims, nullptr, m->keys);
          DotsOfGroup<false, T>(g, q, t.q_stride, m->keys, dims, d > 0, scales, nullptr, scores);
        }
        first = false;
      }
      ahead += bytes;
    }
  }
}

inline float MaxLanes(V x) {
  if constexpr (kLanes == 16) x = Max(x, Swap<kLanes / 2>(x));
  x = Max(x, Swap<4>(x));
  x = Max(x, Swap<2>(x));
  x = Max(x, Swap<1>(x));
  return First(x);
}

/// Converts a group's scores to weights, updates max and sum, and computes keep. Prefetches `bytes` bytes per
/// row, from `ahead` on.
template <typename T>
[[gnu::noinline]] void Softmax(const KeyRun& t, const Group& g, const char* ahead, int bytes, float* keep,
                               float (*scores)[kBlockKeys]) {
  alignas(64) static constexpr int32_t kOrder[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const VI order = LoadInts(kOrder);
  const V nothing = Set(-__builtin_inff());
  alignas(64) float before[kLanes] = {}, base[kLanes] = {}, total[kLanes];
  // Rows are interleaved in short steps, so that a processor works on several at once.
  for (int i = 0; i < g.rows; ++i) {
    float* w = scores[i];
    const VI visible = SetInts(t.visible[g.first + i]);
    V largest = nothing;
    for (int j = 0; j < g.keys; j += kLanes) {
      largest = Max(largest, SelectLess(AddInts(order, SetInts(j)), visible, Load(w + j), nothing));
    }
    const float most = MaxLanes(largest);
    before[i] = t.max[g.first + i];
    const float max = most > before[i] ? most : before[i];
    t.max[g.first + i] = max;
    // A row that has seen no key yet has maximum -inf; a finite substitute keeps -inf - -inf from becoming
    // NaN.
    base[i] = max > -3.0e38F ? max : -3.0e38F;
  }
  V sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = Zero();
  for (int i = 0; i < g.rows; ++i) {
    float* w = scores[i];
    Prefetch<char, 2>(ahead + i * bytes, bytes);
    const VI visible = SetInts(t.visible[g.first + i]);
    const V from = Set(base[i]);
    V sum = Zero();
    for (int j = 0; j < g.keys; j += kLanes) {
      const V weight = SelectLess(AddInts(order, SetInts(j)), visible, Exp(Sub(Load(w + j), from)), Zero());
      if constexpr (std::is_same_v<T, int8_t>) {
        Store(w + j, Mul(weight, Load(t.value_scales + j)));
      } else {
        Store(w + j, weight);
      }
      sum = Add(sum, weight);
    }
    sums[i] = sum;
  }
  Store(total, SumEach(sums));
  Store(keep, Exp(Sub(Load(before), Load(base))));
  for (int i = 0; i < g.rows; ++i) {
    t.sum[g.first + i] = __builtin_fmaf(t.sum[g.first + i], keep[i], total[i]);
  }
}

/// acc = acc * keep + weights x values, for C registers of value dimensions (or `tail` < kLanes, C = 1).
/// `ahead`: start of the prefetch of three quarters of the bytes read.
template <int R, int C, bool kTail, bool kAhead, bool kPacked, typename T>
[[gnu::noinline]] void AddValues(const Group& g, const float* weights, const float* keep, const T* values,
                                 int64_t value_stride, float* acc, int64_t acc_stride, int tail,
                                 const char* ahead) {
  V sum[R * C];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      sum[i * C + c] = Zero();
      if (i >= g.rows) continue;
      const float* from = acc + i * acc_stride + c * kLanes;
      sum[i * C + c] = Mul(kTail ? LoadFirst(from, tail) : Load(from), Set(keep[i]));
    }
  }
  for (int j = 0; j < g.keys; ++j, values += value_stride) {
    if constexpr (kAhead) {
      Prefetch<T, 2>(ahead, C * kLanes);
      ahead += C * kLanes * sizeof(T) * 3 / 4;
    }
    // Prefetches the next strip: its lines are a row apart, so no hardware prefetcher fetches them from the
    // L2 cache.
    if constexpr (!kPacked) {
      Prefetch<T, 3>(reinterpret_cast<const char*>(values + C * kLanes), C * kLanes);
    }
    V value[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      if constexpr (kTail) {
        value[c] = LoadFirst(values, tail);
      } else {
        value[c] = Load(values + c * kLanes);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const V weight = Set(weights[i * kBlockKeys + j]);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sum[i * C + c] = Fma(weight, value[c], sum[i * C + c]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    if (i >= g.rows) break;
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      float* to = acc + i * acc_stride + c * kLanes;
      if constexpr (kTail) {
        StoreFirst(to, sum[i * C + c], tail);
      } else {
        Store(to, sum[i * C + c]);
      }
    }
  }
}

/// Adds one group's value dimensions from d on, in strips of C registers, then narrower ones. `ahead`: start
/// of the prefetched data for d = 0.
template <int R, int C, bool kAhead, typename T>
inline void AddAllValues(const KeyRun& t, const Group& g, const float* weights, const float* keep, int d,
                         const char* ahead) {
  const T* values = reinterpret_cast<const T*>(t.values);
  const int64_t value_stride = t.value_stride / static_cast<int64_t>(sizeof(T));
  float* acc = t.acc + g.first * t.acc_stride;
  // The next values are prefetched in address order, not in strips like the current ones: the hardware
  // prefetcher then detects a stream.
  constexpr int64_t each = kBlockKeys * sizeof(T) * 3 / 4;  // bytes per dimension
  for (; d + C * kLanes <= t.value_dim; d += C * kLanes) {
    AddValues<R, C, false, kAhead, false>(g, weights, keep, values + d, value_stride, acc + d, t.acc_stride,
                                          0, kAhead ? ahead + d * each : nullptr);
  }
  if constexpr (C > 1) {
    AddAllValues<R, C / 2, kAhead, T>(t, g, weights, keep, d, ahead);
  } else if constexpr (kLanes > 8) {
    if (d < t.value_dim) {
      AddValues<R, 1, true, kAhead, false>(g, weights, keep, values + d, value_stride, acc + d, t.acc_stride,
                                           t.value_dim - d, kAhead ? ahead + d * each : nullptr);
    }
  }
}

/// Packs a strip of values as f32, [key][kStrip]; prefetches as many bytes as it reads, from `ahead` on.
template <bool kAhead, typename T>
inline void PackValues(const T* values, int64_t stride, int keys, const char* ahead, float* packed) {
  for (int j = 0; j < keys; ++j, values += stride, packed += kStrip) {
    if constexpr (kAhead) {
      Prefetch<T, 2>(ahead, kStrip);
      ahead += kStrip * sizeof(T);
    }
    Store(packed, Load(values));
    Store(packed + kLanes, Load(values + kLanes));
  }
}

/// Softmax and values of the only group.
template <typename T>
inline void FinishOne(const KeyRun& t, bool prefetch, Memory* m) {
  const Group& g = m->groups[0];
  if (g.keys == 0) return;
  const char* ahead = reinterpret_cast<const char*>(t.values) + t.next;
  const int quarter = t.value_dim * kBlockKeys * static_cast<int>(sizeof(T)) / 4;
  Softmax<T>(t, g, ahead, prefetch ? quarter / g.rows : 0, m->keep[0], m->scores);
  WithSize(g.size, [&](auto size) {
    if (prefetch) {
      AddAllValues<size, kLanes / size, true, T>(t, g, m->scores[0], m->keep[0], 0, ahead + quarter);
    } else {
      AddAllValues<size, kLanes / size, false, T>(t, g, m->scores[0], m->keep[0], 0, nullptr);
    }
  });
}

/// Softmax and values of several groups, which share the widened values.
template <typename T>
inline void FinishAll(const KeyRun& t, bool prefetch, Memory* m) {
  int most = 0;
  for (int i = 0; i < m->count; ++i) {
    const Group& g = m->groups[i];
    if (g.keys > 0) Softmax<T>(t, g, nullptr, 0, m->keep[i], m->scores + g.first);
    most = g.keys > most ? g.keys : most;
  }
  const T* values = reinterpret_cast<const T*>(t.values);
  const int64_t value_stride = t.value_stride / static_cast<int64_t>(sizeof(T));
  const char* ahead = reinterpret_cast<const char*>(t.values) + t.next;
  int d = 0;
  for (; d + kStrip <= t.value_dim; d += kStrip, ahead += kBlockKeys * kStrip * sizeof(T)) {
    if (prefetch) {
      PackValues<true>(values + d, value_stride, most, ahead, m->values);
    } else {
      PackValues<false>(values + d, value_stride, most, ahead, m->values);
    }
    for (int i = 0; i < m->count; ++i) {
      const Group& g = m->groups[i];
      if (g.keys == 0) continue;
      float* acc = t.acc + g.first * t.acc_stride + d;
      WithSize(g.size, [&](auto size) {
        AddValues<size, kStrip / kLanes, false, false, true>(g, m->scores[g.first], m->keep[i], m->values,
                                                             kStrip, acc, t.acc_stride, 0, nullptr);
      });
    }
  }
  for (int i = 0; i < m->count && d < t.value_dim; ++i) {
    const Group& g = m->groups[i];
    if (g.keys == 0) continue;
    WithSize(g.size, [&](auto size) {
      AddAllValues<size, 1, false, T>(t, g, m->scores[g.first], m->keep[i], d, nullptr);
    });
  }
}

template <typename T>
inline void RunRows(const KeyRun& t, Memory* m) {
  FindGroups(t, m);
  if constexpr (std::is_same_v<T, int8_t>) {
    if (t.next != 0) {
      Prefetch<float, 2>(reinterpret_cast<const char*>(t.key_scales) + t.next_scales, kBlockKeys);
      const float* others = t.values == t.keys ? t.rest_scales : t.value_scales;
      Prefetch<float, 2>(reinterpret_cast<const char*>(others) + t.next_scales, kBlockKeys);
    }
  }
  Scores<T>(t, m);
  const bool prefetch = t.next != 0 && t.values != t.keys;  // otherwise they were prefetched with the keys
  m->count == 1 ? FinishOne<T>(t, prefetch, m) : FinishAll<T>(t, prefetch, m);
}

inline void RunAttentionTile(const AttentionTile& tile) {
  for (int i = 0; i < tile.rows && !tile.resume; ++i) {
    tile.max[i] = -__builtin_inff();
    tile.sum[i] = 0;
    float* acc = tile.acc + i * tile.acc_stride;
    for (int d = 0; d < tile.value_dim; ++d) acc[d] = 0;
  }
  Memory memory;
  for (int i = 0; i < kAttentionRuns; ++i) {
    KeyRun run;
    int most = 0;
    for (int r = 0; r < tile.rows; ++r) {
      const int seen = tile.visible[r] - i * kBlockKeys;
      run.visible[r] = seen < 0 ? 0 : (seen < kBlockKeys ? seen : kBlockKeys);
      most = run.visible[r] > most ? run.visible[r] : most;
    }
    if (most == 0) return;
    const std::byte* keys = tile.runs[i];
    const std::byte* next = i + 1 < kAttentionRuns ? tile.runs[i + 1] : nullptr;
    if (next == nullptr) next = tile.after[0];
    run.q = tile.q;
    run.q_stride = tile.q_stride;
    run.keys = keys;
    run.key_stride = tile.key_stride;
    run.values = keys + tile.value_offset;
    run.value_stride = tile.value_stride;
    run.next = next == nullptr ? 0 : next - keys;
    run.next_scales =
        run.next + (i + 1 < kAttentionRuns && tile.runs[i + 1] != nullptr ? 0 : tile.after_scales);
    run.rows = tile.rows;
    run.key_dim = tile.key_dim;
    run.value_dim = tile.value_dim;
    run.max = tile.max;
    run.sum = tile.sum;
    run.acc = tile.acc;
    run.acc_stride = tile.acc_stride;
    run.key_scales = reinterpret_cast<const float*>(keys + tile.key_scales);
    run.rest_scales = reinterpret_cast<const float*>(keys + tile.rest_scales);
    run.value_scales = reinterpret_cast<const float*>(keys + tile.value_scales);
    run.key_split = tile.key_split;
    if (tile.kv_dtype == tensor::DType::kF32) {
      RunRows<float>(run, &memory);
    } else if (tile.kv_dtype == tensor::DType::kI8) {
      RunRows<int8_t>(run, &memory);
    } else {
      RunRows<uint16_t>(run, &memory);
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
