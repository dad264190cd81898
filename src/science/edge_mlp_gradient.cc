#include "science/edge_mlp_gradient.h"

#include <algorithm>

#include "science/neighbors.h"

namespace moesaic::science {
namespace {

// Values of one block of edges.
struct BlockValues {
  float *edge, *squared, *grad, *hidden_grad;
  std::vector<float*> before, after;  // of every layer's activation; equal where there is none
};

// State of one backward pass.
struct MlpBackward {
  const graph::Context& ctx;
  const graph::Adjacency& csc;
  const EdgeMlp& mlp;
  const EdgeMlpInputs& inputs;
  const EdgeMlpGradients& out;
  const float *from_dst, *from_src;  // [nodes, H]: parts of the first layer
  float *from_dst_grad, *from_src_grad;
  std::vector<DenseBackward> rest;

  int hidden() const { return mlp.first_dst.n(); }
  int width(size_t layer) const { return layer == 0 ? hidden() : mlp.rest[layer - 1].n(); }
  size_t layers() const { return mlp.rest.size() + 1; }
  graph::Activation activation(size_t layer) const {
    return layer + 1 < layers() || mlp.activate_last ? mlp.activation : graph::Activation::kNone;
  }
  bool wants_positions() const { return out.dst_xyz != nullptr || out.src_xyz != nullptr; }

  void Forward(int32_t first, int count, const BlockValues& v) const {
    const int h = hidden(), edge_inputs = mlp.first_edge.empty() ? 0 : mlp.first_edge.k();
    for (int i = 0; i < count && edge_inputs > 0; ++i) {
      std::copy_n(inputs.edge + csc.EdgeAt(first + i) * edge_inputs, edge_inputs,
                  v.edge + int64_t{i} * edge_inputs);
    }
    if (edge_inputs > 0) Apply(ctx, mlp.first_edge, v.edge, edge_inputs, count, v.before[0], h);
    ForRows(ctx, count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t d = csc.own()[first + i], s = csc.neighbor[first + i];
        float* y = v.before[0] + i * h;
        const float* rows[] = {from_dst + d * h, from_src + s * h, y};
        const bool distance = !mlp.distance.empty();
        v.squared[i] = distance ? graph::SquaredDistance(inputs.dst_xyz + 3 * d, inputs.src_xyz + 3 * s) : 0;
        ctx.graph->rows.activate(rows, edge_inputs > 0 ? 3 : 2, distance ? mlp.distance.data() : nullptr,
                                 v.squared[i], h, graph::Activation::kNone, y);
      }
    });
    for (size_t layer = 0; layer < layers(); ++layer) {
      if (layer > 0)
        Apply(ctx, mlp.rest[layer - 1], v.after[layer - 1], width(layer - 1), count, v.before[layer],
              width(layer));
      if (activation(layer) != graph::Activation::kNone)
        Activate(ctx, v.before[layer], int64_t{count} * width(layer), activation(layer), v.after[layer]);
    }
  }

  // Sums rows of the first layer's gradient for both ends of every edge: a task owns columns.
  void AddToNodes(int32_t first, int count, const float* grad) const {
    const int h = hidden();
    constexpr int64_t kColumns = 64;
    ForRows(ctx, h, kColumns, [&](int64_t begin, int64_t end) {
      const int columns = static_cast<int>(end - begin);
      for (int i = 0; i < count; ++i) {
        const float* row = grad + int64_t{i} * h + begin;
        ctx.exec.kernels->axpy(1, row, columns, from_dst_grad + int64_t{csc.own()[first + i]} * h + begin);
        ctx.exec.kernels->axpy(1, row, columns, from_src_grad + int64_t{csc.neighbor[first + i]} * h + begin);
      }
    });
  }

