// Perceptrons on edges, fused with the reduction at destinations: hidden values of an edge exist only for a
// tile of edges at a time.
#pragma once

#include <functional>
#include <vector>

#include "science/dense.h"
#include "science/graph.h"
#include "science/run_tasks.h"
#include "science/weights.h"

namespace moesaic::science {

/// A perceptron on the concatenation of destination features, source features, edge features and the squared
/// distance of the ends. Its first layer is split by input: W [h_d; h_s; e; d2] = W_d h_d + W_s h_s + W_e e +
/// w d2, so that the products of node features run once per node and not once per edge.
struct EdgeMlp {
  Dense first_dst;              ///< [H, F_dst] with the first layer's bias
  Dense first_src;              ///< [H, F_src] without bias
  Dense first_edge;             ///< [H, F_edge] without bias, or empty
  std::vector<float> distance;  ///< [H]: weights of the squared distance, or empty
  std::vector<Dense> rest;      ///< Layers after the first.
  graph::Activation activation = graph::Activation::kSilu;  ///< Between layers.
  bool activate_last = true;                                ///< Also after the last layer.

  int outputs() const { return rest.empty() ? first_dst.n() : rest.back().n(); }
  /// Splits a first layer weight [H, F_dst + F_src + (1 if with_distance) + F_edge], in this order of
  /// columns.
  Status SplitFirst(int hidden, int dst_inputs, int src_inputs, bool with_distance, int edge_inputs,
                    std::span<const float> weight, std::span<const float> bias,
                    tensor::PackedFormat format = tensor::PackedFormat::kF32);
  /// Reads the linear layers 0, 2, 4, .. of a torch.nn.Sequential whose odd members are activations.
  static StatusOr<EdgeMlp> Load(const WeightScope& weights, int dst_inputs, int src_inputs,
                                bool with_distance, int edge_inputs);
};

/// Inputs of a perceptron on the edges of a graph. All matrices are f32 and contiguous.
struct EdgeMlpInputs {
  const float* dst = nullptr;      ///< [num_dst, F_dst]
  const float* src = nullptr;      ///< [num_src, F_src]
  const float* edge = nullptr;     ///< [num_edges, F_edge], if first_edge is not empty
  const float* dst_xyz = nullptr;  ///< [num_dst, 3], if distance is not empty
  const float* src_xyz = nullptr;  ///< [num_src, 3]
};

/// Checks that the parts of the perceptron fit one another and that its inputs are present.
Status CheckEdgeMlp(const graph::Graph& graph, const EdgeMlp& mlp, const EdgeMlpInputs& in);

/// Edges of one tile: consecutive positions of the graph by destination.
struct EdgeTile {
  int32_t first, count;
  const float* messages;  ///< [count, outputs]
  int worker;
};
/// Edges per tile. With 128 rows of 128 to 256 f32, a tile and its prepared copy fit in a 512 KiB L2 cache.
inline constexpr int kEdgeTile = 128;

/// Computes the perceptron on every edge and passes the messages to `consume`, tile by tile. The workers call
/// it concurrently. All edges of one destination are passed by one worker, in the order of the graph, so
/// `consume` can add to that destination without a lock.
Status ForEdgeTiles(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                    const EdgeMlpInputs& inputs, const std::function<void(const EdgeTile&)>& consume);

/// out[d, :] = scale * reduce (sum or mean) over the incoming edges of d of mlp(edge). out is [num_dst,
/// outputs].
Status EdgeMlpReduce(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                     const EdgeMlpInputs& inputs, graph::Reduce reduce, float scale, float* out);

/// out[e, :] = mlp(e) in the caller's order of edges: [num_edges, outputs].
Status EdgeMlpMap(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                  const EdgeMlpInputs& inputs, float* out);

}  // namespace moesaic::science
