// Layers of the SE(3)-Transformer (Fuchs et al., NeurIPS 2020, arXiv 2006.10503) with the conventions and
// parameter names of NVIDIA's implementation (unfused layout) on e3nn's harmonics.
#pragma once

#include <map>
#include <vector>

#include "science/dense_gradient.h"
#include "science/graph.h"
#include "science/run_tasks.h"
#include "science/se3/so3.h"
#include "science/weights.h"

namespace moesaic::science {

/// Number of channels by degree.
using Fiber = std::map<int, int>;
/// Features by degree: [rows, channels, 2 degree + 1].
using FiberFeatures = std::map<int, std::vector<float>>;

/// Returns the sum of channels * (2 degree + 1).
int FiberWidth(const Fiber& fiber);

/// Edges with their geometry, shared by all layers of a model.
class Se3Graph {
 public:
  /// Relative positions are xyz[src] - xyz[dst] if `source_minus_destination`, otherwise the reverse.
  /// Harmonics up to twice max_degree are computed for every edge.
  static StatusOr<Se3Graph> Create(graph::Graph graph, const float* xyz, int max_degree,
                                   bool source_minus_destination = true);
  const graph::Graph& graph() const { return graph_; }
  /// Positions by destination, grouped by source.
  const graph::Segments& by_source() const { return by_source_; }
  int max_degree() const { return max_degree_; }
  const float* harmonics(int64_t position) const {
    return harmonics_.data() + position * width_;
  }  ///< By destination.
  float distance(int64_t position) const { return distances_[position]; }
  /// Adds gradients of the relative positions, [edges, 3] by destination, to those of the nodes, [nodes, 3].
  void AddPositionGradients(const float* offset_grad, float* xyz_grad) const;

 private:
  friend class Se3Conv;
  graph::Graph graph_;
  graph::Segments by_source_;
  int max_degree_ = 0, width_ = 0;
  bool source_minus_destination_ = true;
  std::vector<float> harmonics_, distances_, offsets_;  // offsets_: relative positions [edges, 3]
};

/// Output buffers to which gradients of a layer's inputs are added; null or absent: not computed.
struct Se3Gradients {
  std::map<int, float*> nodes;  ///< By degree: [nodes, channels, 2 degree + 1].
  float* edge = nullptr;        ///< [edges, edge_inputs] in the caller's order
  float* xyz = nullptr;         ///< [nodes, 3]

  float* Of(int degree) const {
    const auto found = nodes.find(degree);
    return found == nodes.end() ? nullptr : found->second;
  }
};

/// y = W x per degree: parameters weights.D [out, in].
class Se3Linear {
 public:
  static StatusOr<Se3Linear> Load(const WeightScope& weights, const Fiber& in, const Fiber& out);
  StatusOr<FiberFeatures> Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const;
  /// Adds the gradients for y_grad. x_grad has pointers by degree, which may be absent.
  Status Backward(const graph::Context& ctx, int64_t rows, const FiberFeatures& x,
                  const FiberFeatures& y_grad, const std::map<int, float*>& x_grad,
                  const GradientScope& parameters) const;

 private:
  Fiber in_, out_;  // in_: degrees of out_ only
  std::map<int, WeightTensor> weights_;
};

/// Scales features by relu(LayerNorm(lengths)) / lengths, where LayerNorm runs over the channels of a degree
/// and lengths are at least 2^-24. Parameters layer_norms.D; or group_norm, which has the channels of all
/// degrees, if every degree has the same number of them.
class Se3Norm {
 public:
  static StatusOr<Se3Norm> Load(const WeightScope& weights, const Fiber& fiber);
  StatusOr<FiberFeatures> Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const;
  /// Adds the gradients for y_grad. x_grad has pointers by degree, which may be absent.
  Status Backward(const graph::Context& ctx, int64_t rows, const FiberFeatures& x,
                  const FiberFeatures& y_grad, const std::map<int, float*>& x_grad,
                  const GradientScope& parameters) const;

 private:
  // Looks up the gradients of the parameters of a degree.
  StatusOr<NormGradients> FindGradients(int degree, const GradientScope& parameters) const;

  Fiber fiber_;
  bool grouped_ = false;  // the state dict has group_norm
  std::map<int, Norm> norms_;
};

/// Features of edges, in their order by destination: element m of channel c of degree d is in column
/// offsets.at(d)[c] + m of a row.
struct Se3EdgeRows {
  float* data = nullptr;
  int64_t stride = 0;
  std::map<int, std::vector<int>> offsets;
};

/// Tensor field convolution: per edge, a radial perceptron on [edge features, distance] weights the products
/// of source features and harmonics. The perceptron's last layer, which has a weight per pair of channels,
/// runs on the features of every node instead of every edge; weights of an edge do not exist. Parameters
/// conv.IN,OUT.radial_func.net.{0,2,4} (or {0,1,3,4,6} with layer norms) and, optionally, to_kernel_self.D.
class Se3Conv {
 public:
  static StatusOr<Se3Conv> Load(const WeightScope& weights, const Fiber& in, const Fiber& out,
                                int edge_inputs);
  /// Writes features of the edges. edge is [edges, edge_inputs] in the caller's order or null.
  Status RunEdges(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                  const float* edge, const Se3EdgeRows& out) const;
  /// Returns sums over the incoming edges of every node.
  StatusOr<FiberFeatures> RunNodes(const graph::Context& ctx, const Se3Graph& edges,
                                   const FiberFeatures& nodes, const float* edge) const;

