#include "science/se3/se3_layers.h"

#include <algorithm>
#include <cmath>

#include "science/edge_attention.h"
#include "science/run_tasks.h"
#include "science/se3/se3_conv_state.h"

namespace moesaic::science {
Status CheckNodeFeatures(const Fiber& fiber, int64_t rows, const FiberFeatures& x) {
  for (const auto& [degree, channels] : fiber) {
    const auto found = x.find(degree);
    const int64_t want = rows * channels * Dim(degree);
    if (found == x.end() || static_cast<int64_t>(found->second.size()) != want) {
      return InvalidArgument("features of degree {} must have {} elements, but have {}", degree, want,
                             found == x.end() ? 0 : found->second.size());
    }
  }
  return OkStatus();
}

int FiberWidth(const Fiber& fiber) {
  int width = 0;
  for (const auto& [degree, channels] : fiber) width += channels * Dim(degree);
  return width;
}

StatusOr<Se3Graph> Se3Graph::Create(graph::Graph graph, const float* xyz, int max_degree,
                                    bool source_minus_destination) {
  if (max_degree < 0 || max_degree > kMaxDegree)
    return InvalidArgument("the degree must be in [0, {}], not {}", kMaxDegree, max_degree);
  if (graph.num_src() != graph.num_dst()) return InvalidArgument("the graph must have one set of nodes");
  Se3Graph out;
  const SphericalHarmonics harmonics(2 * max_degree);
  const graph::Adjacency& csc = graph.by_destination();
  out.width_ = harmonics.size();
  out.max_degree_ = max_degree;
  out.harmonics_.resize(int64_t{csc.edges()} * out.width_);
  out.distances_.resize(csc.edges());
  for (int32_t p = 0; p < csc.edges(); ++p) {
    float d[3];
    for (int axis = 0; axis < 3; ++axis) {
      d[axis] = xyz[3 * int64_t{csc.neighbor[p]} + axis] - xyz[3 * int64_t{csc.own[p]} + axis];
      if (!source_minus_destination) d[axis] = -d[axis];
    }
    out.distances_[p] = std::sqrt(d[0] * d[0] + d[1] * d[1] + d[2] * d[2]);
    harmonics.Evaluate(d, out.harmonics_.data() + int64_t{p} * out.width_);
  }
  ASSIGN_OR_RETURN(out.by_source_, graph::GroupByIndex(graph::Indices::Of(csc.neighbor.data(), csc.edges()),
                                                       graph.num_src()));
  out.graph_ = std::move(graph);
  return out;
}

StatusOr<Se3Linear> Se3Linear::Load(const WeightScope& weights, const Fiber& in, const Fiber& out) {
  Se3Linear layer;
  for (const auto& [degree, channels] : out) {
    const auto from = in.find(degree);
    if (from == in.end())
      return InvalidArgument("a linear layer cannot make degree {} from other degrees", degree);
    ASSIGN_OR_RETURN(const WeightTensor* weight,
                     weights.Get(fmt::format("weights.{}", degree), {channels, from->second}));
    layer.weights_[degree] = *weight;
  }
  return layer;
}

std::vector<float> MultiplyChannels(const graph::Context& ctx, const WeightTensor& weight, int64_t rows,
                                    int dim, const std::vector<float>& x) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  std::vector<float> y(rows * n * dim);
  ForRows(ctx, rows, 32, [&](int64_t first, int64_t last) {
    std::vector<float> from(k * dim), to(n * dim);  // components are rows, so that lanes are channels
    for (int64_t r = first; r < last; ++r) {
      ctx.graph->rows.transpose(x.data() + r * k * dim, dim, k, dim, from.data(), k);
      ctx.graph->rows.matmul({.a = from.data(),
                              .b = weight.values.data(),
                              .c = to.data(),
                              .a_stride = k,
                              .b_stride = k,
                              .c_stride = n,
                              .m = dim,
                              .n = n,
                              .k = k,
                              .b_transposed = true});
      ctx.graph->rows.transpose(to.data(), n, dim, n, y.data() + r * n * dim, dim);
    }
  });
  return y;
}

