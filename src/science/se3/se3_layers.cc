#include "science/se3/se3_layers.h"

#include <algorithm>
#include <cmath>

#include "base/round.h"
#include "science/edge_attention.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int kConvTile = 64;  // edges: with 768 weights each, a tile of weights takes 192 KiB

int Dim(int degree) { return 2 * degree + 1; }

Status CheckFiber(const Fiber& fiber, const char* name) {
  for (const auto& [degree, channels] : fiber) {
    if (degree < 0 || degree > kMaxDegree || channels < 1) {
      return InvalidArgument("{} must have degrees up to {} with one channel or more, not {}: {}", name,
                             kMaxDegree, degree, channels);
    }
  }
  return OkStatus();
}

Status CheckNodes(const Fiber& fiber, int64_t rows, const FiberFeatures& x) {
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

// Rotation-independent scratch of one worker.
struct ConvTile {
  TileDense dense;
  float *inputs, *hidden, *hidden2, *weights, *basis, *products;
};

void ActivateHidden(const graph::Context& ctx, const Norm& norm, float* x, int rows, int n) {
  if (!norm.gamma.empty()) NormalizeRows(ctx, norm, x, rows, x);
  const float* row = x;
  ctx.graph->rows.activate(&row, 1, nullptr, 0, rows * n, graph::Activation::kRelu, x);
}

}  // namespace

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

FiberFeatures Se3Linear::Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const {
  FiberFeatures out;
  for (const auto& [degree, weight] : weights_) {
    const int64_t n = weight.shape[0], k = weight.shape[1], dim = Dim(degree);
    const std::vector<float>& from = x.at(degree);
    std::vector<float>& to = out[degree];
    to.resize(rows * n * dim);
    ForRows(ctx, rows, 32, [&, &w = weight](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        ctx.graph->rows.matmul({.a = w.values.data(),
                                .b = from.data() + r * k * dim,
                                .c = to.data() + r * n * dim,
                                .a_stride = k,
                                .b_stride = dim,
                                .c_stride = dim,
                                .m = n,
                                .n = dim,
                                .k = k});
      }
    });
  }
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

StatusOr<Se3Conv> Se3Conv::Load(const WeightScope& weights, const Fiber& in, const Fiber& out,
                                int edge_inputs) {
  RETURN_IF_ERROR(CheckFiber(in, "the input"));
  RETURN_IF_ERROR(CheckFiber(out, "the output"));
  if (edge_inputs < 0) return InvalidArgument("edge_inputs must be 0 or more, but is {}", edge_inputs);
  Se3Conv layer;
  layer.in_ = in;
  layer.out_ = out;
  layer.edge_inputs_ = edge_inputs;
  for (const auto& [d_out, c_out] : out) {
    for (const auto& [d_in, c_in] : in) {
      Pair pair{.in_degree = d_in,
                .out_degree = d_out,
                .frequencies = Dim(std::min(d_in, d_out)),
                .first = {},
                .second = {},
                .last = {},
                .first_norm = {},
                .second_norm = {},
                .coupling = {}};
      const WeightScope net =
          weights.Under(fmt::format("conv.{},{}", d_in, d_out)).Under("radial_func").Under("net");
      const bool norms = net.Has("6.weight");
      ASSIGN_OR_RETURN(pair.first, net.Linear("0", -1, edge_inputs + 1));
      const int hidden = pair.first.n();
      ASSIGN_OR_RETURN(pair.second, net.Linear(norms ? "3" : "2", hidden, hidden));
      if (norms) {
        ASSIGN_OR_RETURN(pair.first_norm, net.LayerNorm("1", hidden));
        ASSIGN_OR_RETURN(pair.second_norm, net.LayerNorm("4", hidden));
      }
      const int64_t products = int64_t{c_in} * pair.frequencies;
      ASSIGN_OR_RETURN(const WeightTensor* last,
                       net.Get(norms ? "6.weight" : "4.weight", {c_out * products, hidden}));
      std::vector<float> rows(last->values.size());
      for (int64_t o = 0; o < c_out; ++o) {
        for (int64_t p = 0; p < products; ++p)
          std::copy_n(last->values.data() + (o * products + p) * hidden, hidden,
                      rows.data() + (p * c_out + o) * hidden);
      }
      ASSIGN_OR_RETURN(pair.last, Dense::Pack(static_cast<int>(c_out * products), hidden, rows, {}));
      for (int j = std::abs(d_in - d_out); j <= d_in + d_out; ++j) {  // [J, in, out] -> [in, out, J]
        const std::vector<double> w = Wigner3j(j, d_in, d_out);
        for (int i = 0; i < Dim(d_in); ++i) {
          for (int o = 0; o < Dim(d_out); ++o) {
            for (int f = 0; f < Dim(j); ++f)
              pair.coupling.push_back(static_cast<float>(w[(f * Dim(d_in) + i) * Dim(d_out) + o]));
          }
        }
      }
      layer.pairs_.push_back(std::move(pair));
    }
    const std::string self = fmt::format("to_kernel_self.{}", d_out);
    if (weights.Has(self)) {
      const auto from = in.find(d_out);
      if (from == in.end()) return InvalidArgument("\"{}\" needs an input of degree {}", self, d_out);
      ASSIGN_OR_RETURN(const WeightTensor* kernel, weights.Get(self, {c_out, from->second}));
      layer.self_[d_out] = *kernel;
    }
  }
  return layer;
}

