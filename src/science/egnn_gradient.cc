// The backward pass of the EGNN layer.
#include <algorithm>
#include <cmath>

#include "science/egnn_scalars.h"

namespace moesaic::science {
// Gradients of one block of messages: buffers, and where parameters' gradients are added.
struct EgnnLayer::MessageBackward {
  const EgnnLayer& layer;
  const graph::Context& ctx;
  const graph::Adjacency& csc;
  const float *x, *x_grad, *sums_grad;
  float* x_in_grad;  // or null
  Scalar coord{layer.coord_out_}, gate{layer.attention_};
  DenseBackward coord_in{layer.coord_in_};
  DenseGradients coord_in_grads{}, coord_out_grads{}, gate_grads{};
  // [block, coordinate hidden], [block, hidden] and [block]
  float *before = nullptr, *after = nullptr, *gated = nullptr, *gate_values = nullptr, *scale = nullptr;
  float* moves = nullptr;  // [block, 3]: gradient of the difference of positions

  int hidden() const { return layer.edge_mlp_.outputs(); }
  int coord_hidden() const { return layer.coord_in_.n(); }
  bool gates() const { return !gate.weights.empty(); }

  // Messages after the gate.
  const float* Gated(const EdgeBlock& block) const {
    if (!gates()) return block.messages;
    const int h = hidden();
    ForRows(ctx, block.count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float* m = block.messages + i * h;
        gate_values[i] = SigmoidOf(RowDot(m, gate.weights.data(), h) + gate.bias);
        for (int c = 0; c < h; ++c) gated[i * h + c] = m[c] * gate_values[i];
      }
    });
    return gated;
  }

  // The gradient of the coordinate perceptron's result goes to `scale`, that of differences of positions to
  // `moves`.
  void DifferenceGradients(const EdgeBlock& block, int64_t i) const {
    const EgnnOptions& options = layer.options_;
    const int64_t d = csc.own()[block.first + i], s = csc.neighbor[block.first + i];
    float weight = RowDot(after + i * coord_hidden(), coord.weights.data(), coord_hidden()) + coord.bias;
    float derivative = 1;
    if (options.tanh) {
      weight = std::tanh(weight);
      derivative = 1 - weight * weight;
    }
    const float count = options.mean_coordinates ? static_cast<float>(csc.ptr[d + 1] - csc.ptr[d]) : 1;
    float difference[3], shift_grad[3];
    for (int axis = 0; axis < 3; ++axis) {
      difference[axis] = x[3 * d + axis] - x[3 * s + axis];
      shift_grad[axis] = x_grad[3 * d + axis] / count;
    }
    const float along = RowDot(shift_grad, difference, 3);
    const float distance = std::sqrt(RowDot(difference, difference, 3));
    const float inverse = options.normalize ? 1 / (distance + kDistanceEps) : 1;
    scale[i] = along * inverse * derivative;
    // d/dx of x / (|x| + eps) has a second term along x.
    const float second =
        options.normalize && distance > 0 ? along * weight * inverse * inverse / distance : 0;
    for (int axis = 0; axis < 3; ++axis)
      moves[3 * i + axis] = shift_grad[axis] * weight * inverse - second * difference[axis];
  }

  void PositionGradients(const EdgeBlock& block) const {
    ForRows(ctx, block.count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) DifferenceGradients(block, i);
    });
    for (int i = 0; i < block.count && x_in_grad != nullptr; ++i) {
      const int64_t d = csc.own()[block.first + i], s = csc.neighbor[block.first + i];
      for (int axis = 0; axis < 3; ++axis) {
        x_in_grad[3 * d + axis] += moves[int64_t{3} * i + axis];
        x_in_grad[3 * s + axis] -= moves[int64_t{3} * i + axis];
      }
    }
  }

  // Gradients of the coordinate perceptron and of positions. That of its hidden values before the activation
  // goes to `after`.
  void CoordinateGradients(const EdgeBlock& block, const float* messages) const {
    const int h = hidden(), width = coord_hidden();
    Apply(ctx, layer.coord_in_, messages, h, block.count, before, width);
    Activate(ctx, before, int64_t{block.count} * width, layer.edge_mlp_.activation, after);
    PositionGradients(block);
    if (coord_out_grads.weight != nullptr)
      AddColumnSums(ctx, after, width, block.count, width, scale, coord_out_grads.weight);
    for (int i = 0; i < block.count && coord_out_grads.bias != nullptr; ++i)
      *coord_out_grads.bias += scale[i];
    ForRows(ctx, block.count, 128, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int c = 0; c < width; ++c) after[i * width + c] = scale[i] * coord.weights[c];
      }
      ctx.graph->rows.activate_gradient(before + begin * width, after + begin * width,
                                        static_cast<int>((end - begin) * width), layer.edge_mlp_.activation,
                                        after + begin * width);
    });
    AddWeightGradients(ctx, after, width, width, messages, h, h, block.count, coord_in_grads);
  }

  // block.grad = gradient of the messages before the gate.
  void MessageGradients(const EdgeBlock& block) const {
    const int h = hidden();
    const float* messages = Gated(block);
    if (layer.moves()) CoordinateGradients(block, messages);
    for (int i = 0; i < block.count; ++i)
      std::copy_n(sums_grad + int64_t{csc.own()[block.first + i]} * h, h, block.grad + int64_t{i} * h);
    if (layer.moves()) coord_in.Inputs(ctx, after, coord_hidden(), block.count, block.grad, h, true);
    if (gates()) GateGradients(block);
  }

  void GateGradients(const EdgeBlock& block) const {
    const int h = hidden();
    ForRows(ctx, block.count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* g = block.grad + i * h;
        scale[i] = RowDot(g, block.messages + i * h, h) * gate_values[i] * (1 - gate_values[i]);
        for (int c = 0; c < h; ++c) g[c] = g[c] * gate_values[i] + scale[i] * gate.weights[c];
      }
    });
    if (gate_grads.weight != nullptr)
      AddColumnSums(ctx, block.messages, h, block.count, h, scale, gate_grads.weight);
    for (int i = 0; i < block.count && gate_grads.bias != nullptr; ++i) *gate_grads.bias += scale[i];
  }
};

