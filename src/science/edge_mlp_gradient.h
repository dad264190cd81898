// Backward passes of perceptrons on edges. Hidden values are computed again for a block of edges at a time.
#pragma once

#include "science/dense_gradient.h"
#include "science/edge_mlp.h"

namespace moesaic::science {

/// Output buffers to which gradients of a perceptron's inputs and parameters are added; null or empty: not
/// computed.
struct EdgeMlpGradients {
  float* dst = nullptr;           ///< [num_dst, F_dst]
  float* src = nullptr;           ///< [num_src, F_src]; may be dst, for graphs with one set of nodes
  float* edge = nullptr;          ///< [num_edges, F_edge]
  float* dst_xyz = nullptr;       ///< [num_dst, 3]
  float* src_xyz = nullptr;       ///< [num_src, 3]; may be dst_xyz
  float* first_weight = nullptr;  ///< [H, F_dst + F_src + (1) + F_edge], the layout of EdgeMlp::SplitFirst
  float* first_bias = nullptr;    ///< [H]
  std::vector<DenseGradients> rest{};  ///< One per layer after the first, or empty.

  /// Looks the parameters up by the names that EdgeMlp::Load() reads.
  Status FindParameters(const EdgeMlp& mlp, const GradientScope& scope);
};

/// Consecutive positions of the graph by destination.
struct EdgeBlock {
  int32_t first, count;
  const float* messages;  ///< [count, outputs]
  float* grad;            ///< [count, outputs]: gradient of the messages, written by the callback
};
/// Edges per block: bounds the memory of hidden values.
inline constexpr int32_t kEdgeBlock = 4096;

/// Computes messages again block by block, calls message_grad for every block in order, and adds gradients
/// of inputs and parameters.
Status EdgeMlpBackward(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                       const EdgeMlpInputs& inputs, const std::function<void(const EdgeBlock&)>& message_grad,
                       const EdgeMlpGradients& out);

/// Gradients of EdgeMlpReduce() for out_grad [num_dst, outputs].
Status EdgeMlpReduceBackward(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                             const EdgeMlpInputs& inputs, graph::Reduce reduce, float scale,
                             const float* out_grad, const EdgeMlpGradients& out);

}  // namespace moesaic::science