StatusOr<FiberFeatures> Se3Conv::RunEdges(const graph::Context& ctx, const Se3Graph& edges,
                                          const FiberFeatures& nodes, const float* edge) const {
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t count = csc.edges();
  RETURN_IF_ERROR(CheckNodes(in_, edges.graph().num_src(), nodes));
  for (const auto& [degree, channels] : out_) {
    if (degree > edges.max_degree())
      return InvalidArgument("the graph has harmonics for degree {}, not {}", edges.max_degree(), degree);
  }
  for (const auto& [degree, channels] : in_) {
    if (degree > edges.max_degree())
      return InvalidArgument("the graph has harmonics for degree {}, not {}", edges.max_degree(), degree);
  }
  if (edge_inputs_ > 0 && edge == nullptr && count > 0) return InvalidArgument("edge features are missing");
  FiberFeatures out;
  for (const auto& [degree, channels] : out_) out[degree].assign(count * channels * Dim(degree), 0);
  int hidden = 0, weights = 0, basis = 0, products = 0;
  for (const Pair& pair : pairs_) {
    hidden = std::max(hidden, pair.first.n());
    weights = std::max(weights, pair.last.n());
    basis = std::max(basis, Dim(pair.in_degree) * pair.frequencies * Dim(pair.out_degree));
    products = std::max(products, in_.at(pair.in_degree) * pair.frequencies * Dim(pair.out_degree) +
                                      out_.at(pair.out_degree) * Dim(pair.out_degree));
  }
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t floats) { return ctx.exec.scratch->Take<float>(floats).data(); };
  const int inputs = edge_inputs_ + 1;
  std::vector<ConvTile> tiles;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    tiles.push_back({TileDense(ctx, tensor::PackedFormat::kF32, kConvTile, std::max(hidden, inputs)),
                     take(int64_t{kConvTile} * inputs), take(int64_t{kConvTile} * hidden),
                     take(int64_t{kConvTile} * hidden), take(int64_t{kConvTile} * weights), take(basis),
                     take(products)});
  }
  ctx.exec.pool->Run(base::CeilDiv(count, kConvTile), [&](int64_t task, int worker) {
    const ConvTile& tile = tiles[worker];
    const int64_t first = task * kConvTile;
    const int rows = static_cast<int>(std::min<int64_t>(kConvTile, count - first));
    for (int r = 0; r < rows; ++r) {
      const int64_t e = csc.edge.empty() ? first + r : csc.edge[first + r];
      if (edge_inputs_ > 0)
        std::copy_n(edge + e * edge_inputs_, edge_inputs_, tile.inputs + int64_t{r} * inputs);
      tile.inputs[int64_t{r} * inputs + edge_inputs_] = edges.distance(first + r);
    }
    for (const Pair& pair : pairs_) {
      const int n = pair.first.n(), c_in = in_.at(pair.in_degree), c_out = out_.at(pair.out_degree);
      const int in_dim = Dim(pair.in_degree), out_dim = Dim(pair.out_degree), k = c_in * pair.frequencies;
      tile.dense.Run(pair.first, tile.inputs, inputs, rows, tile.hidden, n);
      ActivateHidden(ctx, pair.first_norm, tile.hidden, rows, n);
      tile.dense.Run(pair.second, tile.hidden, n, rows, tile.hidden2, n);
      ActivateHidden(ctx, pair.second_norm, tile.hidden2, rows, n);
      tile.dense.Run(pair.last, tile.hidden2, n, rows, tile.weights, pair.last.n());
      const std::vector<float>& source = nodes.at(pair.in_degree);
      std::vector<float>& to = out[pair.out_degree];
      for (int r = 0; r < rows; ++r) {
        // basis [out_dim, in_dim, frequencies], then products [out_dim, c_in * frequencies] = basis x
        // features.
        const float* harmonics = edges.harmonics(first + r);
        const float* coupling = pair.coupling.data();
        int frequency = 0;
        for (int j = std::abs(pair.in_degree - pair.out_degree); j <= pair.in_degree + pair.out_degree;
             ++j, ++frequency) {
          const float* y = harmonics + SphericalHarmonics::Offset(j);
          for (int i = 0; i < in_dim; ++i) {
            for (int o = 0; o < out_dim; ++o) {
              float sum = 0;
              for (int f = 0; f < Dim(j); ++f) sum += coupling[f] * y[f];
              coupling += Dim(j);
              tile.basis[(o * in_dim + i) * pair.frequencies + frequency] = sum;
            }
          }
        }
        const float* x = source.data() + int64_t{csc.neighbor[first + r]} * c_in * in_dim;
        for (int o = 0; o < out_dim; ++o) {
          for (int c = 0; c < c_in; ++c) {
            float* product = tile.products + (o * c_in + c) * pair.frequencies;
            for (int f = 0; f < pair.frequencies; ++f) product[f] = 0;
            for (int i = 0; i < in_dim; ++i) {
              for (int f = 0; f < pair.frequencies; ++f)
                product[f] += x[c * in_dim + i] * tile.basis[(o * in_dim + i) * pair.frequencies + f];
            }
          }
        }
        // [out_dim, k] x [k, c_out], whose lanes are output channels.
        float* result = tile.products + int64_t{out_dim} * k;
        ctx.graph->rows.matmul({.a = tile.products,
                                .b = tile.weights + int64_t{r} * pair.last.n(),
                                .c = result,
                                .a_stride = k,
                                .b_stride = c_out,
                                .c_stride = c_out,
                                .m = out_dim,
                                .n = c_out,
                                .k = k});
        float* sum = to.data() + (first + r) * c_out * out_dim;
        for (int c = 0; c < c_out; ++c) {
          for (int o = 0; o < out_dim; ++o) sum[c * out_dim + o] += result[o * c_out + c];
        }
      }
    }
    for (const auto& [degree, kernel] : self_) {  // of the destination's own features
      const int64_t c_out = kernel.shape[0], c_in = kernel.shape[1], dim = Dim(degree);
      for (int r = 0; r < rows; ++r) {
        ctx.graph->rows.matmul({.a = kernel.values.data(),
                                .b = nodes.at(degree).data() + int64_t{csc.own[first + r]} * c_in * dim,
                                .c = out[degree].data() + (first + r) * c_out * dim,
                                .a_stride = c_in,
                                .b_stride = dim,
                                .c_stride = dim,
                                .m = c_out,
                                .n = dim,
                                .k = c_in,
                                .accumulate = true});
      }
    }
  });
  return out;
}

