// Message passing on graphs: gspmm (gather, combine, reduce in one pass), gsddmm (per-edge results) and their
// gradients.
#pragma once

#include "science/graph.h"
#include "science/segment_ops.h"

namespace moesaic::graph {

/// Message of an edge from its source features u and its own features e.
enum class Message : uint8_t { kCopyU, kCopyE, kUAddE, kUSubE, kUMulE, kUDivE, kUDotE };

/// out[d, :] = reduce over the incoming edges of d of message(u[source], e[edge]). The messages are never
/// stored.
struct GspmmParams {
  Message message = Message::kCopyU;
  Reduce reduce = Reduce::kSum;
  Features u;  ///< [num_src, K]; unused by kCopyE.
  /// [num_edges, J], where J divides K: element j combines with columns [j K/J, (j + 1) K/J) of u, so that
  /// J = 1 is a weight per edge and J = heads a weight per head. [num_edges, K] for kUDotE. Unused by kCopyU.
  Features e;
  Output out;  ///< [num_dst, K]; [num_dst, heads] for kUDotE, where heads divides K. Same type as u and e.
  ReduceOptions options;
};
Status Gspmm(const Context& ctx, const Graph& graph, const GspmmParams& params);

/// Gradients of Gspmm() by u and e, given the gradient of its result. Empty outputs are not computed; the
/// gradient of an unused operand is 0.
struct GspmmGradients {
  Features out_grad;               ///< [num_dst, K]
  std::span<const int32_t> arg{};  ///< Result of the forward pass for maximum and minimum.
  Output u_grad{};                 ///< [num_src, K]
  Output e_grad{};                 ///< Shape of e.
};
/// `forward` holds the forward pass's parameters; its out and options are not used.
Status GspmmBackward(const Context& ctx, const Graph& graph, const GspmmParams& forward,
                     const GspmmGradients& gradients);

/// Owner of a row of features: the source, the destination or the edge itself.
enum class Target : uint8_t { kSource, kDestination, kEdge };
enum class EdgeOp : uint8_t { kCopy, kAdd, kSub, kMul, kDiv, kDot };

/// out[e, :] = lhs[row of e] op rhs[row of e] for every edge.
struct GsddmmParams {
  EdgeOp op = EdgeOp::kDot;
  Features lhs, rhs;  ///< [owners, K] and [owners, J], where J divides K; J = K for kDot. kCopy copies lhs.
  Target lhs_target = Target::kSource, rhs_target = Target::kDestination;
  Output out;  ///< [num_edges, K]; [num_edges, heads] for kDot, where heads divides K. Type of lhs, or f32.
};
Status Gsddmm(const Context& ctx, const Graph& graph, const GsddmmParams& params);

/// Gradients of Gsddmm() by lhs and rhs. Empty outputs are not computed; the gradient of an unused rhs is 0.
struct GsddmmGradients {
  Features out_grad;
  Output lhs_grad{};
  Output rhs_grad{};
};
Status GsddmmBackward(const Context& ctx, const Graph& graph, const GsddmmParams& forward,
                      const GsddmmGradients& gradients);

/// out = alpha * x + beta * out, rounded once to the type of out. x has the shape of out.
void RoundInto(const Context& ctx, const Features& x, float alpha, float beta, const Output& out);

}  // namespace moesaic::graph
