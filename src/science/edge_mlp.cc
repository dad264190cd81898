#include "science/edge_mlp.h"

#include <algorithm>
#include <memory>

#include "science/neighbors.h"

namespace moesaic::science {
namespace {

// Buffers of one worker.
struct TileBuffers {
  TileDense dense, edge_dense;
  float *in, *out, *edge;

  TileBuffers(const graph::Context& ctx, const EdgeMlp& mlp, int width, int edge_inputs)
      : dense(ctx, mlp.rest.empty() ? tensor::PackedFormat::kF32 : mlp.rest[0].matrix().layout.format,
              kEdgeTile, width),
        edge_dense(ctx, edge_inputs > 0 ? mlp.first_edge.matrix().layout.format : tensor::PackedFormat::kF32,
                   kEdgeTile, std::max(1, edge_inputs)),
        in(ctx.exec.scratch->Take<float>(size_t{kEdgeTile} * width).data()),
        out(ctx.exec.scratch->Take<float>(size_t{kEdgeTile} * width).data()),
        edge(ctx.exec.scratch->Take<float>(size_t{kEdgeTile} * std::max(1, edge_inputs)).data()) {}
};

// State that the tasks of one call share.
struct EdgeRun {
  const graph::Context& ctx;
  const graph::Adjacency& csc;
  const EdgeMlp& mlp;
  const EdgeMlpInputs& inputs;
  const float* from_dst;  // [num_dst, H]: W_d h_d + b
  const float* from_src;  // [num_src, H]
};

// The first layer of a tile, into buffers.in [count, H].
void FirstLayer(const EdgeRun& run, int32_t first, int count, const TileBuffers& buffers) {
  const int hidden = run.mlp.first_dst.n();
  const bool distance = !run.mlp.distance.empty(), edges = !run.mlp.first_edge.empty();
  if (edges) {
    const int inputs = run.mlp.first_edge.k();
    for (int i = 0; i < count; ++i) {
      std::copy_n(run.inputs.edge + run.csc.EdgeAt(first + i) * inputs, inputs,
                  buffers.edge + static_cast<int64_t>(i) * inputs);
    }
    buffers.edge_dense.Run(run.mlp.first_edge, buffers.edge, inputs, count, buffers.in, hidden);
  }
  const auto activation =
      run.mlp.rest.empty() && !run.mlp.activate_last ? graph::Activation::kNone : run.mlp.activation;
  for (int i = 0; i < count; ++i) {
    const int64_t d = run.csc.own()[first + i], s = run.csc.neighbor[first + i];
    float* y = buffers.in + int64_t{i} * hidden;
    const float* rows[] = {run.from_dst + d * hidden, run.from_src + s * hidden, y};
    const float squared =
        distance ? graph::SquaredDistance(run.inputs.dst_xyz + 3 * d, run.inputs.src_xyz + 3 * s) : 0;
    run.ctx.graph->rows.activate(rows, edges ? 3 : 2, distance ? run.mlp.distance.data() : nullptr, squared,
                                 hidden, activation, y);
  }
}

// Runs the perceptron on positions [first, first + count). The result is in one of the buffers.
const float* RunTile(const EdgeRun& run, int32_t first, int count, const TileBuffers& buffers) {
  FirstLayer(run, first, count, buffers);
  float *in = buffers.in, *out = buffers.out;
  int width = run.mlp.first_dst.n();
  for (size_t layer = 0; layer < run.mlp.rest.size(); ++layer) {
    const Dense& dense = run.mlp.rest[layer];
    buffers.dense.Run(dense, in, width, count, out, dense.n());
    width = dense.n();
    const bool last = layer + 1 == run.mlp.rest.size();
    if (!last || run.mlp.activate_last) {
      const float* row = out;
      run.ctx.graph->rows.activate(&row, 1, nullptr, 0, count * width, run.mlp.activation, out);
    }
    std::swap(in, out);
  }
  return in;
}

}  // namespace

Status CheckEdgeMlp(const graph::Graph& graph, const EdgeMlp& mlp, const EdgeMlpInputs& in) {
  if (mlp.first_dst.empty() || mlp.first_src.empty())
    return InvalidArgument("the perceptron has no first layer");
  const int hidden = mlp.first_dst.n();
  if (mlp.first_src.n() != hidden || (!mlp.first_edge.empty() && mlp.first_edge.n() != hidden) ||
      (!mlp.distance.empty() && static_cast<int>(mlp.distance.size()) != hidden)) {
    return InvalidArgument("all parts of the first layer must have {} outputs", hidden);
  }
  int width = hidden;
  for (const Dense& dense : mlp.rest) {
    if (dense.k() != width)
      return InvalidArgument("a layer has {} inputs after one with {} outputs", dense.k(), width);
    if (dense.matrix().layout.format != mlp.rest[0].matrix().layout.format) {
      return InvalidArgument("all layers after the first must have one weight format");
    }
    width = dense.n();
  }
  if (graph.num_edges() == 0) return OkStatus();
  if (in.dst == nullptr || in.src == nullptr) return InvalidArgument("node features are missing");
  if (!mlp.first_edge.empty() && in.edge == nullptr) return InvalidArgument("edge features are missing");
  if (!mlp.distance.empty() && (in.dst_xyz == nullptr || in.src_xyz == nullptr)) {
    return InvalidArgument("coordinates are missing");
  }
  return OkStatus();
}

Status EdgeMlp::SplitFirst(int hidden, int dst_inputs, int src_inputs, bool with_distance, int edge_inputs,
                           std::span<const float> weight, std::span<const float> bias,
                           tensor::PackedFormat format) {
  const int columns = dst_inputs + src_inputs + (with_distance ? 1 : 0) + edge_inputs;
  if (static_cast<int64_t>(weight.size()) != int64_t{hidden} * columns) {
    return InvalidArgument("the first layer must have {} x {} weights, but has {}", hidden, columns,
                           weight.size());
  }
  int column = 0;
  auto take = [&](int count) {
    std::vector<float> part = ColumnsOf(weight, hidden, columns, column, count);
    column += count;
    return part;
  };
  ASSIGN_OR_RETURN(first_dst, Dense::Pack(hidden, dst_inputs, take(dst_inputs), bias, format));
  ASSIGN_OR_RETURN(first_src, Dense::Pack(hidden, src_inputs, take(src_inputs), {}, format));
  distance = with_distance ? take(1) : std::vector<float>{};
  first_edge = Dense();
  if (edge_inputs > 0) {
    ASSIGN_OR_RETURN(first_edge, Dense::Pack(hidden, edge_inputs, take(edge_inputs), {}, format));
  }
  return OkStatus();
}

StatusOr<EdgeMlp> EdgeMlp::Load(const WeightScope& weights, int dst_inputs, int src_inputs,
                                bool with_distance, int edge_inputs) {
  if (dst_inputs < 1 || src_inputs < 1 || edge_inputs < 0) {
    return InvalidArgument(
        "an edge perceptron needs inputs of both ends, and 0 or more of the edge, not {}, {} and {}",
        dst_inputs, src_inputs, edge_inputs);
  }
  EdgeMlp mlp;
  const int64_t columns = int64_t{dst_inputs} + src_inputs + (with_distance ? 1 : 0) + edge_inputs;
  ASSIGN_OR_RETURN(const WeightTensor* first, weights.Get("0.weight", {-1, columns}));
  const int hidden = static_cast<int>(first->shape[0]);
  std::vector<float> bias;
  if (weights.Has("0.bias")) {
    ASSIGN_OR_RETURN(bias, weights.Vector("0.bias", hidden));
  }
  RETURN_IF_ERROR(mlp.SplitFirst(hidden, dst_inputs, src_inputs, with_distance, edge_inputs, first->values,
                                 bias, weights.format()));
  for (int i = 2; weights.Has(fmt::format("{}.weight", i)); i += 2) {
    ASSIGN_OR_RETURN(Dense dense, weights.Linear(std::to_string(i), -1, mlp.outputs()));
    mlp.rest.push_back(std::move(dense));
  }
  return mlp;
}

Status ForEdgeTiles(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                    const EdgeMlpInputs& inputs, const std::function<void(const EdgeTile&)>& consume) {
  RETURN_IF_ERROR(CheckEdgeMlp(graph, mlp, inputs));
  if (graph.num_edges() == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  const int hidden = mlp.first_dst.n();
  float* from_dst = ctx.exec.scratch->Take<float>(size_t(graph.num_dst()) * hidden).data();
  float* from_src = ctx.exec.scratch->Take<float>(size_t(graph.num_src()) * hidden).data();
  Apply(ctx, mlp.first_dst, inputs.dst, mlp.first_dst.k(), graph.num_dst(), from_dst, hidden);
  Apply(ctx, mlp.first_src, inputs.src, mlp.first_src.k(), graph.num_src(), from_src, hidden);
  int width = hidden;
  for (const Dense& dense : mlp.rest) width = std::max(width, dense.n());
  std::vector<TileBuffers> buffers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w)
    buffers.emplace_back(ctx, mlp, width, mlp.first_edge.empty() ? 0 : mlp.first_edge.k());
  const graph::Adjacency& csc = graph.by_destination();
  const EdgeRun run = {ctx, csc, mlp, inputs, from_dst, from_src};
  std::vector<graph::SegmentRange> ranges = graph::DivideByEdges(csc, ctx.exec.pool->size());
  for (const int32_t hub : csc.hubs) ranges.push_back({hub, hub + 1});
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t task, int worker) {
    const int32_t end = csc.ptr[ranges[task].last];
    for (int32_t p = csc.ptr[ranges[task].first]; p < end; p += kEdgeTile) {
      const int count = std::min<int32_t>(kEdgeTile, end - p);
      consume({p, count, RunTile(run, p, count, buffers[worker]), worker});
    }
  });
  return OkStatus();
}

