// Attention of nodes over their incoming edges, in one pass over the graph.
#pragma once

#include "science/message_ops.h"

namespace moesaic::graph {

/// out[d, h] = sum over incoming edges e of softmax_e(scale * q[d, h] . k[.., h] + bias[e, h]) * v[.., h].
/// Nodes without edges, and nodes whose scores are all -inf (masked by the bias), get zeros; so do gradients
/// of masked edges. Keys and values belong to sources or edges.
struct EdgeAttentionParams {
  int heads = 1;
  Features q;     ///< [num_dst, heads * dim]
  Features k;     ///< [num_src or num_edges, heads * dim]
  Features v;     ///< [num_src or num_edges, heads * v_dim]
  Features bias;  ///< [num_edges, heads] or empty
  Target k_target = Target::kSource, v_target = Target::kSource;
  float scale = 1;
  Output out;                     ///< [num_dst, heads * v_dim]
  std::span<float> log_sum = {};  ///< [num_dst * heads] or empty: log of the sum of exponentials.
};
Status EdgeAttention(const Context& ctx, const Graph& graph, const EdgeAttentionParams& params);

/// Gradients of EdgeAttention(). Empty outputs are not computed. The weights are computed again.
struct EdgeAttentionGradients {
  Features out_grad;
  Output q_grad{}, k_grad{}, v_grad{}, bias_grad{};
};
Status EdgeAttentionBackward(const Context& ctx, const Graph& graph, const EdgeAttentionParams& forward,
                             const EdgeAttentionGradients& gradients);

}  // namespace moesaic::graph
