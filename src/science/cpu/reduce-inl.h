// Fused gather, combine and reduce over elements-inl.h, which must be included first.
#pragma once

#include <cstdint>
#include <type_traits>

namespace moesaic::graph::cpu {
namespace {

// A segment is reduced in blocks of columns whose accumulators stay in registers: half of them leave room for
// loads, and 8 or more independent sums hide the latency of an FMA.
constexpr int kReduceBlock = kRegisters / 2;
// Rows of u and e are read in random order. Positions ahead at which they are prefetched: at 64 columns an
// edge takes about 8 cycles, with AVX-512 4, so that they cover an access to the L3 cache. Positions of the
// task's next segments count: many segments have fewer edges than this.
constexpr int kPrefetchAhead = kRegisters;

// Segments [first, last) of a task.
struct SegmentSpan {
  int32_t first, last;
};

// The columns of one block. `e_first` is the column of e for all of them if e is shared by groups.
struct ReduceColumns {
  int64_t first;
  int64_t e_first;
  int n;  // columns in the last vector; kLanes unless the block is a tail
};

inline bool IsAligned(const float* p) {
  constexpr uintptr_t kVectorBytes = kLanes * sizeof(float);
  return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0;
}

template <typename E>
inline void StoreSum(const ReduceTask& t, int32_t s, int64_t col, V sum, int n) {
  const bool whole = n == kLanes;
  if (t.out_f32) {
    float* out = static_cast<float*>(t.out) + s * t.out_stride + col;
    whole ? kernels::Store(out, sum) : kernels::StoreFirst(out, sum, n);
    return;
  }
  if (t.reduce == Reduce::kMean) {
    const int32_t edges = t.ptr[s + 1] - t.ptr[s];
    sum = Div(sum, Set(static_cast<float>(edges > 1 ? edges : 1)));
  }
  if (t.alpha != 1) sum = Mul(Set(t.alpha), sum);
  auto* out = static_cast<typename E::T*>(t.out) + s * t.out_stride + col;
  if (t.beta != 0) {
    const V old = whole ? E::Load(out) : E::LoadFirst(out, n);
    sum = Add(Mul(Set(t.beta), old), sum);
  }
  if constexpr (std::is_same_v<E, F32>) {
    if (t.stream && whole && IsAligned(out)) return Stream(out, sum);
  }
  if (whole) {
    E::Store(out, sum);
  } else {
    E::StoreFirst(out, sum, n);
  }
}

// Whether a sum is stored as it is.
inline bool IsPlainSum(const ReduceTask& t) {
  return !t.out_f32 && t.reduce == Reduce::kSum && t.alpha == 1 && t.beta == 0;
}

// Stores the block of segment s. The loads of the next segment wait for the instructions in between, so that
// the most frequent case has few.
template <typename E, int kBlock, bool kPart>
inline void StoreSums(const ReduceTask& t, bool plain, int32_t s, const ReduceColumns& c,
                      const V (&sum)[kBlock]) {
  if (kPart || !plain) {
    for (int b = 0; b < kBlock; ++b) StoreSum<E>(t, s, c.first + b * kLanes, sum[b], kPart ? c.n : kLanes);
    return;
  }
  auto* out = static_cast<typename E::T*>(t.out) + s * t.out_stride + c.first;
  if constexpr (std::is_same_v<E, F32>) {
    if (t.stream && IsAligned(out)) {
#pragma GCC unroll 16
      for (int b = 0; b < kBlock; ++b) Stream(out + b * kLanes, sum[b]);
      return;
    }
  }
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) E::Store(out + b * kLanes, sum[b]);
}

// Blocks are functions of their own: several loops call each, and inlined copies would double the object.
template <typename E, Op op, bool kShared, int kBlock, bool kPart>
[[gnu::noinline]] void SumBlock(const ReduceTask& t, SegmentSpan segments, const ReduceColumns& c) {
  const auto* u = static_cast<const typename E::T*>(t.u) + c.first;
  const auto* e = static_cast<const typename E::T*>(t.e) + c.e_first;
  const int32_t prefetch_end = t.prefetch ? t.ptr[t.last] - kPrefetchAhead : 0;
  const bool plain = IsPlainSum(t);
  for (int32_t s = segments.first; s < segments.last; ++s) {
    const int32_t begin = t.ptr[s], end = t.ptr[s + 1];
    V sum[kBlock];
#pragma GCC unroll 16
    for (int b = 0; b < kBlock; ++b) sum[b] = Zero();
    for (int32_t p = begin; p < end; ++p) {
      const auto* row = u + (t.u_rows != nullptr ? t.u_rows[p] : p) * t.u_stride;
      if (p < prefetch_end) {
        const auto* ahead = reinterpret_cast<const char*>(u + t.u_rows[p + kPrefetchAhead] * t.u_stride);
#pragma GCC unroll 16
        for (int b = 0; b < kBlock * kLanes * static_cast<int>(sizeof(typename E::T)); b += 64)
          __builtin_prefetch(ahead + b);
        if (op != Op::kCopyU && t.e_rows != nullptr)
          __builtin_prefetch(e + t.e_rows[p + kPrefetchAhead] * t.e_stride);
      }
      const typename E::T* weights = nullptr;
      V shared = Zero();
      if constexpr (op != Op::kCopyU) {
        weights = e + (t.e_rows != nullptr ? t.e_rows[p] : p) * t.e_stride;
        if constexpr (kShared) shared = E::Broadcast(weights);
      }
#pragma GCC unroll 16
      for (int b = 0; b < kBlock; ++b) {
        const V x = LoadLanes<E, kPart>(row + b * kLanes, c.n);
        if constexpr (op == Op::kCopyU) {
          sum[b] = Add(sum[b], x);
        } else {
          const V w = kShared ? shared : LoadLanes<E, kPart>(weights + b * kLanes, c.n);
          if constexpr (op == Op::kMul) {
            sum[b] = Fma(x, w, sum[b]);
          } else {
            sum[b] = Add(sum[b], Apply<op>(x, w));
          }
        }
      }
    }
    StoreSums<E, kBlock, kPart>(t, plain, s, c, sum);
  }
}

// The sum of a gradient: an edge contributes only to the columns that chose it.
template <typename E, Op op, bool kShared, int kBlock, bool kPart>
[[gnu::noinline]] void MaskedSumBlock(const ReduceTask& t, int32_t s, const ReduceColumns& c) {
  const auto* u = static_cast<const typename E::T*>(t.u) + c.first;
  const auto* e = static_cast<const typename E::T*>(t.e) + c.e_first;
  V sum[kBlock];
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) sum[b] = Zero();
  for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) {
    const int64_t row = t.u_rows != nullptr ? t.u_rows[p] : p;
    const int32_t edge = t.e_rows != nullptr ? t.e_rows[p] : p;
    const int32_t* chosen = t.arg + row * t.cols + c.first;
    for (int b = 0; b < kBlock; ++b) {
      V x = LoadLanes<E, kPart>(u + row * t.u_stride + b * kLanes, c.n);
      if constexpr (op != Op::kCopyU) {
        const auto* weights = e + edge * t.e_stride;
        x = Apply<op>(x, kShared ? E::Broadcast(weights) : LoadLanes<E, kPart>(weights + b * kLanes, c.n));
      }
      const VI arg = LoadFirstInts(chosen + b * kLanes, kPart ? c.n : kLanes);
      sum[b] = Add(sum[b], KeepEqual(arg, SetInts(edge), x));
    }
  }
  for (int b = 0; b < kBlock; ++b) StoreSum<E>(t, s, c.first + b * kLanes, sum[b], kPart ? c.n : kLanes);
}