  /// Adds the gradients for those of the result of RunEdges(). Hidden values are computed again.
  Status Backward(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                  const float* edge, const Se3EdgeRows& grad, const Se3Gradients& out,
                  const GradientScope& parameters) const;
  /// Adds the gradients for those of the result of RunNodes(). `parameters` has the names of the state dict.
  Status BackwardNodes(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                       const float* edge, const FiberFeatures& out_grad, const Se3Gradients& out,
                       const GradientMap& parameters) const;

  const Fiber& out() const { return out_; }
  int edge_inputs() const { return edge_inputs_; }

 private:
  struct Tile;
  struct EdgeRun;
  struct BackwardRun;
  struct ParameterSums;
  // Radial perceptron and coupling of one input and one output degree.
  struct Pair {
    int in_degree, out_degree, frequencies, hidden;
    int c_in, c_out;
    int hidden_offset = 0;  // first of its columns among the hidden units of all pairs
    int term_offset = 0;    // first of its terms among those of the output degree
    Norm first_norm{}, second_norm{};
    std::vector<float> second{}, second_bias{};  // [hidden, hidden], transposed; [hidden]
    std::vector<float> last{};                   // [c_in][hidden][frequencies][c_out]
  };
  // An output degree's element m of channel c is the sum over terms t of basis[m][t] product[t][c]. A term is
  // a component of a source feature and a frequency.
  struct Output {
    int degree, channels, terms = 0;
    int basis_offset = 0;  // first of its [2 degree + 1, terms] columns of the coupling
  };
  Status CheckInputs(const Se3Graph& edges, const FiberFeatures& nodes, const float* edge) const;
  // Returns rows in which the degrees follow one another.
  Se3EdgeRows RowsIn(const graph::Output& matrix) const;
  void ActivateHidden(const graph::Context& ctx, bool second, int rows, const float* x, float* y) const;
  // Adds the sums of a backward pass to the gradients of the state dict.
  Status AddParameters(const graph::Context& ctx, const ParameterSums& sums,
                       const GradientScope& parameters) const;
  Status SelfBackward(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                      const Se3EdgeRows& grad, const Se3Gradients& out,
                      const GradientScope& parameters) const;
  FiberFeatures SelfFeatures(const graph::Context& ctx, int64_t rows, const FiberFeatures& nodes) const;

  Fiber in_, out_;
  int edge_inputs_ = 0, hidden_ = 0, harmonics_ = 0, basis_ = 0;
  SphericalHarmonics used_harmonics_{0};   // of the degrees that the coupling has
  std::vector<float> first_, first_bias_;  // all pairs: [edge_inputs + 1, hidden_] transposed, [hidden_]
  std::vector<float> coupling_;            // [harmonics_, basis_]
  std::vector<Pair> pairs_;
  std::vector<Output> outputs_;
  std::map<int, WeightTensor> self_;
};

/// Attention over incoming edges with equivariant keys and values, and a projection of [x, attended].
/// Parameters to_key_value.*, to_query.*, project.*.
class Se3AttentionBlock {
 public:
  static StatusOr<Se3AttentionBlock> Load(const WeightScope& weights, const Fiber& in, const Fiber& out,
                                          int edge_inputs, int heads, int channels_div);
  int edge_inputs() const { return to_key_value_.edge_inputs(); }
  const Fiber& out() const { return out_; }
  StatusOr<FiberFeatures> Run(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                              const float* edge) const;
  /// Adds the gradients for out_grad. `parameters` has the names of the state dict.
  Status Backward(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                  const float* edge, const FiberFeatures& out_grad, const Se3Gradients& out,
                  const GradientMap& parameters) const;

 private:
  struct Pass;
  // Runs all but the last projection. Matrices are in the caller's scratch memory.
  StatusOr<Pass> Attend(const graph::Context& ctx, graph::ScratchScope* scope, const Se3Graph& edges,
                        const FiberFeatures& nodes, const float* edge) const;
  // Returns the number of columns of a node's own features of this degree in the input of the projection.
  int64_t OwnWidth(int degree) const;
  // Returns the columns of the channels of every degree in rows in which each head has a block of columns.
  std::map<int, std::vector<int>> HeadOffsets(const Fiber& fiber) const;
  // The same for to_key_value_, whose values precede its keys.
  std::map<int, std::vector<int>> KeyValueOffsets() const;

  Fiber in_, out_, value_, key_;
  int heads_ = 1;
  Se3Conv to_key_value_;
  Se3Linear to_query_, project_;
};

}  // namespace moesaic::science
