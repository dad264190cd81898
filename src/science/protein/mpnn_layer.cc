#include "science/protein/mpnn_layer.h"

#include <algorithm>

#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr float kMessageScale = 30;  // divides sums of messages

// The perceptron of layers NAMES on [h_d, h_E, source].
StatusOr<EdgeMlp> LoadMessage(const WeightScope& weights, int hidden, const char* const (&names)[3]) {
  EdgeMlp mlp;
  mlp.activation = graph::Activation::kGelu;
  mlp.activate_last = false;
  const std::string first = names[0];
  ASSIGN_OR_RETURN(const WeightTensor* weight, weights.Get(first + ".weight", {hidden, -1}));
  const int columns = static_cast<int>(weight->shape[1]), sources = columns - 2 * hidden;
  if (sources < 1) {
    return InvalidArgument(
        "\"{}.weight\" must have more than {} columns, for two inputs of {} channels and the source, but has "
        "{}",
        first, 2 * hidden, hidden, columns);
  }
  ASSIGN_OR_RETURN(const std::vector<float> bias, weights.Vector(first + ".bias", hidden));
  auto take = [&](int column, int count, std::span<const float> part_bias) {
    return Dense::Pack(hidden, count, ColumnsOf(weight->values, hidden, columns, column, count), part_bias);
  };
  ASSIGN_OR_RETURN(mlp.first_dst, take(0, hidden, bias));
  ASSIGN_OR_RETURN(mlp.first_edge, take(hidden, hidden, {}));
  ASSIGN_OR_RETURN(mlp.first_src, take(2 * hidden, sources, {}));
  for (const char* name : {names[1], names[2]}) {
    ASSIGN_OR_RETURN(Dense dense, weights.Linear(name, hidden, hidden));
    mlp.rest.push_back(std::move(dense));
  }
  return mlp;
}

// Gradients of a message perceptron. The first layer's has other columns than EdgeMlpGradients: [h_d, source,
// h_E].
struct MessageGradients {
  EdgeMlpGradients mlp;
  std::vector<float> columns;
  float* weight = nullptr;
  int hidden = 0, sources = 0;

  Status Find(const EdgeMlp& message, const GradientScope& scope, const char* const (&names)[3]) {
    hidden = message.first_dst.n();
    sources = message.first_src.k();
    const int64_t size = int64_t{hidden} * (2 * hidden + sources);
    const std::string first = names[0];
    ASSIGN_OR_RETURN(weight, scope.Get(first + ".weight", size));
    ASSIGN_OR_RETURN(mlp.first_bias, scope.Get(first + ".bias", hidden));
    if (weight != nullptr) {
      columns.assign(size, 0);
      mlp.first_weight = columns.data();
    }
    for (size_t i = 0; i < message.rest.size(); ++i) {
      ASSIGN_OR_RETURN(const DenseGradients found,
                       DenseGradients::Find(scope, names[i + 1], message.rest[i]));
      mlp.rest.push_back(found);
    }
    return OkStatus();
  }
  void AddFirst() const {
    const int64_t width = 2 * int64_t{hidden} + sources;
    for (int64_t row = 0; row < hidden && weight != nullptr; ++row) {
      const float* from = columns.data() + row * width;
      float* to = weight + row * width;
      for (int c = 0; c < hidden; ++c) {
        to[c] += from[c];
        to[hidden + c] += from[hidden + sources + c];
      }
      for (int c = 0; c < sources; ++c) to[2 * hidden + c] += from[hidden + c];
    }
  }
};

void MultiplyMask(int64_t rows, int hidden, const float* mask, float* x) {
  for (int64_t i = 0; i < rows && mask != nullptr; ++i) {
    for (int c = 0; c < hidden && mask[i] != 1; ++c)
      x[i * hidden + c] = mask[i] == 0 ? 0 : x[i * hidden + c] * mask[i];
  }
}

}  // namespace