template <typename E, Op op, bool kShared, int kBlock, bool kPart>
[[gnu::noinline]] void MaxBlock(const ReduceTask& t, int32_t s, const ReduceColumns& c) {
  const auto* u = static_cast<const typename E::T*>(t.u) + c.first;
  const auto* e = static_cast<const typename E::T*>(t.e) + c.e_first;
  const bool min = t.reduce == Reduce::kMin;
  const int32_t begin = t.ptr[s], end = t.ptr[s + 1];
  V best[kBlock];
  VI arg[kBlock];
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) {
    best[b] = Zero();
    arg[b] = SetInts(t.arg_empty);
  }
  for (int32_t p = begin; p < end; ++p) {
    const auto* row = u + (t.u_rows != nullptr ? t.u_rows[p] : p) * t.u_stride;
    const int32_t edge = t.e_rows != nullptr ? t.e_rows[p] : p;
    const auto* weights = e + edge * t.e_stride;
    const VI id = SetInts(edge);
#pragma GCC unroll 16
    for (int b = 0; b < kBlock; ++b) {
      V x = LoadLanes<E, kPart>(row + b * kLanes, c.n);
      if constexpr (op != Op::kCopyU) {
        x = Apply<op>(x, kShared ? E::Broadcast(weights) : LoadLanes<E, kPart>(weights + b * kLanes, c.n));
      }
      if (min) x = Negate(x);
      if (p == begin) {
        best[b] = x;
        arg[b] = id;
      } else {
        MaxStep(x, id, &best[b], &arg[b]);
      }
    }
  }
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) {
    const V x = min && begin < end ? Negate(best[b]) : best[b];
    const int n = kPart ? c.n : kLanes;
    const int64_t col = c.first + b * kLanes;
    if (t.out_f32) {
      StoreLanes<F32, kPart>(static_cast<float*>(t.out) + s * t.out_stride + col, x, n);
    } else {
      StoreLanes<E, kPart>(static_cast<typename E::T*>(t.out) + s * t.out_stride + col, x, n);
    }
    if (t.arg == nullptr) continue;
    int32_t* chosen = t.arg + s * t.cols + col;
    kPart ? StoreFirstInts(chosen, arg[b], n) : StoreInts(chosen, arg[b]);
  }
}

