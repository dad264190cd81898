// Equivariant graph neural network: Satorras, Hoogeboom, Welling, "E(n) Equivariant Graph Neural Networks"
// (arXiv 2102.09844), with the parameter names of the authors' program.
#pragma once

#include "science/edge_mlp_gradient.h"
#include "science/weights.h"

namespace moesaic::science {

struct EgnnOptions {
  bool residual = true;          ///< Adds h to the node perceptron's result, if both have the same width.
  bool mean_coordinates = true;  ///< Averages coordinate updates over a node's edges instead of adding them.
  bool normalize = false;  ///< Divides differences of coordinates by (distance + 1e-8). Gradients are those
                           ///< of the results; the authors' program takes the distance as a constant.
  bool tanh = false;       ///< Bounds coordinate weights.
};

/// Output buffers to which gradients of a layer's inputs are added; null: not computed.
struct EgnnGradients {
  float* h = nullptr;     ///< [nodes, inputs]
  float* x = nullptr;     ///< [nodes, 3]
  float* edge = nullptr;  ///< [edges, edge_inputs]
};

/// One layer: m = phi_e(h_d, h_s, |x_d - x_s|^2, e); x_d += sum or mean of (x_d - x_s) phi_x(m);
/// h_d = phi_h(h_d, sum of m).
class EgnnLayer {
 public:
  /// Weights edge_mlp.0, edge_mlp.2, node_mlp.0, node_mlp.2 and, if present, coord_mlp.0 and coord_mlp.2
  /// (phi_x; without them coordinates do not move) and att_mlp.0 (a gate on every message). node_inputs is
  /// the width of h; edge_inputs that of e.
  static StatusOr<EgnnLayer> Load(const WeightScope& weights, int node_inputs, int edge_inputs,
                                  const EgnnOptions& options = {});

  int inputs() const { return node_inputs_; }
  int outputs() const { return node_out_.n(); }
  int edge_inputs() const { return edge_mlp_.first_edge.empty() ? 0 : edge_mlp_.first_edge.k(); }

  /// Updates features h [nodes, inputs] into h_out [nodes, outputs] and coordinates x [nodes, 3] into x_out,
  /// which may be x. Nodes are both sources and destinations. edge is [edges, edge_inputs] or null.
  Status Run(const graph::Context& ctx, const graph::Graph& graph, const float* h, const float* x,
             const float* edge, float* h_out, float* x_out) const;
  /// Adds gradients for those of the results, h_grad [nodes, outputs] and x_grad [nodes, 3]. Messages are
  /// computed again. The gradient of a distance of 0 is 0. `parameters` has the names of the state dict.
  Status Backward(const graph::Context& ctx, const graph::Graph& graph, const float* h, const float* x,
                  const float* edge, const float* h_grad, const float* x_grad, const EgnnGradients& out,
                  const GradientMap& parameters) const;

 private:
  // The row of a linear layer with one output, and its bias.
  struct Scalar {
    std::vector<float> weights;
    float bias = 0;
    explicit Scalar(const Dense& dense);
  };
  struct MessageBackward;
  bool moves() const { return !coord_in_.empty(); }
  // Adds gated messages to sums [nodes, hidden], which must be 0.
  Status AddMessages(const graph::Context& ctx, const graph::Graph& graph, const float* h, const float* x,
                     const float* edge, float* sums) const;
  // The same, and writes moved coordinates.
  Status AddMessagesAndMove(const graph::Context& ctx, const graph::Graph& graph, const float* h,
                            const float* x, const float* edge, float* sums, float* x_out) const;
  // h_out = phi_h(h, sums).
  void UpdateNodes(const graph::Context& ctx, int64_t nodes, const float* h, const float* sums,
                   float* h_out) const;
  Status NodesBackward(const graph::Context& ctx, int64_t nodes, const float* h, const float* sums,
                       const float* h_grad, float* h_in_grad, float* sums_grad,
                       const GradientScope& parameters) const;

  EgnnOptions options_;
  int node_inputs_ = 0;
  EdgeMlp edge_mlp_;
  Dense coord_in_, coord_out_;  // phi_x, or empty
  Dense attention_;             // or empty
  Dense node_in_, node_out_;
};

/// A model that predicts one property of a molecule: embedding, layers, and two perceptrons around the sum
/// over nodes. Parameters: embedding, gcl_N.*, node_dec.0, node_dec.2, graph_dec.0, graph_dec.2. The
/// authors' QM9 model (qm9/models.py, node_attr 0) has these; its layers have no coord_mlp, its graphs
/// connect every atom of a molecule with all others, and its 15 inputs are the one-hot element times the
/// powers 0, 1 and 2 of the atomic number divided by the largest one.
class EgnnModel {
 public:
  /// Layers have no edge features. Each layer has a coord_mlp or none.
  static StatusOr<EgnnModel> Load(const WeightMap& weights);
  int inputs() const { return embedding_.k(); }
  /// Predicts one value per molecule. features is [nodes, inputs], xyz [nodes, 3]; molecule m has nodes
  /// [molecules[m], molecules[m + 1]).
  StatusOr<std::vector<float>> Predict(const graph::Context& ctx, const graph::Graph& graph,
                                       const float* features, const float* xyz,
                                       const graph::Segments& molecules) const;

 private:
  Dense embedding_, node_in_, node_out_, graph_in_, graph_out_;
  std::vector<EgnnLayer> layers_;
};

}  // namespace moesaic::science
