#include "science/egnn_scalars.h"

#include <algorithm>
#include <cmath>

#include "science/segment_ops.h"

namespace moesaic::science {
namespace {

// Buffers of one worker for the coordinate perceptron.
struct CoordinateTile {
  TileDense dense;
  float* hidden;
};

}  // namespace

StatusOr<EgnnLayer> EgnnLayer::Load(const WeightScope& weights, int node_inputs, int edge_inputs,
                                    const EgnnOptions& options) {
  if (node_inputs < 1 || edge_inputs < 0) {
    return InvalidArgument("an EGNN layer needs node inputs, and 0 or more edge inputs, not {} and {}",
                           node_inputs, edge_inputs);
  }
  EgnnLayer layer;
  layer.options_ = options;
  layer.node_inputs_ = node_inputs;
  ASSIGN_OR_RETURN(layer.edge_mlp_,
                   EdgeMlp::Load(weights.Under("edge_mlp"), node_inputs, node_inputs, true, edge_inputs));
  if (layer.edge_mlp_.rest.size() != 1) {
    return InvalidArgument("\"edge_mlp\" of an EGNN layer must have 2 linear layers, but has {}",
                           layer.edge_mlp_.rest.size() + 1);
  }
  const int hidden = layer.edge_mlp_.outputs();
  ASSIGN_OR_RETURN(layer.node_in_, weights.Linear("node_mlp.0", -1, hidden + node_inputs));
  ASSIGN_OR_RETURN(layer.node_out_, weights.Linear("node_mlp.2", -1, layer.node_in_.n()));
  if (weights.Has("coord_mlp.0.weight") || weights.Has("coord_mlp.2.weight")) {
    ASSIGN_OR_RETURN(layer.coord_in_, weights.Linear("coord_mlp.0", -1, hidden));
    ASSIGN_OR_RETURN(layer.coord_out_, weights.Linear("coord_mlp.2", 1, layer.coord_in_.n()));
  }
  if (weights.Has("att_mlp.0.weight")) {
    ASSIGN_OR_RETURN(layer.attention_, weights.Linear("att_mlp.0", 1, hidden));
  }
  return layer;
}

EgnnLayer::Scalar::Scalar(const Dense& dense) {
  if (dense.empty()) return;
  weights.resize(dense.k());
  tensor::UnpackRow(dense.matrix(), 0, weights);
  if (dense.bias() != nullptr) bias = dense.bias()[0];
}

Status EgnnLayer::AddMessages(const graph::Context& ctx, const graph::Graph& graph, const float* h,
                              const float* x, const float* edge, float* sums) const {
  const int hidden = edge_mlp_.outputs();
  const Scalar gate(attention_);
  const graph::Adjacency& csc = graph.by_destination();
  return ForEdgeTiles(
      ctx, graph, edge_mlp_, {.dst = h, .src = h, .edge = edge, .dst_xyz = x, .src_xyz = x},
      [&](const EdgeTile& tile) {
        for (int i = 0; i < tile.count; ++i) {
          const float* m = tile.messages + int64_t{i} * hidden;
          const float factor =
              gate.weights.empty() ? 1 : SigmoidOf(RowDot(m, gate.weights.data(), hidden) + gate.bias);
          ctx.exec.kernels->axpy(factor, m, hidden, sums + int64_t{csc.own()[tile.first + i]} * hidden);
        }
      });
}

Status EgnnLayer::AddMessagesAndMove(const graph::Context& ctx, const graph::Graph& graph, const float* h,
                                     const float* x, const float* edge, float* sums, float* x_out) const {
  const int64_t nodes = graph.num_dst();
  const int hidden = edge_mlp_.outputs(), coord_hidden = coord_in_.n();
  runtime::Arena& scratch = *ctx.exec.scratch;
  float* shifts = scratch.Take<float>(nodes * 3).data();
  std::fill_n(shifts, nodes * 3, 0.0F);
  std::vector<CoordinateTile> tiles;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    tiles.push_back({TileDense(ctx, coord_in_.matrix().layout.format, kEdgeTile, hidden),
                     scratch.Take<float>(size_t{kEdgeTile} * (coord_hidden + hidden)).data()});
  }
  const Scalar coord(coord_out_), gate_row(attention_);
  const graph::Adjacency& csc = graph.by_destination();
  RETURN_IF_ERROR(ForEdgeTiles(
      ctx, graph, edge_mlp_, {.dst = h, .src = h, .edge = edge, .dst_xyz = x, .src_xyz = x},
      [&](const EdgeTile& tile) {
        const CoordinateTile& buffers = tiles[tile.worker];
        const float* messages = tile.messages;
        if (!attention_.empty()) {
          float* gated = buffers.hidden + size_t{kEdgeTile} * coord_hidden;
          for (int i = 0; i < tile.count; ++i) {
            const float* m = tile.messages + int64_t{i} * hidden;
            const float gate = SigmoidOf(RowDot(m, gate_row.weights.data(), hidden) + gate_row.bias);
            for (int j = 0; j < hidden; ++j) gated[int64_t{i} * hidden + j] = m[j] * gate;
          }
          messages = gated;
        }
        buffers.dense.Run(coord_in_, messages, hidden, tile.count, buffers.hidden, coord_hidden);
        const float* row = buffers.hidden;
        ctx.graph->rows.activate(&row, 1, nullptr, 0, tile.count * coord_hidden, edge_mlp_.activation,
                                 buffers.hidden);
        for (int i = 0; i < tile.count; ++i) {
          const int64_t d = csc.own()[tile.first + i], s = csc.neighbor[tile.first + i];
          ctx.exec.kernels->axpy(1, messages + int64_t{i} * hidden, hidden, sums + d * hidden);
          float weight =
              RowDot(buffers.hidden + int64_t{i} * coord_hidden, coord.weights.data(), coord_hidden) +
              coord.bias;
          if (options_.tanh) weight = std::tanh(weight);
          const float difference[3] = {x[3 * d] - x[3 * s], x[3 * d + 1] - x[3 * s + 1],
                                       x[3 * d + 2] - x[3 * s + 2]};
          if (options_.normalize) weight /= std::sqrt(RowDot(difference, difference, 3)) + kDistanceEps;
          for (int axis = 0; axis < 3; ++axis) shifts[3 * d + axis] += difference[axis] * weight;
        }
      }));
  for (int64_t d = 0; d < nodes; ++d) {
    const float count =
        options_.mean_coordinates ? static_cast<float>(std::max(1, csc.ptr[d + 1] - csc.ptr[d])) : 1;
    for (int axis = 0; axis < 3; ++axis) x_out[3 * d + axis] = x[3 * d + axis] + shifts[3 * d + axis] / count;
  }
  return OkStatus();
}

