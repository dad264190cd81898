// Micro-kernel interfaces of graph operators. Files compiled for one instruction set include this header, so
// it must not contain inline code (see kernels/impl_list.h).
//
// A micro-kernel is single-threaded. Operators validate their arguments, divide the work by edges and call
// micro-kernels on each part. Every micro-kernel has a plain version in ref/ with the same signature.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace moesaic::graph {

enum class Op : uint8_t { kCopyU, kAdd, kSub, kMul, kDiv };
enum class Reduce : uint8_t { kSum, kMean, kMax, kMin };

/// out[s] = beta * out[s] + alpha * reduce over the segment's positions p of (u[u_rows[p]] op e[e_rows[p]]).
/// Sums are accumulated in f32. A mean is divided by max(1, positions). Maximum and minimum of an empty
/// segment are 0; NaN is larger than every number in a maximum and smaller in a minimum.
struct ReduceTask {
  const int32_t* ptr = nullptr;     // segment s has positions [ptr[s], ptr[s + 1])
  int32_t first = 0, last = 0;      // segments of this task
  const int32_t* u_rows = nullptr;  // row of u at each position; null: the position
  const int32_t* e_rows =
      nullptr;              // row of e, and the number of the edge, at each position; null: the position
  const void* u = nullptr;  // [u rows, u_stride]
  const void* e = nullptr;  // [e rows, e_stride]; unused by kCopyU
  int64_t u_stride = 0, e_stride = 0;
  tensor::DType dtype = tensor::DType::kF32;  // of u, e and out: kF32, kBF16 or kF16
  int64_t cols = 0;
  int64_t e_group = 0;  // consecutive columns that share an element of e; 1: e has cols columns
  Op op = Op::kCopyU;
  Reduce reduce = Reduce::kSum;
  float alpha = 0, beta = 0;  // must be 1 and 0 for kMax and kMin
  void* out = nullptr;        // [segments, out_stride]
  int64_t out_stride = 0;
  // Order in which rows of u are read; results do not depend on it. With by_columns, all segments are reduced
  // for one block of columns after the other: a block of u fits in the L2 cache, and all of u does not. With
  // prefetch, rows are prefetched, because the caches do not hold them.
  bool by_columns = false, prefetch = false;
  // Sums of f32 are stored past the caches where out has whole, aligned vectors. For a large out, which the
  // caches would not hold until its reader comes: its lines are not read first, and rows of u stay in the L3.
  bool stream = false;
  // The segment is a part of a hub: out is f32 for any dtype, and alpha, beta and a mean's divisor are not
  // applied.
  bool out_f32 = false;
  // Edge of the maximum or minimum [segments, cols], or null. Empty segments get arg_empty. With a sum it is
  // an input: [u rows, cols], and an edge contributes only to columns where it is equal to the edge's number.
  int32_t* arg = nullptr;
  int32_t arg_empty = 0;
};
using ReduceFn = void (*)(const ReduceTask& task);

/// out[out_rows[p]] = alpha * (lhs[lhs_rows[p]] op rhs[rhs_rows[p]]) for positions [first, last). With
/// sum_group G, column j of out is the sum of columns [G j, G (j + 1)) of that.
struct EdgeMapTask {
  int32_t first = 0, last = 0;
  const int32_t* lhs_rows = nullptr;  // null: the position
  const int32_t* rhs_rows = nullptr;
  const int32_t* out_rows = nullptr;
  const void* lhs = nullptr;  // [.., lhs_stride]
  const void* rhs = nullptr;  // unused by kCopyU, which copies lhs
  int64_t lhs_stride = 0, rhs_stride = 0;
  tensor::DType dtype = tensor::DType::kF32;  // of lhs, rhs and, without out_f32, out
  int64_t cols = 0;                           // of lhs
  int64_t rhs_group = 0;                      // consecutive columns that share an element of rhs
  int64_t sum_group = 0;                      // 0: no sums
  Op op = Op::kCopyU;
  float alpha = 0;
  const int32_t* mask =
      nullptr;          // [lhs rows, cols] or null: columns count only where it is equal to out_rows[p]
  void* out = nullptr;  // [.., out_stride]
  int64_t out_stride = 0;
  bool out_f32 = false;  // out is f32 for any dtype
};
using EdgeMapFn = void (*)(const EdgeMapTask& task);

/// Softmax of every column over the rows of a segment, or its gradient. The softmax of elements that are all
/// -inf (masked) is 0.
struct SoftmaxTask {
  const int32_t* ptr = nullptr;
  int32_t first = 0, last = 0;
  const int32_t* rows = nullptr;  // row of x at each position; null: the position
  const void* x = nullptr;        // [rows, stride]: logits; of the gradient, the softmax
  const void* grad = nullptr;     // null, or the gradient of the softmax
  void* out = nullptr;            // x and out may be the same array
  int64_t x_stride = 0, grad_stride = 0, out_stride = 0;
  tensor::DType dtype = tensor::DType::kF32;
  int64_t cols = 0;
};
using SoftmaxFn = void (*)(const SoftmaxTask& task);

/// Positions whose scores an attention task keeps at once.
constexpr int kScoreChunk = 128;
constexpr int64_t kMaxHeadDim = 1024;

/// Attention of destination nodes over their incoming edges, one pass with a running maximum:
/// out[d, h] = sum_p softmax_p(scale * q[d, h] . k[k_rows[p], h] + bias[e_rows[p], h]) v[v_rows[p], h].
/// A node without edges, or whose scores are all -inf (masked), gets zeros.
struct EdgeAttentionTask {
  const int32_t* ptr = nullptr;
  int32_t first = 0, last = 0;
  const int32_t* k_rows = nullptr;  // null: the position
  const int32_t* v_rows = nullptr;
  const int32_t* e_rows = nullptr;
  const void* q = nullptr;     // [nodes, heads * dim]
  const void* k = nullptr;     // [.., heads * dim]
  const void* v = nullptr;     // [.., heads * v_dim]
  const void* bias = nullptr;  // [edges, heads] or null
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, bias_stride = 0;
  tensor::DType dtype = tensor::DType::kF32;
  int heads = 0, dim = 0, v_dim = 0;  // dim and v_dim at most kMaxHeadDim
  float scale = 0;
  void* out = nullptr;  // [nodes, heads * v_dim]
  int64_t out_stride = 0;
  float* log_sum =
      nullptr;  // [nodes, heads] or null: the logarithm of the sum of exponentials; -inf where that is 0
};
using EdgeAttentionFn = void (*)(const EdgeAttentionTask& task);

}  // namespace moesaic::graph
