// Per-edge combination of node and edge features over elements-inl.h, which must be included first.
#pragma once

namespace moesaic::graph::cpu {
namespace {

template <typename E>
struct EdgeRows {
  const typename E::T* lhs;
  const typename E::T* rhs;
  const int32_t* mask;
  int32_t edge;
};

template <typename E, Op op, bool kPart>
inline V EdgeValue(const EdgeRows<E>& r, int64_t col, int64_t rhs_group, int n) {
  V x = LoadLanes<E, kPart>(r.lhs + col, n);
  if constexpr (op != Op::kCopyU) {
    if (rhs_group == 1) {
      x = Apply<op>(x, LoadLanes<E, kPart>(r.rhs + col, n));
    } else {
      x = Apply<op>(x, E::Broadcast(r.rhs + col / rhs_group));
    }
  }
  if (r.mask != nullptr) x = KeepEqual(LoadFirstInts(r.mask + col, n), SetInts(r.edge), x);
  return x;
}

// Columns [first, last), which share one element of rhs if rhs_group is above 1.
template <typename E, Op op, typename Out>
inline void MapRange(const EdgeRows<E>& r, typename Out::T* out, int64_t first, int64_t last,
                     int64_t rhs_group, V alpha) {
  int64_t col = first;
  for (; col + kLanes <= last; col += kLanes)
    Out::Store(out + col, Mul(alpha, EdgeValue<E, op, false>(r, col, rhs_group, kLanes)));
  const int n = static_cast<int>(last - col);
  if (n > 0) Out::StoreFirst(out + col, Mul(alpha, EdgeValue<E, op, true>(r, col, rhs_group, n)), n);
}

template <typename E, Op op>
inline float SumRange(const EdgeRows<E>& r, int64_t first, int64_t last, int64_t rhs_group) {
  V sum[2] = {Zero(), Zero()};
  int64_t col = first;
  for (; col + 2 * kLanes <= last; col += 2 * kLanes) {
    sum[0] = Add(sum[0], EdgeValue<E, op, false>(r, col, rhs_group, kLanes));
    sum[1] = Add(sum[1], EdgeValue<E, op, false>(r, col + kLanes, rhs_group, kLanes));
  }
  if (col + kLanes <= last) {
    sum[0] = Add(sum[0], EdgeValue<E, op, false>(r, col, rhs_group, kLanes));
    col += kLanes;
  }
  const int n = static_cast<int>(last - col);
  if (n > 0) {
    // Lanes beyond the last column may hold NaN after a division: clear them.
    float lanes[kLanes];
    kernels::Store(lanes, EdgeValue<E, op, true>(r, col, rhs_group, n));
    sum[1] = Add(sum[1], kernels::LoadFirst(lanes, n));
  }
  return SumLanes(Add(sum[0], sum[1]));
}

template <typename E, Op op, typename Out>
void MapEdges(const EdgeMapTask& t) {
  for (int32_t p = t.first; p < t.last; ++p) {
    const int64_t lhs = t.lhs_rows != nullptr ? t.lhs_rows[p] : p;
    const int64_t rhs = t.rhs_rows != nullptr ? t.rhs_rows[p] : p;
    const int32_t out = t.out_rows != nullptr ? t.out_rows[p] : p;
    const EdgeRows<E> r = {static_cast<const typename E::T*>(t.lhs) + lhs * t.lhs_stride,
                           static_cast<const typename E::T*>(t.rhs) + rhs * t.rhs_stride,
                           t.mask != nullptr ? t.mask + lhs * t.cols : nullptr, out};
    auto* row = static_cast<typename Out::T*>(t.out) + int64_t{out} * t.out_stride;
    if (t.sum_group == 0) {
      const int64_t step = op == Op::kCopyU || t.rhs_group == 1 ? t.cols : t.rhs_group;
      for (int64_t col = 0; col < t.cols; col += step)
        MapRange<E, op, Out>(r, row, col, col + step, t.rhs_group, Set(t.alpha));
      continue;
    }
    for (int64_t j = 0; j * t.sum_group < t.cols; ++j) {
      float sum = 0;
      const int64_t first = j * t.sum_group, last = first + t.sum_group;
      const int64_t step = op == Op::kCopyU || t.rhs_group == 1 ? t.sum_group : 1;
      for (int64_t col = first; col < last; col += step)
        sum += SumRange<E, op>(r, col, col + step, t.rhs_group);
      Out::StoreOne(row + j, t.alpha * sum);
    }
  }
}

template <typename E, typename Out>
void MapEdgesByOp(const EdgeMapTask& t) {
  switch (t.op) {
    case Op::kCopyU:
      return MapEdges<E, Op::kCopyU, Out>(t);
    case Op::kAdd:
      return MapEdges<E, Op::kAdd, Out>(t);
    case Op::kSub:
      return MapEdges<E, Op::kSub, Out>(t);
    case Op::kMul:
      return MapEdges<E, Op::kMul, Out>(t);
    case Op::kDiv:
      return MapEdges<E, Op::kDiv, Out>(t);
  }
}

inline void RunEdgeMap(const EdgeMapTask& t) {
  WithElements(t.dtype, [&](auto elements) {
    using E = decltype(elements);
    if (t.out_f32) return MapEdgesByOp<E, F32>(t);
    return MapEdgesByOp<E, E>(t);
  });
}

}  // namespace
}  // namespace moesaic::graph::cpu