StatusOr<MpnnLayer> MpnnLayer::Load(const WeightScope& weights) {
  MpnnLayer layer;
  ASSIGN_OR_RETURN(const WeightTensor* last, weights.Get("W3.weight", {-1, -1}));
  const int hidden = static_cast<int>(last->shape[0]);
  ASSIGN_OR_RETURN(layer.message, LoadMessage(weights, hidden, {"W1", "W2", "W3"}));
  ASSIGN_OR_RETURN(layer.norm1, weights.LayerNorm("norm1", hidden));
  ASSIGN_OR_RETURN(layer.norm2, weights.LayerNorm("norm2", hidden));
  ASSIGN_OR_RETURN(layer.dense_in, weights.Linear("dense.W_in", -1, hidden));
  ASSIGN_OR_RETURN(layer.dense_out, weights.Linear("dense.W_out", hidden, layer.dense_in.n()));
  if (!weights.Has("W11.weight")) return layer;
  ASSIGN_OR_RETURN(layer.edge_message, LoadMessage(weights, hidden, {"W11", "W12", "W13"}));
  ASSIGN_OR_RETURN(layer.norm3, weights.LayerNorm("norm3", hidden));
  for (const EdgeMlp* mlp : {&layer.message, &layer.edge_message}) {
    if (mlp->first_src.k() != hidden)
      return InvalidArgument("sources of an encoder layer have {} channels, not {}", hidden,
                             mlp->first_src.k());
  }
  return layer;
}

Status MpnnLayer::CheckInputs(const graph::Graph& graph, const MpnnLayerInputs& in) const {
  if (encoder() && graph.num_src() != graph.num_dst()) {
    return InvalidArgument(
        "an encoder layer needs one set of nodes, but the graph has {} sources and {} destinations",
        graph.num_src(), graph.num_dst());
  }
  if (!encoder() && in.src == nullptr && graph.num_edges() > 0)
    return InvalidArgument("a decoder layer needs features of sources");
  return OkStatus();
}

EdgeMlpInputs MpnnLayer::MessageInputs(const MpnnLayerInputs& in) const {
  return {.dst = in.nodes, .src = encoder() ? in.nodes : in.src, .edge = in.edge};
}

Status MpnnLayer::Sum(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
                      float* sums) const {
  const int width = hidden();
  std::fill_n(sums, int64_t{graph.num_dst()} * width, 0.0F);
  const graph::Adjacency& csc = graph.by_destination();
  return ForEdgeTiles(ctx, graph, message, MessageInputs(in), [&](const EdgeTile& tile) {
    for (int t = 0; t < tile.count; ++t) {
      const int64_t position = int64_t{tile.first} + t;
      const float scale = in.edge_mask == nullptr ? 1 : in.edge_mask[csc.EdgeAt(position)];
      if (scale != 0)
        ctx.exec.kernels->axpy(scale, tile.messages + int64_t{t} * width, width,
                               sums + int64_t{csc.own()[position]} * width);
    }
  });
}

void MpnnLayer::UpdateNodes(const graph::Context& ctx, int64_t rows, const float* sums, const float* mask,
                            float* nodes) const {
  const int width = hidden(), inner_width = dense_in.n();
  for (int64_t i = 0; i < rows * width; ++i) nodes[i] += sums[i] / kMessageScale;
  Apply(ctx, norm1, nodes, rows, nodes);
  std::vector<float> inner(rows * inner_width);
  Apply(ctx, dense_in, nodes, width, rows, inner.data(), inner_width);
  Activate(ctx, inner.data(), rows * inner_width, graph::Activation::kGelu);
  Apply(ctx, dense_out, inner.data(), inner_width, rows, nodes, width, true);
  Apply(ctx, norm2, nodes, rows, nodes);
  MultiplyMask(rows, width, mask, nodes);
}