void EgnnLayer::UpdateNodes(const graph::Context& ctx, int64_t nodes, const float* h, const float* sums,
                            float* h_out) const {
  const int hidden = edge_mlp_.outputs();
  runtime::Arena& scratch = *ctx.exec.scratch;
  const int64_t width = node_inputs_ + hidden;
  float* both = scratch.Take<float>(nodes * width).data();
  for (int64_t n = 0; n < nodes; ++n) {
    std::copy_n(h + n * node_inputs_, node_inputs_, both + n * width);
    std::copy_n(sums + n * hidden, hidden, both + n * width + node_inputs_);
  }
  float* middle = scratch.Take<float>(nodes * node_in_.n()).data();
  Apply(ctx, node_in_, both, width, nodes, middle, node_in_.n());
  Activate(ctx, middle, nodes * node_in_.n(), edge_mlp_.activation);
  const bool residual = options_.residual && outputs() == node_inputs_;
  if (residual && h_out != h) std::copy_n(h, nodes * node_inputs_, h_out);
  Apply(ctx, node_out_, middle, node_in_.n(), nodes, h_out, outputs(), residual);
}

Status EgnnLayer::Run(const graph::Context& ctx, const graph::Graph& graph, const float* h, const float* x,
                      const float* edge, float* h_out, float* x_out) const {
  if (graph.num_src() != graph.num_dst()) {
    return InvalidArgument("an EGNN needs one set of nodes, but the graph has {} sources and {} destinations",
                           graph.num_src(), graph.num_dst());
  }
  const int64_t nodes = graph.num_dst(), size = nodes * edge_mlp_.outputs();
  const graph::ScratchScope scope(ctx);
  float* sums = ctx.exec.scratch->Take<float>(size).data();
  std::fill_n(sums, size, 0.0F);
  if (moves()) {
    RETURN_IF_ERROR(AddMessagesAndMove(ctx, graph, h, x, edge, sums, x_out));
  } else {
    RETURN_IF_ERROR(AddMessages(ctx, graph, h, x, edge, sums));
    if (x_out != x) std::copy_n(x, 3 * nodes, x_out);
  }
  UpdateNodes(ctx, nodes, h, sums, h_out);
  return OkStatus();
}

