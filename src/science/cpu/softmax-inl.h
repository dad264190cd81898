// Segmented softmax and attention over edges over elements-inl.h, which must be included first.
#pragma once

#include "science/cpu/masked_exp-inl.h"

namespace moesaic::graph::cpu {
namespace {

template <typename E, bool kPart>
inline void SoftmaxColumns(const SoftmaxTask& t, int32_t s, int64_t col, int n) {
  const auto* x = static_cast<const typename E::T*>(t.x) + col;
  auto* out = static_cast<typename E::T*>(t.out) + col;
  const int32_t begin = t.ptr[s], end = t.ptr[s + 1];
  auto row = [&](int32_t p) -> int64_t { return t.rows != nullptr ? t.rows[p] : p; };
  if (t.grad != nullptr) {
    const auto* grad = static_cast<const typename E::T*>(t.grad) + col;
    V dot = Zero();
    for (int32_t p = begin; p < end; ++p) {
      dot = Fma(LoadLanes<E, kPart>(x + row(p) * t.x_stride, n),
                LoadLanes<E, kPart>(grad + row(p) * t.grad_stride, n), dot);
    }
    for (int32_t p = begin; p < end; ++p) {
      const V y = LoadLanes<E, kPart>(x + row(p) * t.x_stride, n);
      const V g = LoadLanes<E, kPart>(grad + row(p) * t.grad_stride, n);
      StoreLanes<E, kPart>(out + row(p) * t.out_stride, Mul(y, Sub(g, dot)), n);
    }
    return;
  }
  if (begin == end) return;
  V max = LoadLanes<E, kPart>(x + row(begin) * t.x_stride, n);
  for (int32_t p = begin + 1; p < end; ++p) max = Max(LoadLanes<E, kPart>(x + row(p) * t.x_stride, n), max);
  max = Max(Set(-__FLT_MAX__), max);  // -inf - -inf is NaN, not 0; keeps NaN
  V sum = Zero();
  for (int32_t p = begin; p < end; ++p)
    sum = Add(sum, Weight(Sub(LoadLanes<E, kPart>(x + row(p) * t.x_stride, n), max)));
  sum = Max(Set(__FLT_MIN__), sum);  // 0 if all are -inf, otherwise some 1 or more; keeps NaN
  for (int32_t p = begin; p < end; ++p) {
    const V e = Weight(Sub(LoadLanes<E, kPart>(x + row(p) * t.x_stride, n), max));
    StoreLanes<E, kPart>(out + row(p) * t.out_stride, Div(e, sum), n);
  }
}

inline void RunSoftmax(const SoftmaxTask& t) {
  WithElements(t.dtype, [&](auto elements) {
    using E = decltype(elements);
    for (int32_t s = t.first; s < t.last; ++s) {
      int64_t col = 0;
      for (; col + kLanes <= t.cols; col += kLanes) SoftmaxColumns<E, false>(t, s, col, kLanes);
      if (col < t.cols) SoftmaxColumns<E, true>(t, s, col, static_cast<int>(t.cols - col));
    }
  });
}

template <typename E>
inline float HeadDot(const float* q, const typename E::T* k, int dim) {
  V sum[2] = {Zero(), Zero()};
  int i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    sum[0] = Fma(kernels::Load(q + i), E::Load(k + i), sum[0]);
    sum[1] = Fma(kernels::Load(q + i + kLanes), E::Load(k + i + kLanes), sum[1]);
  }
  for (; i + kLanes <= dim; i += kLanes) sum[0] = Fma(kernels::Load(q + i), E::Load(k + i), sum[0]);
  if (i < dim) sum[1] = Fma(kernels::LoadFirst(q + i, dim - i), E::LoadFirst(k + i, dim - i), sum[1]);
  return SumLanes(Add(sum[0], sum[1]));
}

// Attention state of one node and head.
struct HeadState {
  float max, sum;
  float acc[kMaxHeadDim];
};

// Adds the weighted values of dimensions [d, d + kLanes) to the state, whose earlier sum is scaled by
// `before`.
template <typename E, bool kPart>
inline void AddValues(const EdgeAttentionTask& t, int head, int32_t begin, int32_t end, const float* weights,
                      float before, int d, HeadState* state) {
  const auto* v = static_cast<const typename E::T*>(t.v) + int64_t{head} * t.v_dim + d;
  const int n = kPart ? t.v_dim - d : kLanes;
  V acc = Mul(Set(before), LoadLanes<F32, kPart>(state->acc + d, n));
  for (int32_t p = begin; p < end; ++p) {
    const auto* row = v + (t.v_rows != nullptr ? t.v_rows[p] : p) * t.v_stride;
    acc = Fma(Set(weights[p - begin]), LoadLanes<E, kPart>(row, n), acc);
  }
  StoreLanes<F32, kPart>(state->acc + d, acc, n);
}

// Adds the positions [begin, end) of at most kScoreChunk.
template <typename E>
inline void AttendChunk(const EdgeAttentionTask& t, int head, int32_t begin, int32_t end, const float* q,
                        HeadState* state) {
  const auto* k = static_cast<const typename E::T*>(t.k) + int64_t{head} * t.dim;
  const auto* bias = static_cast<const typename E::T*>(t.bias);
  if (bias != nullptr) bias += head;
  float scores[kScoreChunk + kLanes];
  float max = state->max;
  for (int32_t p = begin; p < end; ++p) {
    float score = HeadDot<E>(q, k + (t.k_rows != nullptr ? t.k_rows[p] : p) * t.k_stride, t.dim);
    if (t.bias != nullptr)
      score += First(E::Broadcast(bias + (t.e_rows != nullptr ? t.e_rows[p] : p) * t.bias_stride));
    scores[p - begin] = score;
    if (score > max) max = score;  // passes over NaN, which makes the sum NaN
  }
  const int count = end - begin;
  // While all scores are -inf (masked), their weights are exp(-inf - shift) = 0.
  const float shift = max < -__FLT_MAX__ ? 0 : max;
  float before = 0;
  if (state->max == max) {
    before = 1;
  } else if (state->sum > 0) {
    before = First(Exp(Set(state->max - max)));
  }
  V sum = Zero();
  for (int i = 0; i < count; i += kLanes) {
    const int n = count - i < kLanes ? count - i : kLanes;
    const V x = Weight(Sub(kernels::LoadFirst(scores + i, n), Set(shift)));
    kernels::Store(scores + i, x);  // lanes beyond `count` are not read as weights
    sum = Add(sum, kernels::LoadFirst(scores + i, n));
  }
  state->sum = state->sum * before + SumLanes(sum);
  state->max = max;
  int d = 0;
  for (; d + kLanes <= t.v_dim; d += kLanes)
    AddValues<E, false>(t, head, begin, end, scores, before, d, state);
  if (d < t.v_dim) AddValues<E, true>(t, head, begin, end, scores, before, d, state);
}

template <typename E>
inline void AttendHead(const EdgeAttentionTask& t, int32_t node, int head, HeadState* state) {
  float q[kMaxHeadDim + kLanes];
  const auto* row = static_cast<const typename E::T*>(t.q) + node * t.q_stride + int64_t{head} * t.dim;
  for (int i = 0; i < t.dim; i += kLanes) {
    const int n = t.dim - i < kLanes ? t.dim - i : kLanes;
    kernels::Store(q + i, Mul(Set(t.scale), n == kLanes ? E::Load(row + i) : E::LoadFirst(row + i, n)));
  }
  state->max = -__builtin_inff();
  state->sum = 0;
  for (int i = 0; i < t.v_dim; ++i) state->acc[i] = 0;
  for (int32_t p = t.ptr[node]; p < t.ptr[node + 1]; p += kScoreChunk) {
    AttendChunk<E>(t, head, p, p + kScoreChunk < t.ptr[node + 1] ? p + kScoreChunk : t.ptr[node + 1], q,
                   state);
  }
  const bool empty = state->sum == 0;  // no edge, or all masked; otherwise the sum is NaN or some 1 or more
  const V inverse = empty ? Zero() : Set(1.0F / state->sum);
  auto* out = static_cast<typename E::T*>(t.out) + node * t.out_stride + int64_t{head} * t.v_dim;
  int d = 0;
  for (; d + kLanes <= t.v_dim; d += kLanes) E::Store(out + d, Mul(inverse, kernels::Load(state->acc + d)));
  if (d < t.v_dim)
    E::StoreFirst(out + d, Mul(inverse, kernels::LoadFirst(state->acc + d, t.v_dim - d)), t.v_dim - d);
  if (t.log_sum != nullptr) {
    t.log_sum[int64_t{node} * t.heads + head] =
        empty ? -__builtin_inff() : state->max + __builtin_logf(state->sum);
  }
}

inline void RunEdgeAttention(const EdgeAttentionTask& t) {
  HeadState state;
  WithElements(t.dtype, [&](auto elements) {
    for (int32_t node = t.first; node < t.last; ++node) {
      for (int head = 0; head < t.heads; ++head) AttendHead<decltype(elements)>(t, node, head, &state);
    }
  });
}

}  // namespace
}  // namespace moesaic::graph::cpu
