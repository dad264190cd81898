// Attention over the rows of a square or a multiple alignment, with an additive bias: one pass per row and
// head, without the [rows, heads, queries, keys] array of weights.
#pragma once

#include "science/graph_kernels.h"

namespace moesaic::science {

/// Strided view of [batch, positions, columns] f32.
struct RowsView {
  const float* data = nullptr;
  int64_t batch_stride = 0, stride = 0;  ///< Floats between batches and between positions.
};

/// out[b, i, h] = sum_j softmax_j(scale * q[b, i, h] . k[b, j, h] + bias[i, j, h] + mask[b, j]) v[b, j, h]
struct PairAttentionParams {
  int64_t batch = 1, queries = 0, keys = 0;
  int heads = 1, dim = 0, v_dim = 0;
  float scale = 1;
  RowsView q, k, v;             ///< Head h has columns [h dim, (h + 1) dim).
  const float* bias = nullptr;  ///< [heads, queries, keys], shared by the batch, or null.
  const float* mask = nullptr;  ///< [batch, keys]: 0 removes a key; or null.
  int64_t mask_batch_stride = 0, mask_stride = 1;
  float* out = nullptr;  ///< [batch, queries, heads * v_dim] with the strides below.
  int64_t out_batch_stride = 0, out_stride = 0;
};
void PairAttention(const graph::Context& ctx, const PairAttentionParams& params);

/// Gradients of PairAttention(). Arrays have the layouts of the operands.
struct PairAttentionGradients {
  const float* out = nullptr;                      ///< Gradient of the result, in the layout of params.out.
  float *q = nullptr, *k = nullptr, *v = nullptr;  ///< Written; may be the operands' own arrays.
  float* bias = nullptr;                           ///< Added to; null: not computed.
};
/// Weights are computed again for a tile of queries at a time; params.out is not used.
void PairAttentionBackward(const graph::Context& ctx, const PairAttentionParams& params,
                           const PairAttentionGradients& grads);

}  // namespace moesaic::science
