// Reductions and softmax over segments: scatter, index_add, segment, gather, and their gradients.
#pragma once

#include <span>

#include "science/graph_kernels.h"
#include "science/run_tasks.h"

namespace moesaic::graph {

/// Options of reductions.
struct ReduceOptions {
  float alpha = 1;  ///< Multiplies a sum or mean.
  float beta = 0;   ///< Multiplies the values that out has before; 0 overwrites them. Sum and mean only.
  /// Maximum and minimum only: edge that each element comes from, [segments * cols], or empty. The first of
  /// equal edges is taken; elements of empty segments get the number of edges.
  std::span<int32_t> arg = {};
};

/// out[s, :] = reduce over the segment's edges of src[e, :]. src is [edges, K], out is [segments, K], of one
/// type. Empty segments give 0 for every reduction.
Status Segment(const Context& ctx, Reduce reduce, const Segments& segments, const Features& src,
               const Output& out, const ReduceOptions& options = {});
/// Groups src [E, K] by index [E] and reduces it into out [N, K]: a plan and Segment(). Build the plan once
/// (GroupByIndex) to reuse it.
Status Scatter(const Context& ctx, Reduce reduce, const Features& src, Indices index, const Output& out,
               const ReduceOptions& options = {});
/// out[index[e], :] += alpha * src[e, :].
Status IndexAdd(const Context& ctx, const Output& out, Indices index, const Features& src, float alpha = 1);
/// out[e, :] = src[s, :] for every edge e of segment s.
Status Gather(const Context& ctx, const Segments& segments, const Features& src, const Output& out);

/// Gradient of Segment() by src. `arg` is the result of the forward pass for maximum and minimum, otherwise
/// empty.
Status SegmentBackward(const Context& ctx, Reduce reduce, const Segments& segments, const Features& out_grad,
                       std::span<const int32_t> arg, const Output& src_grad);

/// out[e, h] = exp(x[e, h]) / sum of exp(x[f, h]) over the edges f of e's segment. x and out are [E, H] and
/// may be one array. Elements that are -inf (masked) get 0, also if all elements of the segment are.
Status SegmentSoftmax(const Context& ctx, const Segments& segments, const Features& x, const Output& out);
/// Gradient of SegmentSoftmax() by x; y is its result.
Status SegmentSoftmaxBackward(const Context& ctx, const Segments& segments, const Features& y,
                              const Features& y_grad, const Output& x_grad);

/// Checks options against a reduction with out [segments, cols].
Status CheckOptions(const ReduceOptions& options, Reduce reduce, const Output& out);
/// out[s, :] = x[s, :] / max(1, edges of s). Makes the gradient of a mean that of a sum. `out` may have
/// another type than x.
void DivideByCount(const Context& ctx, const Segments& segments, const Features& x, const Output& out);

}  // namespace moesaic::graph