  // d2 = |x_d - x_s|^2, whose gradient is the dot product with the distance's weights.
  void AddToPositions(int32_t first, int count, const float* grad, float* dots) const {
    const int h = hidden();
    ForRows(ctx, count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float sum = 0;
        for (int c = 0; c < h; ++c) sum += grad[i * h + c] * mlp.distance[c];
        dots[i] = 2 * sum;
      }
    });
    for (int i = 0; i < count; ++i) {
      const int64_t d = csc.own()[first + i], s = csc.neighbor[first + i];
      for (int axis = 0; axis < 3; ++axis) {
        const float x = dots[i] * (inputs.dst_xyz[3 * d + axis] - inputs.src_xyz[3 * s + axis]);
        if (out.dst_xyz != nullptr) out.dst_xyz[3 * d + axis] += x;
        if (out.src_xyz != nullptr) out.src_xyz[3 * s + axis] -= x;
      }
    }
  }

  // From the gradient of the messages in v.grad.
  void Backward(int32_t first, int count, const BlockValues& v) const {
    float *grad = v.grad, *next = v.hidden_grad;
    for (size_t layer = layers(); layer-- > 0;) {
      const int64_t w = width(layer);
      if (activation(layer) != graph::Activation::kNone)
        ActivationBackward(ctx, v.before[layer], count * w, activation(layer), grad);
      if (layer == 0) break;
      const int inputs_of_layer = width(layer - 1);
      if (!out.rest.empty())
        AddWeightGradients(ctx, grad, w, static_cast<int>(w), v.after[layer - 1], inputs_of_layer,
                           inputs_of_layer, count, out.rest[layer - 1]);
      rest[layer - 1].Inputs(ctx, grad, w, count, next, inputs_of_layer);
      std::swap(grad, next);
    }
    AddToNodes(first, count, grad);
    if (wants_positions() && !mlp.distance.empty()) AddToPositions(first, count, grad, next);
  }
};

// Adds part [H, count] to columns [first, first + count) of the whole weight's gradient.
void AddColumns(const std::vector<float>& part, int hidden, int count, int first, int columns, float* whole) {
  for (int row = 0; row < hidden && whole != nullptr; ++row) {
    for (int c = 0; c < count; ++c)
      whole[int64_t{row} * columns + first + c] += part[int64_t{row} * count + c];
  }
}

}  // namespace

Status EdgeMlpGradients::FindParameters(const EdgeMlp& mlp, const GradientScope& scope) {
  const int64_t columns = int64_t{mlp.first_dst.k()} + mlp.first_src.k() + (mlp.distance.empty() ? 0 : 1) +
                          (mlp.first_edge.empty() ? 0 : mlp.first_edge.k());
  ASSIGN_OR_RETURN(first_weight, scope.Get("0.weight", mlp.first_dst.n() * columns));
  ASSIGN_OR_RETURN(first_bias, scope.Get("0.bias", mlp.first_dst.n()));
  rest.resize(mlp.rest.size());
  for (size_t i = 0; i < rest.size(); ++i) {
    ASSIGN_OR_RETURN(rest[i], DenseGradients::Find(scope, std::to_string(2 * (i + 1)), mlp.rest[i]));
  }
  return OkStatus();
}