StatusOr<EgnnModel> EgnnModel::Load(const WeightMap& weights) {
  const WeightScope scope(weights);
  EgnnModel model;
  ASSIGN_OR_RETURN(model.embedding_, scope.Linear("embedding"));
  const int hidden = model.embedding_.n();
  for (int i = 0; scope.Has(fmt::format("gcl_{}.edge_mlp.0.weight", i)); ++i) {
    ASSIGN_OR_RETURN(EgnnLayer layer, EgnnLayer::Load(scope.Under(fmt::format("gcl_{}", i)), hidden, 0));
    // Layers replace their input, and each reads the result of the one before.
    RETURN_IF_ERROR(scope.Get(fmt::format("gcl_{}.node_mlp.2.weight", i), {hidden, -1}).status());
    model.layers_.push_back(std::move(layer));
  }
  if (model.layers_.empty()) return NotFound("the weights have no layer \"gcl_0\"");
  ASSIGN_OR_RETURN(model.node_in_, scope.Linear("node_dec.0", -1, hidden));
  ASSIGN_OR_RETURN(model.node_out_, scope.Linear("node_dec.2", -1, model.node_in_.n()));
  ASSIGN_OR_RETURN(model.graph_in_, scope.Linear("graph_dec.0", -1, model.node_out_.n()));
  ASSIGN_OR_RETURN(model.graph_out_, scope.Linear("graph_dec.2", 1, model.graph_in_.n()));
  return model;
}

StatusOr<std::vector<float>> EgnnModel::Predict(const graph::Context& ctx, const graph::Graph& graph,
                                                const float* features, const float* xyz,
                                                const graph::Segments& molecules) const {
  const int64_t nodes = graph.num_dst();
  if (molecules.edges() != nodes)
    return InvalidArgument("molecules have {} nodes, but the graph has {}", molecules.edges(), nodes);
  const int hidden = embedding_.n();
  std::vector<float> h(nodes * hidden), x(xyz, xyz + nodes * 3);
  Apply(ctx, embedding_, features, inputs(), nodes, h.data(), hidden);
  for (const EgnnLayer& layer : layers_)
    RETURN_IF_ERROR(layer.Run(ctx, graph, h.data(), x.data(), nullptr, h.data(), x.data()));
  std::vector<float> middle(nodes * node_in_.n()), decoded(nodes * node_out_.n());
  Apply(ctx, node_in_, h.data(), hidden, nodes, middle.data(), node_in_.n());
  Activate(ctx, middle.data(), static_cast<int64_t>(middle.size()), graph::Activation::kSilu);
  Apply(ctx, node_out_, middle.data(), node_in_.n(), nodes, decoded.data(), node_out_.n());
  const int64_t count = molecules.count();
  std::vector<float> sums(count * node_out_.n()), inner(count * graph_in_.n()), values(count);
  RETURN_IF_ERROR(graph::Segment(ctx, graph::Reduce::kSum, molecules,
                                 graph::View(decoded.data(), nodes, node_out_.n()),
                                 graph::View(sums.data(), count, node_out_.n())));
  Apply(ctx, graph_in_, sums.data(), node_out_.n(), count, inner.data(), graph_in_.n());
  Activate(ctx, inner.data(), static_cast<int64_t>(inner.size()), graph::Activation::kSilu);
  Apply(ctx, graph_out_, inner.data(), graph_in_.n(), count, values.data(), 1);
  return values;
}

}  // namespace moesaic::science