FiberFeatures Se3Linear::Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const {
  FiberFeatures out;
  for (const auto& [degree, weight] : weights_)
    out[degree] = MultiplyChannels(ctx, weight, rows, Dim(degree), x.at(degree));
  return out;
}

StatusOr<Se3Norm> Se3Norm::Load(const WeightScope& weights, const Fiber& fiber) {
  Se3Norm layer;
  for (const auto& [degree, channels] : fiber) {
    ASSIGN_OR_RETURN(layer.norms_[degree],
                     weights.LayerNorm(fmt::format("layer_norms.{}", degree), channels));
  }
  return layer;
}

FiberFeatures Se3Norm::Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const {
  constexpr float kClamp = 0x1p-24F;  // the program's smallest norm
  FiberFeatures out;
  for (const auto& [degree, norm] : norms_) {
    const int64_t channels = static_cast<int64_t>(norm.gamma.size()), dim = Dim(degree);
    const std::vector<float>& from = x.at(degree);
    std::vector<float>& to = out[degree];
    to.resize(from.size());
    ForRows(ctx, rows, 64, [&, &scale = norm](int64_t first, int64_t last) {
      std::vector<float> norms(channels), scaled(channels);
      for (int64_t r = first; r < last; ++r) {
        for (int64_t c = 0; c < channels; ++c) {
          float squares = 0;
          for (int64_t m = 0; m < dim; ++m)
            squares += from[(r * channels + c) * dim + m] * from[(r * channels + c) * dim + m];
          norms[c] = std::max(std::sqrt(squares), kClamp);
        }
        ctx.graph->rows.layer_norm(norms.data(), scale.gamma.data(), scale.beta.data(),
                                   static_cast<int>(channels), scale.eps, scaled.data());
        for (int64_t c = 0; c < channels; ++c) {
          const float factor = std::max(scaled[c], 0.0F) / norms[c];
          for (int64_t m = 0; m < dim; ++m)
            to[(r * channels + c) * dim + m] = from[(r * channels + c) * dim + m] * factor;
        }
      }
    });
  }
  return out;
}

StatusOr<Se3AttentionBlock> Se3AttentionBlock::Load(const WeightScope& weights, const Fiber& in,
                                                    const Fiber& out, int edge_inputs, int heads,
                                                    int channels_div) {
  Se3AttentionBlock block;
  block.in_ = in;
  block.heads_ = heads;
  Fiber both, joined;
  for (const auto& [degree, channels] : out) {
    const int value = channels / std::max(1, channels_div);
    if (heads < 1 || value < 1 || value % heads != 0) {
      return InvalidArgument("{} channels of degree {} divided by {} must be divisible by {} heads", channels,
                             degree, channels_div, heads);
    }
    block.value_[degree] = value;
    const auto from = in.find(degree);
    if (from != in.end()) block.key_[degree] = value;
    both[degree] = from != in.end() ? 2 * value : value;
    joined[degree] = value + (from != in.end() ? from->second : 0);
  }
  if (block.key_.empty()) return InvalidArgument("input and output of attention have no degree in common");
  ASSIGN_OR_RETURN(block.to_key_value_, Se3Conv::Load(weights.Under("to_key_value"), in, both, edge_inputs));
  ASSIGN_OR_RETURN(block.to_query_, Se3Linear::Load(weights.Under("to_query"), in, block.key_));
  ASSIGN_OR_RETURN(block.project_, Se3Linear::Load(weights.Under("project"), joined, out));
  return block;
}

std::map<int, std::vector<int>> Se3AttentionBlock::HeadOffsets(const Fiber& fiber) const {
  const int head_width = FiberWidth(fiber) / heads_;
  std::map<int, std::vector<int>> offsets;
  int before = 0;  // columns of a head that lower degrees take
  for (const auto& [degree, channels] : fiber) {
    const int block = channels / heads_;
    for (int c = 0; c < channels; ++c)
      offsets[degree].push_back(c / block * head_width + before + c % block * Dim(degree));
    before += block * Dim(degree);
  }
  return offsets;
}

