// Layers of ProteinMPNN's encoder and decoder, with the parameter names of the published program.
#pragma once

#include "science/edge_mlp_gradient.h"

namespace moesaic::science {

/// Inputs of a layer with H channels. All arrays are f32 and contiguous.
struct MpnnLayerInputs {
  const float* nodes = nullptr;      ///< [num_dst, H]
  const float* src = nullptr;        ///< [num_src, source inputs] of a decoder layer; an encoder reads nodes
  const float* edge = nullptr;       ///< [num_edges, H]
  const float* node_mask = nullptr;  ///< [num_dst]: multiplies the result; or null
  const float* edge_mask = nullptr;  ///< [num_edges]: multiplies messages; or null
};

/// Gradients of the results, of which nodes_out is required, and arrays to which gradients of the inputs are
/// added; a null one is not computed. Features of edges whose mask is 0 must be finite.
struct MpnnLayerGradients {
  const float* nodes_out = nullptr;  ///< [num_dst, H]
  const float* edge_out = nullptr;   ///< [num_edges, H], encoder only
  float *nodes = nullptr, *src = nullptr, *edge = nullptr;
};

/// h_d = norm2(h + dense(h)) for h = norm1(h_d + sum of messages / 30) with messages W3 gelu(W2 gelu(W1 [h_d;
/// h_E; source])). An encoder layer then updates edges: h_E = norm3(h_E + W13 gelu(W12 gelu(W11 [h_d; h_E;
/// h_s]))).
struct MpnnLayer {
  EdgeMlp message, edge_message;
  Norm norm1, norm2, norm3;
  Dense dense_in, dense_out;

  /// Loads an encoder layer if the weights have W11, otherwise a decoder layer. Sources of an encoder layer
  /// have H inputs.
  static StatusOr<MpnnLayer> Load(const WeightScope& weights);
  bool encoder() const { return edge_message.outputs() > 0; }
  int hidden() const { return message.outputs(); }
  int source_inputs() const { return message.first_src.k(); }

  /// Writes nodes_out [num_dst, H], which may be in.nodes, and, of an encoder layer, edge_out [num_edges, H],
  /// which may be in.edge.
  Status Run(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
             float* nodes_out, float* edge_out) const;
  /// Updates nodes from the sums of messages, [rows, H]: the last part of Run().
  void UpdateNodes(const graph::Context& ctx, int64_t rows, const float* sums, const float* mask,
                   float* nodes) const;
  /// Messages are computed again. `parameters` has the names of the state dict.
  Status Backward(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
                  const MpnnLayerGradients& grads, const GradientMap& parameters) const;

 private:
  struct NodePass;
  Status CheckInputs(const graph::Graph& graph, const MpnnLayerInputs& in) const;
  EdgeMlpInputs MessageInputs(const MpnnLayerInputs& in) const;
  Status Sum(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
             float* sums) const;
};

}  // namespace moesaic::science