Status EdgeMlpBackward(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                       const EdgeMlpInputs& inputs, const std::function<void(const EdgeBlock&)>& message_grad,
                       const EdgeMlpGradients& out) {
  RETURN_IF_ERROR(CheckEdgeMlp(graph, mlp, inputs));
  if (!out.rest.empty() && out.rest.size() != mlp.rest.size()) {
    return InvalidArgument("gradients of {} layers are wanted, but the perceptron has {} after the first",
                           out.rest.size(), mlp.rest.size());
  }
  if (graph.num_edges() == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int h = mlp.first_dst.n(), edge_inputs = mlp.first_edge.empty() ? 0 : mlp.first_edge.k();
  const int64_t dst_size = int64_t{graph.num_dst()} * h, src_size = int64_t{graph.num_src()} * h;
  float *from_dst = take(dst_size), *from_src = take(src_size), *from_dst_grad = take(dst_size),
        *from_src_grad = take(src_size);
  Apply(ctx, mlp.first_dst, inputs.dst, mlp.first_dst.k(), graph.num_dst(), from_dst, h);
  Apply(ctx, mlp.first_src, inputs.src, mlp.first_src.k(), graph.num_src(), from_src, h);
  std::fill_n(from_dst_grad, dst_size, 0.0F);
  std::fill_n(from_src_grad, src_size, 0.0F);
  MlpBackward run = {ctx,      graph.by_destination(), mlp,           inputs, out, from_dst,
                     from_src, from_dst_grad,          from_src_grad, {}};
  for (const Dense& dense : mlp.rest) run.rest.emplace_back(dense);
  const int32_t block = std::min(kEdgeBlock, graph.num_edges());
  BlockValues v = {take(int64_t{block} * std::max(1, edge_inputs)), take(block), nullptr, nullptr, {}, {}};
  int64_t widest = 0;
  for (size_t layer = 0; layer < run.layers(); ++layer) {
    const int64_t size = int64_t{block} * run.width(layer);
    widest = std::max(widest, size);
    v.before.push_back(take(size));
    v.after.push_back(run.activation(layer) == graph::Activation::kNone ? v.before.back() : take(size));
  }
  v.grad = take(widest);
  v.hidden_grad = take(widest);
  // Gradients of the parts of the first layer.
  const int columns = mlp.first_dst.k() + mlp.first_src.k() + (mlp.distance.empty() ? 0 : 1) + edge_inputs;
  std::vector<float> distance_grad(mlp.distance.size()), edge_weight(int64_t{h} * edge_inputs);
  std::vector<DenseBackward> first_edge;
  if (edge_inputs > 0 && out.edge != nullptr) first_edge.emplace_back(mlp.first_edge);
  for (int32_t first = 0; first < graph.num_edges(); first += block) {
    const int32_t count = std::min(block, graph.num_edges() - first);
    run.Forward(first, count, v);
    message_grad({first, count, v.after.back(), v.grad});
    run.Backward(first, count, v);
    // After an odd number of layers the gradient of the first one is in the other buffer.
    const float* grad = mlp.rest.size() % 2 == 0 ? v.grad : v.hidden_grad;
    if (out.first_weight != nullptr && !mlp.distance.empty())
      AddColumnSums(ctx, grad, h, count, h, v.squared, distance_grad.data());
    if (edge_inputs == 0) continue;
    if (out.first_weight != nullptr)
      AddWeightGradients(ctx, grad, h, h, v.edge, edge_inputs, edge_inputs, count, {edge_weight.data()});
    if (out.edge == nullptr) continue;
    first_edge[0].Inputs(ctx, grad, h, count, v.edge, edge_inputs);
    for (int i = 0; i < count; ++i) {
      const int64_t e = run.csc.EdgeAt(first + i);
      for (int c = 0; c < edge_inputs; ++c)
        out.edge[e * edge_inputs + c] += v.edge[int64_t{i} * edge_inputs + c];
    }
  }
  const struct {
    const Dense& dense;
    const float *x, *grad;
    float* x_grad;
    int32_t nodes;
    int first_column;
    bool biased;
  } ends[] = {{mlp.first_dst, inputs.dst, from_dst_grad, out.dst, graph.num_dst(), 0, true},
              {mlp.first_src, inputs.src, from_src_grad, out.src, graph.num_src(), mlp.first_dst.k(), false}};
  for (const auto& end : ends) {
    std::vector<float> weight(out.first_weight != nullptr ? int64_t{h} * end.dense.k() : 0);
    AddWeightGradients(ctx, end.grad, h, h, end.x, end.dense.k(), end.dense.k(), end.nodes,
                       {weight.empty() ? nullptr : weight.data(), end.biased ? out.first_bias : nullptr});
    AddColumns(weight, h, end.dense.k(), end.first_column, columns, out.first_weight);
    if (end.x_grad != nullptr)
      DenseBackward(end.dense).Inputs(ctx, end.grad, h, end.nodes, end.x_grad, end.dense.k(), true);
  }
  const int after_nodes = mlp.first_dst.k() + mlp.first_src.k();
  AddColumns(distance_grad, h, mlp.distance.empty() ? 0 : 1, after_nodes, columns, out.first_weight);
  AddColumns(edge_weight, h, edge_inputs, columns - edge_inputs, columns, out.first_weight);
  return OkStatus();
}

Status EdgeMlpReduceBackward(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                             const EdgeMlpInputs& inputs, graph::Reduce reduce, float scale,
                             const float* out_grad, const EdgeMlpGradients& out) {
  if (reduce != graph::Reduce::kSum && reduce != graph::Reduce::kMean) {
    return InvalidArgument("edge perceptrons are reduced by sum or mean");
  }
  const int width = mlp.outputs();
  const graph::Adjacency& csc = graph.by_destination();
  auto message_grad = [&](const EdgeBlock& block) {
    ForRows(ctx, block.count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int32_t d = csc.own()[block.first + i];
        const float factor =
            reduce == graph::Reduce::kMean ? scale / static_cast<float>(csc.ptr[d + 1] - csc.ptr[d]) : scale;
        for (int c = 0; c < width; ++c) block.grad[i * width + c] = factor * out_grad[int64_t{d} * width + c];
      }
    });
  };
  return EdgeMlpBackward(ctx, graph, mlp, inputs, message_grad, out);
}

}  // namespace moesaic::science