Status EdgeMlpReduce(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                     const EdgeMlpInputs& inputs, graph::Reduce reduce, float scale, float* out) {
  if (reduce != graph::Reduce::kSum && reduce != graph::Reduce::kMean) {
    return InvalidArgument("edge perceptrons are reduced by sum or mean");
  }
  const int width = mlp.outputs();
  std::fill_n(out, int64_t{graph.num_dst()} * width, 0.0F);
  const graph::Adjacency& csc = graph.by_destination();
  RETURN_IF_ERROR(ForEdgeTiles(ctx, graph, mlp, inputs, [&](const EdgeTile& tile) {
    for (int i = 0; i < tile.count; ++i)
      ctx.exec.kernels->axpy(1, tile.messages + int64_t{i} * width, width,
                             out + int64_t{csc.own()[tile.first + i]} * width);
  }));
  if (reduce == graph::Reduce::kSum && scale == 1) return OkStatus();
  for (int64_t d = 0; d < graph.num_dst(); ++d) {
    float factor = scale;
    if (reduce == graph::Reduce::kMean)
      factor /= static_cast<float>(std::max(1, csc.ptr[d + 1] - csc.ptr[d]));
    for (int i = 0; i < width; ++i) out[d * width + i] *= factor;
  }
  return OkStatus();
}

Status EdgeMlpMap(const graph::Context& ctx, const graph::Graph& graph, const EdgeMlp& mlp,
                  const EdgeMlpInputs& inputs, float* out) {
  const int width = mlp.outputs();
  const graph::Adjacency& csc = graph.by_destination();
  return ForEdgeTiles(ctx, graph, mlp, inputs, [&](const EdgeTile& tile) {
    for (int i = 0; i < tile.count; ++i) {
      std::copy_n(tile.messages + int64_t{i} * width, width, out + csc.EdgeAt(tile.first + i) * width);
    }
  });
}

}  // namespace moesaic::science