// Sums consecutive rows of more columns than a block has, up to kStreamColumns. A block of columns of all
// rows of a segment would read a part of every row; groups of rows of kStreamBytes are read about in order,
// as the hardware's prefetchers expect, and the rest of their lines is still in the L1 cache for the next
// block. Sums are kept in memory between groups and added to in the order of SumBlock(), so that results are
// the same. Software prefetches make this slower (Zen 3: by a third from memory).
constexpr int64_t kStreamColumns = 1024;
constexpr int64_t kStreamBytes = 24 << 10;  // of an L1 cache of 32 KiB or more, which also holds the sums

// Adds `count` rows to a block of sums, or to zeros. n is the number of columns in the last vector.
template <typename E, int kBlock, bool kPart>
inline void AddRows(const typename E::T* row, int64_t stride, int32_t count, int n, bool begin, float* sums) {
  V sum[kBlock];
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) sum[b] = begin ? Zero() : kernels::Load(sums + b * kLanes);
  for (int32_t r = 0; r < count; ++r, row += stride) {
#pragma GCC unroll 16
    for (int b = 0; b < kBlock; ++b) sum[b] = Add(sum[b], LoadLanes<E, kPart>(row + b * kLanes, n));
  }
#pragma GCC unroll 16
  for (int b = 0; b < kBlock; ++b) kernels::Store(sums + b * kLanes, sum[b]);
}

template <typename E>
[[gnu::noinline]] void SumStreamedRows(const ReduceTask& t, int32_t s) {
  alignas(64) float sums[kStreamColumns];
  constexpr int64_t kWide = kReduceBlock * kLanes;
  const auto group =
      static_cast<int32_t>(kStreamBytes / (t.cols * static_cast<int64_t>(sizeof(typename E::T))));
  const int64_t whole = t.cols / kLanes * kLanes;
  const int tail = static_cast<int>(t.cols - whole);
  const int32_t begin = t.ptr[s], end = t.ptr[s + 1];
  for (int64_t p = begin; p < end || p == begin; p += group) {
    const auto count = static_cast<int32_t>(end - p < group ? end - p : group);
    const auto* rows = static_cast<const typename E::T*>(t.u) + p * t.u_stride;
    int64_t col = 0;
    for (; col + kWide <= whole; col += kWide)
      AddRows<E, kReduceBlock, false>(rows + col, t.u_stride, count, kLanes, p == begin, sums + col);
    for (; col < whole; col += kLanes)
      AddRows<E, 1, false>(rows + col, t.u_stride, count, kLanes, p == begin, sums + col);
    if (tail > 0) AddRows<E, 1, true>(rows + whole, t.u_stride, count, tail, p == begin, sums + whole);
  }
  for (int64_t col = 0; col < whole; col += kLanes) StoreSum<E>(t, s, col, kernels::Load(sums + col), kLanes);
  if (tail > 0) StoreSum<E>(t, s, whole, kernels::Load(sums + whole), tail);
}

enum class ReduceKind { kSum, kMasked, kMax };

// Reduces one block of columns of the segments.
template <typename E, Op op, bool kShared, ReduceKind kind, int kBlock, bool kPart>
inline void ReduceOneBlock(const ReduceTask& t, SegmentSpan segments, const ReduceColumns& c) {
  if constexpr (kind == ReduceKind::kSum) {
    SumBlock<E, op, kShared, kBlock, kPart>(t, segments, c);
  } else {
    for (int32_t s = segments.first; s < segments.last; ++s) {
      if constexpr (kind == ReduceKind::kMasked) MaskedSumBlock<E, op, kShared, kBlock, kPart>(t, s, c);
      if constexpr (kind == ReduceKind::kMax) MaxBlock<E, op, kShared, kBlock, kPart>(t, s, c);
    }
  }
}

