// The attention micro-kernel over the lanes of simd_<isa>-inl.h, which is included first.
//
// Query rows are taken in groups of R, keys in groups of K = kLanes / R, so that a group's R * K dot products
// fill one register: lane (key * R + row). All later steps keep that layout: the scores of a run are
// [key][row], the softmax works down the lanes, and the weights of one key are neighbours for the values'
// pass.
//
// A row's arithmetic must not depend on R, on its place in the group or on its neighbours (ops.h). So:
// - a dot product is kLanes partial sums over the dimensions, ascending, added in SumEach's order;
// - the sum of a row's weights is kLanes partial sums, of keys j, j + kLanes, j + 2 kLanes ..., then a tree
// that
//   adds partial sums kLanes/2 apart, then kLanes/4, ...: for R > 1 the first levels of that tree are between
//   registers, the others inside one;
// - values are added key after key. A key that a row doesn't see has weight 0 there and adds 0.
//
// int8: a key's scale multiplies its finished dot products, a value's its weight, so that the inner loops
// differ from the others' in nothing but the load.
#pragma once

#include <type_traits>

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

constexpr int kRunKeys = 64;

// One run of the tile, with pointers of its own; max, sum and acc go on from the run before.
struct Run {
  const float* q;
  int64_t q_stride;
  const std::byte* keys;
  int64_t key_stride;
  const std::byte* values;
  int64_t value_stride;
  int64_t next;  // bytes from these keys and values to those that will be asked for next, or 0
  int rows, key_dim, value_dim;
  int visible[kAttentionRows];
  float *max, *sum, *acc;
  int64_t acc_stride;
  const float *key_scales, *rest_scales, *value_scales;
  int key_split;
};

// Dot products of R rows with K keys: R * K = kLanes sums in registers (16 of 32, 8 of 16) hide the FMA
// latency (4 cycles, two a cycle: 8). R = kLanes / 2 and K = 2 need the fewest loads and bfloat16 conversions
// a product.
template <int R, typename T>
inline V Dots(const float* q, int64_t q_stride, const T* keys, int64_t key_stride, int dim) {
  constexpr int K = kLanes / R;
  V sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = Zero();
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    V key[K];
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j) key[j] = Load(keys + j * key_stride + d);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const V row = InRegister(Load(q + i * q_stride + d));
#pragma GCC unroll 16
      for (int j = 0; j < K; ++j) sum[j * R + i] = Fma(row, key[j], sum[j * R + i]);
    }
  }
  if constexpr (kLanes > 8) {  // dimensions are multiples of 8
    if (d < dim) {
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const V row = LoadFirst(q + i * q_stride + d, dim - d);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
          sum[j * R + i] = Fma(row, LoadFirst(keys + j * key_stride + d, dim - d), sum[j * R + i]);
        }
      }
    }
  }
  return SumEach(sum);
}

// The state of one group of rows during one run.
template <int R>
struct Group {
  alignas(64) float weights[kRunKeys * R];  // [key][row]: scores, then exp(score - max)
  alignas(64) float max[kLanes];            // every lane its row's
  alignas(64) float keep[kLanes];           // what earlier runs' sums are multiplied by
  alignas(64) int32_t visible[kLanes];
  alignas(64) int32_t key[kLanes];  // lane / R
  int keys;                         // seen by any row
  int64_t ahead;                    // bytes from a key or value to the one to prefetch, or 0
};

// Folds lanes of the same row.
template <int R>
inline V MaxOverKeys(V x) {
  if constexpr (kLanes == 16 && R <= 8) x = Max(x, Swap<kLanes / 2>(x));
  if constexpr (R <= 4) x = Max(x, Swap<4>(x));
  if constexpr (R <= 2) x = Max(x, Swap<2>(x));
  if constexpr (R <= 1) x = Max(x, Swap<1>(x));
  return x;
}
template <int R>
inline V SumOverKeys(V x) {
  if constexpr (kLanes == 16 && R <= 8) x = Add(x, Swap<kLanes / 2>(x));
  if constexpr (R <= 4) x = Add(x, Swap<4>(x));
  if constexpr (R <= 2) x = Add(x, Swap<2>(x));
  if constexpr (R <= 1) x = Add(x, Swap<1>(x));
  return x;
}

// Asks for `count` elements from p on, into the first (3) or the second-level cache (2).
template <typename T, int kLevel>
inline void Prefetch(const char* p, int count) {
  for (int byte = 0; byte < count * static_cast<int>(sizeof(T)); byte += 64)
    __builtin_prefetch(p + byte, 0, kLevel);
}

// The scales of K keys, each in its R lanes.
template <int R>
inline V ScalesOf(const float* scales, VI lane_key) {
  constexpr int K = kLanes / R;
  if constexpr (K == kLanes) return Load(scales);
  return Pick(LoadFirst(scales, K), lane_key);
}