Status EgnnLayer::NodesBackward(const graph::Context& ctx, int64_t nodes, const float* h, const float* sums,
                                const float* h_grad, float* h_in_grad, float* sums_grad,
                                const GradientScope& parameters) const {
  const int hidden = edge_mlp_.outputs(), width = node_inputs_ + hidden, middle = node_in_.n();
  ASSIGN_OR_RETURN(const DenseGradients in_grads, DenseGradients::Find(parameters, "node_mlp.0", node_in_));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(parameters, "node_mlp.2", node_out_));
  std::vector<float> both(nodes * width), before(nodes * middle), grad(nodes * middle);
  for (int64_t i = 0; i < nodes; ++i) {
    std::copy_n(h + i * node_inputs_, node_inputs_, both.data() + i * width);
    std::copy_n(sums + i * hidden, hidden, both.data() + i * width + node_inputs_);
  }
  Apply(ctx, node_in_, both.data(), width, nodes, before.data(), middle);
  std::vector<float> after(nodes * middle);
  Activate(ctx, before.data(), nodes * middle, edge_mlp_.activation, after.data());
  AddWeightGradients(ctx, h_grad, outputs(), outputs(), after.data(), middle, middle, nodes, out_grads);
  DenseBackward(node_out_).Inputs(ctx, h_grad, outputs(), nodes, grad.data(), middle);
  ActivationBackward(ctx, before.data(), nodes * middle, edge_mlp_.activation, grad.data());
  AddWeightGradients(ctx, grad.data(), middle, middle, both.data(), width, width, nodes, in_grads);
  DenseBackward(node_in_).Inputs(ctx, grad.data(), middle, nodes, both.data(), width);
  const bool residual = options_.residual && outputs() == node_inputs_;
  for (int64_t i = 0; i < nodes; ++i) {
    const float* row = both.data() + i * width;
    std::copy_n(row + node_inputs_, hidden, sums_grad + i * hidden);
    for (int c = 0; c < node_inputs_ && h_in_grad != nullptr; ++c)
      h_in_grad[i * node_inputs_ + c] += row[c] + (residual ? h_grad[i * node_inputs_ + c] : 0);
  }
  return OkStatus();
}

Status EgnnLayer::Backward(const graph::Context& ctx, const graph::Graph& graph, const float* h,
                           const float* x, const float* edge, const float* h_grad, const float* x_grad,
                           const EgnnGradients& out, const GradientMap& parameters) const {
  if (graph.num_src() != graph.num_dst()) {
    return InvalidArgument("an EGNN needs one set of nodes, but the graph has {} sources and {} destinations",
                           graph.num_src(), graph.num_dst());
  }
  const GradientScope scope(parameters);
  const int64_t nodes = graph.num_dst();
  const int hidden = edge_mlp_.outputs(), coord_hidden = coord_in_.n();
  std::vector<float> sums(nodes * hidden), sums_grad(nodes * hidden);
  RETURN_IF_ERROR(AddMessages(ctx, graph, h, x, edge, sums.data()));
  RETURN_IF_ERROR(NodesBackward(ctx, nodes, h, sums.data(), h_grad, out.h, sums_grad.data(), scope));
  for (int64_t i = 0; i < 3 * nodes && out.x != nullptr; ++i) out.x[i] += x_grad[i];
  if (graph.num_edges() == 0) return OkStatus();
  MessageBackward messages{*this, ctx, graph.by_destination(), x, x_grad, sums_grad.data(), out.x};
  if (moves()) {
    ASSIGN_OR_RETURN(messages.coord_in_grads, DenseGradients::Find(scope, "coord_mlp.0", coord_in_));
    ASSIGN_OR_RETURN(messages.coord_out_grads, DenseGradients::Find(scope, "coord_mlp.2", coord_out_));
  }
  if (!attention_.empty()) {
    ASSIGN_OR_RETURN(messages.gate_grads, DenseGradients::Find(scope, "att_mlp.0", attention_));
  }
  const int64_t block = std::min(kEdgeBlock, graph.num_edges());
  std::vector<float> before(block * coord_hidden), after(block * coord_hidden), scale(block),
      position_grads(moves() ? 3 * block : 0), gated(attention_.empty() ? 0 : block * hidden),
      gate_values(attention_.empty() ? 0 : block);
  messages.before = before.data();
  messages.after = after.data();
  messages.scale = scale.data();
  messages.moves = position_grads.data();
  messages.gated = gated.data();
  messages.gate_values = gate_values.data();
  EdgeMlpGradients mlp{.dst = out.h, .src = out.h, .edge = out.edge, .dst_xyz = out.x, .src_xyz = out.x};
  RETURN_IF_ERROR(mlp.FindParameters(edge_mlp_, scope.Under("edge_mlp")));
  return EdgeMlpBackward(
      ctx, graph, edge_mlp_, {.dst = h, .src = h, .edge = edge, .dst_xyz = x, .src_xyz = x},
      [&](const EdgeBlock& b) { messages.MessageGradients(b); }, mlp);
}

}  // namespace moesaic::science