StatusOr<FiberFeatures> Se3Conv::RunNodes(const graph::Context& ctx, const Se3Graph& edges,
                                          const FiberFeatures& nodes, const float* edge) const {
  ASSIGN_OR_RETURN(const FiberFeatures messages, RunEdges(ctx, edges, nodes, edge));
  const graph::Adjacency& csc = edges.graph().by_destination();
  graph::Segments grouped;  // messages are in the order by destination
  grouped.ptr = csc.ptr;
  grouped.hubs = csc.hubs;
  FiberFeatures out;
  for (const auto& [degree, channels] : out_) {
    const int64_t width = channels * Dim(degree);
    out[degree].resize(edges.graph().num_dst() * width);
    RETURN_IF_ERROR(graph::Segment(ctx, graph::Reduce::kSum, grouped,
                                   graph::View(messages.at(degree).data(), csc.edges(), width),
                                   graph::View(out[degree].data(), edges.graph().num_dst(), width)));
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

StatusOr<FiberFeatures> Se3AttentionBlock::Run(const graph::Context& ctx, const Se3Graph& edges,
                                               const FiberFeatures& nodes, const float* edge) const {
  RETURN_IF_ERROR(CheckNodes(in_, edges.graph().num_src(), nodes));
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t count = csc.edges(), rows = edges.graph().num_dst();
  ASSIGN_OR_RETURN(const FiberFeatures fused, to_key_value_.RunEdges(ctx, edges, nodes, edge));
  const FiberFeatures query = to_query_.Run(ctx, rows, nodes);
  // A head has a block of channels of every degree.
  const int key_width = FiberWidth(key_), value_width = FiberWidth(value_);
  std::vector<float> q(rows * key_width), k(count * key_width), v(count * value_width),
      attended(rows * value_width);
  auto pack = [&](const std::vector<float>& from, int64_t n, int degree, int channels, int skip, int offset,
                  int width, std::vector<float>* to) {
    const int block = channels / heads_ * Dim(degree),
              from_width = static_cast<int>(from.size() / std::max<int64_t>(1, n));
    for (int64_t r = 0; r < n; ++r) {
      for (int h = 0; h < heads_; ++h)
        std::copy_n(from.data() + r * from_width + int64_t{skip} * Dim(degree) + h * block, block,
                    to->data() + r * width + h * (width / heads_) + offset);
    }
  };
  int key_offset = 0, value_offset = 0;
  for (const auto& [degree, channels] : value_) {
    const int block = channels / heads_ * Dim(degree);
    pack(fused.at(degree), count, degree, channels, 0, value_offset, value_width, &v);
    value_offset += block;
    if (key_.count(degree) == 0) continue;
    pack(fused.at(degree), count, degree, channels, channels, key_offset, key_width, &k);
    pack(query.at(degree), rows, degree, channels, 0, key_offset, key_width, &q);
    key_offset += block;
  }
  // Keys and values are in the order by destination: a graph with edges in that order reads them in place.
  std::vector<int32_t> sources = csc.neighbor;
  ASSIGN_OR_RETURN(const graph::Graph grouped,
                   graph::Graph::FromCsc(graph::Indices::Of(csc.ptr.data(), rows + 1),
                                         graph::Indices::Of(sources.data(), count), edges.graph().num_src()));
  RETURN_IF_ERROR(graph::EdgeAttention(ctx, grouped,
                                       {.heads = heads_,
                                        .q = graph::View(q.data(), rows, key_width),
                                        .k = graph::View(k.data(), count, key_width),
                                        .v = graph::View(v.data(), count, value_width),
                                        .bias = {},
                                        .k_target = graph::Target::kEdge,
                                        .v_target = graph::Target::kEdge,
                                        .scale = 1 / std::sqrt(static_cast<float>(key_width)),
                                        .out = graph::View(attended.data(), rows, value_width)}));
  FiberFeatures joined;
  value_offset = 0;
  for (const auto& [degree, channels] : value_) {
    const int block = channels / heads_ * Dim(degree);
    const auto own = in_.find(degree);
    const int64_t own_width = own == in_.end() ? 0 : own->second * Dim(degree),
                  width = own_width + channels * Dim(degree);
    std::vector<float>& to = joined[degree];
    to.resize(rows * width);
    for (int64_t r = 0; r < rows; ++r) {
      if (own_width > 0)
        std::copy_n(nodes.at(degree).data() + r * own_width, own_width, to.data() + r * width);
      for (int h = 0; h < heads_; ++h)
        std::copy_n(attended.data() + r * value_width + h * (value_width / heads_) + value_offset, block,
                    to.data() + r * width + own_width + h * block);
    }
    value_offset += block;
  }
  return project_.Run(ctx, rows, joined);
}

}  // namespace moesaic::science