Status MpnnLayer::Run(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
                      float* nodes_out, float* edge_out) const {
  RETURN_IF_ERROR(CheckInputs(graph, in));
  const int width = hidden();
  const int64_t nodes = graph.num_dst();
  std::vector<float> sums(nodes * width);
  RETURN_IF_ERROR(Sum(ctx, graph, in, sums.data()));
  if (nodes_out != in.nodes) std::copy_n(in.nodes, nodes * width, nodes_out);
  UpdateNodes(ctx, nodes, sums.data(), in.node_mask, nodes_out);
  if (!encoder() || edge_out == nullptr) return OkStatus();
  // An edge is read with its own tile only, so that it can be replaced there.
  const graph::Adjacency& csc = graph.by_destination();
  return ForEdgeTiles(ctx, graph, edge_message, {.dst = nodes_out, .src = nodes_out, .edge = in.edge},
                      [&](const EdgeTile& tile) {
                        for (int t = 0; t < tile.count; ++t) {
                          const int64_t at = csc.EdgeAt(int64_t{tile.first} + t) * width;
                          if (edge_out != in.edge) std::copy_n(in.edge + at, width, edge_out + at);
                          ctx.exec.kernels->axpy(1, tile.messages + int64_t{t} * width, width, edge_out + at);
                          NormalizeRows(ctx, norm3, edge_out + at, 1, edge_out + at);
                        }
                      });
}

// Values of the nodes' update, computed again.
struct MpnnLayer::NodePass {
  std::vector<float> x1, n1, before, inner, x2, out;
  NodePass(const MpnnLayer& layer, const graph::Context& ctx, int64_t rows, const MpnnLayerInputs& in,
           const std::vector<float>& sums) {
    const int width = layer.hidden(), inner_width = layer.dense_in.n();
    x1.resize(rows * width);
    for (int64_t i = 0; i < rows * width; ++i) x1[i] = in.nodes[i] + sums[i] / kMessageScale;
    n1.resize(rows * width);
    Apply(ctx, layer.norm1, x1.data(), rows, n1.data());
    before.resize(rows * inner_width);
    inner.resize(rows * inner_width);
    Apply(ctx, layer.dense_in, n1.data(), width, rows, before.data(), inner_width);
    Activate(ctx, before.data(), rows * inner_width, graph::Activation::kGelu, inner.data());
    x2 = n1;
    Apply(ctx, layer.dense_out, inner.data(), inner_width, rows, x2.data(), width, true);
    out.resize(rows * width);
    Apply(ctx, layer.norm2, x2.data(), rows, out.data());
    MultiplyMask(rows, width, in.node_mask, out.data());
  }
};