// Reduces columns [col, last) in blocks of at most kBlock vectors; the last one may be a part.
template <typename E, Op op, bool kShared, ReduceKind kind, int kBlock>
inline void ReduceRestOfRow(const ReduceTask& t, SegmentSpan segments, int64_t col, int64_t last,
                            int64_t e_first) {
  for (; col + kBlock * kLanes <= last; col += kBlock * kLanes)
    ReduceOneBlock<E, op, kShared, kind, kBlock, false>(t, segments, {col, kShared ? e_first : col, kLanes});
  if constexpr (kBlock > 1) {
    ReduceRestOfRow<E, op, kShared, kind, kBlock / 2>(t, segments, col, last, e_first);
  } else if (col < last) {
    const auto n = static_cast<int>(last - col);
    ReduceOneBlock<E, op, kShared, kind, 1, true>(t, segments, {col, kShared ? e_first : col, n});
  }
}

// Returns whether ReduceRestOfRow() needs one block for `columns` columns: a power of two of whole vectors,
// or a part of one.
inline bool IsOneBlock(int64_t columns) {
  const int64_t vectors = columns / kLanes;
  return columns < kLanes || (columns % kLanes == 0 && (vectors & (vectors - 1)) == 0);
}

// Reduces columns [first, last) of segments [t.first, t.last); they share one column of e if kShared.
template <typename E, Op op, bool kShared, ReduceKind kind>
inline void ReduceColumnRange(const ReduceTask& t, int64_t first, int64_t last, int64_t e_first) {
  constexpr int kBlock = kind == ReduceKind::kMax ? kReduceBlock / 2 : kReduceBlock;
  constexpr int64_t kColumns = kBlock * kLanes;
  int64_t col = first;
  for (; t.by_columns && col + kColumns <= last; col += kColumns) {
    ReduceOneBlock<E, op, kShared, kind, kBlock, false>(t, {t.first, t.last},
                                                        {col, kShared ? e_first : col, kLanes});
  }
  if (col == last) return;
  // A single block is reduced for all segments at once. Several blocks are reduced for one segment after the
  // other, while its rows are in the caches.
  const bool one_block = last - first <= kColumns && IsOneBlock(last - first);
  const int32_t step = one_block ? t.last - t.first : 1;
  for (int32_t s = t.first; s < t.last; s += step)
    ReduceRestOfRow<E, op, kShared, kind, kBlock>(t, {s, s + step}, col, last, e_first);
}

template <typename E, Op op, ReduceKind kind>
void ReduceSegments(const ReduceTask& t) {
  if constexpr (op == Op::kCopyU && kind == ReduceKind::kSum) {
    if (t.u_rows == nullptr && t.cols > kReduceBlock * kLanes && t.cols <= kStreamColumns) {
      for (int32_t s = t.first; s < t.last; ++s) SumStreamedRows<E>(t, s);
      return;
    }
  }
  if (op == Op::kCopyU || t.e_group == 1) return ReduceColumnRange<E, op, false, kind>(t, 0, t.cols, 0);
  if constexpr (op != Op::kCopyU) {
    if (t.e_group == t.cols || t.by_columns) {
      for (int64_t j = 0; j * t.e_group < t.cols; ++j)
        ReduceColumnRange<E, op, true, kind>(t, j * t.e_group, (j + 1) * t.e_group, j);
      return;
    }
    for (int32_t s = t.first; s < t.last; ++s) {  // all groups of a row while it is in the L1 cache
      ReduceTask one = t;
      one.first = s;
      one.last = s + 1;
      for (int64_t j = 0; j * t.e_group < t.cols; ++j)
        ReduceColumnRange<E, op, true, kind>(one, j * t.e_group, (j + 1) * t.e_group, j);
    }
  }
}

template <typename E, ReduceKind kind>
void ReduceByOp(const ReduceTask& t) {
  switch (t.op) {
    case Op::kCopyU:
      return ReduceSegments<E, Op::kCopyU, kind>(t);
    case Op::kAdd:
      return ReduceSegments<E, Op::kAdd, kind>(t);
    case Op::kSub:
      return ReduceSegments<E, Op::kSub, kind>(t);
    case Op::kMul:
      return ReduceSegments<E, Op::kMul, kind>(t);
    case Op::kDiv:
      return ReduceSegments<E, Op::kDiv, kind>(t);
  }
}

inline void RunReduce(const ReduceTask& t) {
  WithElements(t.dtype, [&](auto elements) {
    using E = decltype(elements);
    if (t.reduce == Reduce::kMax || t.reduce == Reduce::kMin) {
      ReduceByOp<E, ReduceKind::kMax>(t);
    } else if (t.arg != nullptr) {
      ReduceByOp<E, ReduceKind::kMasked>(t);
    } else {
      ReduceByOp<E, ReduceKind::kSum>(t);
    }
  });
  if (t.stream) Fence();
}

}  // namespace
}  // namespace moesaic::graph::cpu