std::map<int, std::vector<int>> Se3AttentionBlock::KeyValueOffsets() const {
  std::map<int, std::vector<int>> offsets = HeadOffsets(value_);
  for (const auto& [degree, keys] : HeadOffsets(key_)) {
    for (const int offset : keys) offsets[degree].push_back(FiberWidth(value_) + offset);
  }
  return offsets;
}

StatusOr<FiberFeatures> Se3AttentionBlock::Run(const graph::Context& ctx, const Se3Graph& edges,
                                               const FiberFeatures& nodes, const float* edge) const {
  RETURN_IF_ERROR(CheckNodeFeatures(in_, edges.graph().num_src(), nodes));
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t count = csc.edges(), rows = edges.graph().num_dst();
  // A row of an edge is its value, then its key. A head has a block of channels of every degree.
  const int key_width = FiberWidth(key_), value_width = FiberWidth(value_), width = key_width + value_width;
  graph::ScratchScope scope(ctx);
  const graph::Output rows_of_edges = scope.Matrix(tensor::DType::kF32, count, width),
                      attended = scope.Matrix(tensor::DType::kF32, rows, value_width),
                      queries = scope.Matrix(tensor::DType::kF32, rows, key_width);
  auto* messages = static_cast<float*>(rows_of_edges.data);
  RETURN_IF_ERROR(to_key_value_.RunEdges(ctx, edges, nodes, edge, {messages, width, KeyValueOffsets()}));
  const FiberFeatures query = to_query_.Run(ctx, rows, nodes);
  auto* q = static_cast<float*>(queries.data);
  for (const auto& [degree, offsets] : HeadOffsets(key_)) {
    const int64_t dim = Dim(degree), channels = key_.at(degree);
    const std::vector<float>& from = query.at(degree);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < channels; ++c)
        std::copy_n(from.data() + (r * channels + c) * dim, dim, q + r * key_width + offsets[c]);
    }
  }
  // Edges are in the order by destination: a graph with this order reads their rows in place.
  const std::vector<int32_t> sources = csc.neighbor;
  ASSIGN_OR_RETURN(const graph::Graph grouped,
                   graph::Graph::FromCsc(graph::Indices::Of(csc.ptr.data(), rows + 1),
                                         graph::Indices::Of(sources.data(), count), edges.graph().num_src()));
  const graph::Features values = {messages, tensor::DType::kF32, count, value_width, width},
                        keys = {messages + value_width, tensor::DType::kF32, count, key_width, width};
  RETURN_IF_ERROR(graph::EdgeAttention(ctx, grouped,
                                       {.heads = heads_,
                                        .q = queries,
                                        .k = keys,
                                        .v = values,
                                        .bias = {},
                                        .k_target = graph::Target::kEdge,
                                        .v_target = graph::Target::kEdge,
                                        .scale = 1 / std::sqrt(static_cast<float>(key_width)),
                                        .out = attended}));
  FiberFeatures joined;
  for (const auto& [degree, offsets] : HeadOffsets(value_)) {
    const int64_t dim = Dim(degree), channels = value_.at(degree);
    const auto own = in_.find(degree);
    const int64_t own_width = own == in_.end() ? 0 : own->second * dim,
                  joined_width = own_width + channels * dim;
    std::vector<float>& to = joined[degree];
    to.resize(rows * joined_width);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = static_cast<const float*>(attended.data) + r * value_width;
      float* row = to.data() + r * joined_width;
      if (own_width > 0) std::copy_n(nodes.at(degree).data() + r * own_width, own_width, row);
      for (int64_t c = 0; c < channels; ++c) std::copy_n(from + offsets[c], dim, row + own_width + c * dim);
    }
  }
  return project_.Run(ctx, rows, joined);
}

}  // namespace moesaic::science