Status MpnnLayer::Backward(const graph::Context& ctx, const graph::Graph& graph, const MpnnLayerInputs& in,
                           const MpnnLayerGradients& grads, const GradientMap& parameters) const {
  RETURN_IF_ERROR(CheckInputs(graph, in));
  const GradientScope names(parameters);
  MessageGradients message_grads, edge_message_grads;
  RETURN_IF_ERROR(message_grads.Find(message, names, {"W1", "W2", "W3"}));
  ASSIGN_OR_RETURN(const NormGradients norm1_grads, NormGradients::Find(names, "norm1", norm1));
  ASSIGN_OR_RETURN(const NormGradients norm2_grads, NormGradients::Find(names, "norm2", norm2));
  ASSIGN_OR_RETURN(const DenseGradients in_grads, DenseGradients::Find(names, "dense.W_in", dense_in));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(names, "dense.W_out", dense_out));
  const int width = hidden(), inner_width = dense_in.n();
  const int64_t rows = graph.num_dst();
  const graph::Adjacency& csc = graph.by_destination();
  std::vector<float> sums(rows * width);
  RETURN_IF_ERROR(Sum(ctx, graph, in, sums.data()));
  const NodePass pass(*this, ctx, rows, in, sums);
  std::vector<float> grad(grads.nodes_out, grads.nodes_out + rows * width);
  if (encoder() && grads.edge_out != nullptr) {
    RETURN_IF_ERROR(edge_message_grads.Find(edge_message, names, {"W11", "W12", "W13"}));
    ASSIGN_OR_RETURN(const NormGradients norm3_grads, NormGradients::Find(names, "norm3", norm3));
    EdgeMlpGradients& out = edge_message_grads.mlp;
    out.dst = out.src = grad.data();
    out.edge = grads.edge;
    const int64_t block_size = std::min<int64_t>(kEdgeBlock, graph.num_edges()) * width;
    std::vector<float> before(block_size), result_grad(block_size);
    RETURN_IF_ERROR(EdgeMlpBackward(
        ctx, graph, edge_message, {.dst = pass.out.data(), .src = pass.out.data(), .edge = in.edge},
        [&](const EdgeBlock& block) {
          for (int64_t i = 0; i < block.count; ++i) {
            const int64_t at = csc.EdgeAt(block.first + i) * width;
            for (int c = 0; c < width; ++c) {
              before[i * width + c] = in.edge[at + c] + block.messages[i * width + c];
              result_grad[i * width + c] = grads.edge_out[at + c];
            }
          }
          std::fill_n(block.grad, int64_t{block.count} * width, 0.0F);
          NormBackward(ctx, norm3, before.data(), result_grad.data(), block.count, block.grad, norm3_grads);
          for (int64_t i = 0; i < block.count && grads.edge != nullptr; ++i)
            ctx.exec.kernels->axpy(1, block.grad + i * width, width,
                                   grads.edge + csc.EdgeAt(block.first + i) * width);
        },
        out));
    edge_message_grads.AddFirst();
  }
  MultiplyMask(rows, width, in.node_mask, grad.data());
  std::vector<float> x2_grad(rows * width), inner_grad(rows * inner_width), x1_grad(rows * width);
  NormBackward(ctx, norm2, pass.x2.data(), grad.data(), rows, x2_grad.data(), norm2_grads);
  AddWeightGradients(ctx, x2_grad.data(), width, width, pass.inner.data(), inner_width, inner_width, rows,
                     out_grads);
  DenseBackward(dense_out).Inputs(ctx, x2_grad.data(), width, rows, inner_grad.data(), inner_width);
  ActivationBackward(ctx, pass.before.data(), rows * inner_width, graph::Activation::kGelu,
                     inner_grad.data());
  AddWeightGradients(ctx, inner_grad.data(), inner_width, inner_width, pass.n1.data(), width, width, rows,
                     in_grads);
  DenseBackward(dense_in).Inputs(ctx, inner_grad.data(), inner_width, rows, x2_grad.data(), width, true);
  NormBackward(ctx, norm1, pass.x1.data(), x2_grad.data(), rows, x1_grad.data(), norm1_grads);
  for (int64_t i = 0; i < rows * width && grads.nodes != nullptr; ++i) grads.nodes[i] += x1_grad[i];
  EdgeMlpGradients& out = message_grads.mlp;
  out.dst = grads.nodes;
  out.src = encoder() ? grads.nodes : grads.src;
  out.edge = grads.edge;
  RETURN_IF_ERROR(EdgeMlpBackward(
      ctx, graph, message, MessageInputs(in),
      [&](const EdgeBlock& block) {
        ForRows(ctx, block.count, 256, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t position = block.first + i;
            const float scale =
                (in.edge_mask == nullptr ? 1 : in.edge_mask[csc.EdgeAt(position)]) / kMessageScale;
            const float* from = x1_grad.data() + int64_t{csc.own()[position]} * width;
            for (int c = 0; c < width; ++c) block.grad[i * width + c] = scale * from[c];
          }
        });
      },
      out));
  message_grads.AddFirst();
  return OkStatus();
}

}  // namespace moesaic::science