// Dot products with K keys from key j on.
template <int R, typename T>
inline V ScaledDots(const Run& t, const float* q, const T* keys, int64_t key_stride, int j, VI lane_key) {
  if constexpr (!std::is_same_v<T, int8_t>) {
    return Dots<R>(q, t.q_stride, keys, key_stride, t.key_dim);
  } else {
    const V dots =
        Mul(Dots<R>(q, t.q_stride, keys, key_stride, t.key_split), ScalesOf<R>(t.key_scales + j, lane_key));
    const int split = t.key_split;
    if (split == t.key_dim) return dots;
    return Fma(Dots<R>(q + split, t.q_stride, keys + split, key_stride, t.key_dim - split),
               ScalesOf<R>(t.rest_scales + j, lane_key), dots);
  }
}

// Writes the scores into g->weights, -inf where not visible, and returns their maximum.
template <int R, typename T>
inline V Scores(const Run& t, int first, Group<R>* g) {
  constexpr int K = kLanes / R;
  const int64_t key_stride = t.key_stride / static_cast<int64_t>(sizeof(T));
  const float* q = t.q + first * t.q_stride;
  const V nothing = Set(-__builtin_inff());
  const VI visible = LoadInts(g->visible);
  const VI lane_key = LoadInts(g->key);
  V largest = nothing;
  for (int j = 0; j < g->keys; j += K) {
    const T* keys = reinterpret_cast<const T*>(t.keys) + j * key_stride;
    if (g->ahead != 0) {
#pragma GCC unroll 16
      for (int i = 0; i < K; ++i) {
        // Not into the first-level cache: that has the block that is worked on.
        Prefetch<T, 2>(reinterpret_cast<const char*>(keys + i * key_stride) + g->ahead, t.key_dim);
      }
    }
    const V dots = ScaledDots<R>(t, q, keys, key_stride, j, lane_key);
    const V seen = SelectLess(AddInts(lane_key, SetInts(j)), visible, dots, nothing);
    Store(g->weights + j * R, seen);
    largest = Max(largest, seen);
  }
  // Softmax takes kLanes keys at a time.
  for (int j = (g->keys + K - 1) / K * K; j % kLanes != 0; j += K) Store(g->weights + j * R, nothing);
  return MaxOverKeys<R>(largest);
}

// Turns scores into weights and updates max, sum and keep.
template <int R, typename T>
inline void Softmax(const Run& t, int first, int rows, V largest, Group<R>* g) {
  constexpr int K = kLanes / R;
  const VI visible = LoadInts(g->visible);
  const VI lane_key = LoadInts(g->key);
  const V before = Load(g->max);
  const V max = Max(before, largest);
  // A row that has seen no key yet has maximum -inf; a finite stand-in keeps -inf - -inf from becoming NaN.
  const V base = Max(Set(-3.0e38F), max);
  V sum[R];
#pragma GCC unroll 16
  for (int u = 0; u < R; ++u) sum[u] = Zero();
  for (int j = 0; j < g->keys;) {
#pragma GCC unroll 16
    for (int u = 0; u < R; ++u, j += K) {
      float* w = g->weights + j * R;
      const V weight = SelectLess(AddInts(lane_key, SetInts(j)), visible, Exp(Sub(Load(w), base)), Zero());
      if constexpr (std::is_same_v<T, int8_t>) {
        Store(w, Mul(weight, ScalesOf<R>(t.value_scales + j, lane_key)));
      } else {
        Store(w, weight);
      }
      sum[u] = Add(sum[u], weight);
    }
  }
#pragma GCC unroll 4
  for (int half = R / 2; half >= 1; half /= 2) {
#pragma GCC unroll 16
    for (int u = 0; u < half; ++u) sum[u] = Add(sum[u], sum[u + half]);
  }
  alignas(64) float total[kLanes];
  Store(total, SumOverKeys<R>(sum[0]));
  Store(g->max, max);
  Store(g->keep, Exp(Sub(before, base)));
  for (int i = 0; i < rows; ++i) {
    t.max[first + i] = g->max[i];
    t.sum[first + i] = __builtin_fmaf(t.sum[first + i], g->keep[i], total[i]);
  }
}

// acc = acc * keep + weights x values, for C registers of value dimensions (or `tail` < kLanes, C = 1).
template <int R, int C, bool kTail, bool kAhead, typename T>
inline void AddValues(const Group<R>& g, const T* values, int64_t value_stride, int rows, float* acc,
                      int64_t acc_stride, int tail, const char* ahead) {
  V sum[R * C];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      sum[i * C + c] = Zero();
      if (i >= rows) continue;
      const float* from = acc + i * acc_stride + c * kLanes;
      sum[i * C + c] = Mul(kTail ? LoadFirst(from, tail) : Load(from), Set(g.keep[i]));
    }
  }
  const float* weights = g.weights;
  for (int j = 0; j < g.keys; ++j, weights += R, values += value_stride) {
    if constexpr (kAhead) {
      Prefetch<T, 2>(ahead, C * kLanes);
      ahead += C * kLanes * sizeof(T);
    }
    // The next strip: its lines lie a row apart, so no prefetcher brings them from the second-level cache.
    Prefetch<T, 3>(reinterpret_cast<const char*>(values + C * kLanes), C * kLanes);
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
      const V weight = Set(weights[i]);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sum[i * C + c] = Fma(weight, value[c], sum[i * C + c]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    if (i >= rows) break;
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

// All value dimensions from d on, in strips of C registers, then narrower ones.
template <int R, int C, bool kAhead, typename T>
inline void AddAllValues(const Run& t, const Group<R>& g, int first, int rows, int d) {
  const T* values = reinterpret_cast<const T*>(t.values);
  const int64_t value_stride = t.value_stride / static_cast<int64_t>(sizeof(T));
  float* acc = t.acc + first * t.acc_stride;
  // The next values are walked from front to back, not in strips as these: the processor's own prefetcher
  // then takes them for a stream and helps.
  const char* ahead = reinterpret_cast<const char*>(t.values) + g.ahead;
  constexpr int64_t row = kRunKeys * sizeof(T);  // bytes of one dimension of all values
  for (; d + C * kLanes <= t.value_dim; d += C * kLanes) {
    AddValues<R, C, false, kAhead>(g, values + d, value_stride, rows, acc + d, t.acc_stride, 0,
                                   ahead + d * row);
  }
  if constexpr (C > 1) {
    AddAllValues<R, C / 2, kAhead, T>(t, g, first, rows, d);
  } else if constexpr (kLanes > 8) {
    if (d < t.value_dim) {
      AddValues<R, 1, true, kAhead>(g, values + d, value_stride, rows, acc + d, t.acc_stride, t.value_dim - d,
                                    ahead + d * row);
    }
  }
}

template <int R, typename T>
inline void RunGroup(const Run& t, int first, int rows) {
  Group<R> g;
  g.keys = 0;
  g.ahead = first == 0 ? t.next : 0;  // once a block
  for (int i = 0; i < kLanes; ++i) {
    const bool row = i % R < rows;
    g.max[i] = row ? t.max[first + i % R] : -__builtin_inff();
    g.visible[i] = row ? t.visible[first + i % R] : 0;
    g.key[i] = i / R;
    if (g.visible[i] > g.keys) g.keys = g.visible[i];
  }
  if (g.keys == 0) return;
  if constexpr (std::is_same_v<T, int8_t>) {
    if (g.ahead != 0) {
      Prefetch<float, 2>(reinterpret_cast<const char*>(t.key_scales) + g.ahead, kRunKeys);
      Prefetch<float, 2>(
          reinterpret_cast<const char*>(t.values == t.keys ? t.rest_scales : t.value_scales) + g.ahead,
          kRunKeys);
    }
  }
  Softmax<R, T>(t, first, rows, Scores<R, T>(t, first, &g), &g);
  if (g.ahead != 0 && t.values != t.keys) {
    AddAllValues<R, kLanes / R, true, T>(t, g, first, rows, 0);
  } else {
    AddAllValues<R, kLanes / R, false, T>(t, g, first, rows, 0);
  }
}

template <typename T>
inline void RunRows(const Run& t) {
  constexpr int kMost = kLanes / 2;
  int first = 0;
  for (; first + kMost <= t.rows; first += kMost) RunGroup<kMost, T>(t, first, kMost);
  const int rest = t.rows - first;
  if (rest == 0) return;
  // A group with idle rows reads the keys once; several smaller groups would read them several times.
  if (rest == 1) {
    RunGroup<1, T>(t, first, rest);
  } else if (rest == 2) {
    RunGroup<2, T>(t, first, rest);
  } else if (rest <= 4) {
    RunGroup<4, T>(t, first, rest);
  } else {
    RunGroup<kMost, T>(t, first, rest);
  }
}

inline void RunAttentionTile(const AttentionTile& tile) {
  for (int i = 0; i < tile.rows && !tile.resume; ++i) {
    tile.max[i] = -__builtin_inff();
    tile.sum[i] = 0;
    float* acc = tile.acc + i * tile.acc_stride;
    for (int d = 0; d < tile.value_dim; ++d) acc[d] = 0;
  }
  for (int i = 0; i < kAttentionRuns; ++i) {
    Run run;
    int most = 0;
    for (int r = 0; r < tile.rows; ++r) {
      const int seen = tile.visible[r] - i * kRunKeys;
      run.visible[r] = seen < 0 ? 0 : (seen < kRunKeys ? seen : kRunKeys);
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
      RunRows<float>(run);
    } else if (tile.kv_dtype == tensor::DType::kI8) {
      RunRows<int8_t>(run);
    } else {
      RunRows<uint16_t>(run);
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
