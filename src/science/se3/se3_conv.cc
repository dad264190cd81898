// Tensor field convolution.
#include <algorithm>
#include <cmath>

#include "science/run_tasks.h"
#include "science/se3/se3_conv_state.h"
#include "science/segment_ops.h"

namespace moesaic::science {
namespace {

// The weight [n, k] of a linear layer as [k, n].
std::vector<float> Transposed(const WeightTensor& weight) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  std::vector<float> out(weight.values.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) out[j * n + i] = weight.values[i * k + j];
  }
  return out;
}

StatusOr<std::vector<float>> BiasOf(const WeightScope& weights, const std::string& name, int64_t n) {
  if (!weights.Has(name)) return std::vector<float>(n, 0);
  return weights.Vector(name, n);
}

// y [rows, n] = x [rows, k] weight [k, n] + bias.
void Linear(const graph::Context& ctx, const float* x, int64_t x_stride, int rows, int64_t k, int64_t n,
            const float* weight, int64_t weight_stride, const float* bias, float* y, int64_t y_stride) {
  for (int r = 0; r < rows; ++r) std::copy_n(bias, n, y + r * y_stride);
  ctx.graph->rows.matmul({.a = x,
                          .b = weight,
                          .c = y,
                          .a_stride = x_stride,
                          .b_stride = weight_stride,
                          .c_stride = y_stride,
                          .m = rows,
                          .n = n,
                          .k = k,
                          .accumulate = true});
}

}  // namespace

StatusOr<Se3Conv> Se3Conv::Load(const WeightScope& weights, const Fiber& in, const Fiber& out,
                                int edge_inputs) {
  RETURN_IF_ERROR(CheckFiber(in, "the input"));
  RETURN_IF_ERROR(CheckFiber(out, "the output"));
  if (edge_inputs < 0) return InvalidArgument("edge_inputs must be 0 or more, but is {}", edge_inputs);
  Se3Conv layer;
  layer.in_ = in;
  layer.out_ = out;
  layer.edge_inputs_ = edge_inputs;
  std::vector<const WeightTensor*> first;
  for (const auto& [d_out, c_out] : out) {
    Output output = {d_out, c_out};
    output.basis_offset = layer.basis_;
    for (const auto& [d_in, c_in] : in) {
      Pair pair = {d_in, d_out, Dim(std::min(d_in, d_out)), 0, c_in, c_out};
      const WeightScope net =
          weights.Under(fmt::format("conv.{},{}", d_in, d_out)).Under("radial_func").Under("net");
      const bool norms = net.Has("6.weight");
      ASSIGN_OR_RETURN(const WeightTensor* first_weight, net.Get("0.weight", {-1, edge_inputs + 1}));
      pair.hidden = static_cast<int>(first_weight->shape[0]);
      first.push_back(first_weight);
      ASSIGN_OR_RETURN(const std::vector<float> first_bias, BiasOf(net, "0.bias", pair.hidden));
      layer.first_bias_.insert(layer.first_bias_.end(), first_bias.begin(), first_bias.end());
      const std::string second = norms ? "3" : "2";
      ASSIGN_OR_RETURN(const WeightTensor* second_weight,
                       net.Get(second + ".weight", {pair.hidden, pair.hidden}));
      pair.second = Transposed(*second_weight);
      ASSIGN_OR_RETURN(pair.second_bias, BiasOf(net, second + ".bias", pair.hidden));
      if (norms) {
        ASSIGN_OR_RETURN(pair.first_norm, net.LayerNorm("1", pair.hidden));
        ASSIGN_OR_RETURN(pair.second_norm, net.LayerNorm("4", pair.hidden));
      }
      const int64_t products = int64_t{c_in} * pair.frequencies;
      ASSIGN_OR_RETURN(const WeightTensor* last,
                       net.Get(norms ? "6.weight" : "4.weight", {c_out * products, pair.hidden}));
      pair.last.resize(last->values.size());
      for (int64_t o = 0; o < c_out; ++o) {
        for (int64_t c = 0; c < c_in; ++c) {
          for (int64_t f = 0; f < pair.frequencies; ++f) {
            const float* row = last->values.data() + (o * products + c * pair.frequencies + f) * pair.hidden;
            for (int64_t k = 0; k < pair.hidden; ++k)
              pair.last[((c * pair.hidden + k) * pair.frequencies + f) * c_out + o] = row[k];
          }
        }
      }
      pair.hidden_offset = layer.hidden_;
      layer.hidden_ += pair.hidden;
      pair.term_offset = output.terms;
      output.terms += Dim(d_in) * pair.frequencies;
      layer.harmonics_ = std::max(layer.harmonics_, SphericalHarmonics::Offset(d_in + d_out + 1));
      layer.pairs_.push_back(std::move(pair));
    }
    layer.basis_ += Dim(d_out) * output.terms;
    layer.outputs_.push_back(output);
    const std::string self = fmt::format("to_kernel_self.{}", d_out);
    if (weights.Has(self)) {
      const auto from = in.find(d_out);
      if (from == in.end()) return InvalidArgument("\"{}\" needs an input of degree {}", self, d_out);
      ASSIGN_OR_RETURN(const WeightTensor* kernel, weights.Get(self, {c_out, from->second}));
      layer.self_[d_out] = *kernel;
    }
  }
  if (!in.empty() && !out.empty())
    layer.used_harmonics_ = SphericalHarmonics(in.rbegin()->first + out.rbegin()->first);
  layer.first_.resize(int64_t{edge_inputs + 1} * layer.hidden_);
  layer.coupling_.resize(int64_t{layer.harmonics_} * layer.basis_);
  for (size_t i = 0; i < layer.pairs_.size(); ++i) {
    const Pair& pair = layer.pairs_[i];
    for (int h = 0; h < pair.hidden; ++h) {
      for (int k = 0; k <= edge_inputs; ++k) {
        layer.first_[int64_t{k} * layer.hidden_ + pair.hidden_offset + h] =
            first[i]->values[int64_t{h} * (edge_inputs + 1) + k];
      }
    }
    const Output& output = layer.outputs_[i / in.size()];
    const int in_dim = Dim(pair.in_degree), out_dim = Dim(pair.out_degree),
              low = std::abs(pair.in_degree - pair.out_degree);
    for (int frequency = 0; frequency < pair.frequencies; ++frequency) {
      const int j = low + frequency;
      const std::vector<double> w = Wigner3j(j, pair.in_degree, pair.out_degree);
      for (int y = 0; y < Dim(j); ++y) {
        float* row = layer.coupling_.data() + int64_t{SphericalHarmonics::Offset(j) + y} * layer.basis_;
        for (int m = 0; m < in_dim; ++m) {
          for (int o = 0; o < out_dim; ++o) {
            const int term = pair.term_offset + m * pair.frequencies + frequency;
            row[output.basis_offset + o * output.terms + term] =
                static_cast<float>(w[(y * in_dim + m) * out_dim + o]);
          }
        }
      }
    }
  }
  return layer;
}

Se3Conv::Tile Se3Conv::EdgeRun::TakeTile() const {
  auto take = [&](int64_t floats) { return ctx.exec.scratch->Take<float>(floats).data(); };
  const int64_t hidden = int64_t{kConvTile} * conv.hidden_;
  Tile tile = {.inputs = take(int64_t{kConvTile} * (conv.edge_inputs_ + 1)),
               .harmonics = take(int64_t{kConvTile} * conv.harmonics_),
               .basis = take(int64_t{kConvTile} * conv.basis_),
               .before_first = take(hidden),
               .first = take(hidden),
               .before_second = take(hidden),
               .second = take(hidden),
               .kernels = {},
               .channels = nullptr,
               .products = {},
               .result = nullptr};
  int64_t channels = 0, result = 0;
  for (const Pair& pair : conv.pairs_) {
    const int64_t dim = Dim(pair.in_degree);
    tile.kernels.push_back(take(dim * pair.hidden * pair.frequencies * pair.c_out));
    channels = std::max(channels, dim * pair.c_in);
  }
  for (const Output& output : conv.outputs_) {
    tile.products.push_back(take(int64_t{kConvTile} * output.terms * output.channels));
    result = std::max(result, int64_t{Dim(output.degree)} * output.channels);
  }
  tile.channels = take(channels);
  tile.result = take(result);
  return tile;
}

// y = relu(x), or relu(norm(x)), for all pairs.
void Se3Conv::ActivateHidden(const graph::Context& ctx, bool second, int rows, const float* x,
                             float* y) const {
  for (const Pair& pair : pairs_) {
    const Norm& norm = second ? pair.second_norm : pair.first_norm;
    for (int r = 0; r < rows; ++r) {
      const int64_t at = int64_t{r} * hidden_ + pair.hidden_offset;
      if (norm.gamma.empty()) {
        std::copy_n(x + at, pair.hidden, y + at);
      } else {
        ctx.graph->rows.layer_norm(x + at, norm.gamma.data(), norm.beta.data(), pair.hidden, norm.eps,
                                   y + at);
      }
    }
  }
  const float* row = y;
  ctx.graph->rows.activate(&row, 1, nullptr, 0, rows * hidden_, graph::Activation::kRelu, y);
}

void Se3Conv::EdgeRun::Radial(int64_t p, int rows, const Tile& tile) const {
  const int inputs = conv.edge_inputs_ + 1;
  for (int r = 0; r < rows; ++r) {
    const int64_t position = PositionOf(p + r);
    float* row = tile.inputs + int64_t{r} * inputs;
    if (conv.edge_inputs_ > 0)
      std::copy_n(edge + EdgeAt(position) * conv.edge_inputs_, conv.edge_inputs_, row);
    row[conv.edge_inputs_] = edges.distance(position);
    std::copy_n(edges.harmonics(position), conv.harmonics_, tile.harmonics + int64_t{r} * conv.harmonics_);
  }
  ctx.graph->rows.matmul({.a = tile.harmonics,
                          .b = conv.coupling_.data(),
                          .c = tile.basis,
                          .a_stride = conv.harmonics_,
                          .b_stride = conv.basis_,
                          .c_stride = conv.basis_,
                          .m = rows,
                          .n = conv.basis_,
                          .k = conv.harmonics_});
  const int hidden = conv.hidden_;
  Linear(ctx, tile.inputs, inputs, rows, inputs, hidden, conv.first_.data(), hidden, conv.first_bias_.data(),
         tile.before_first, hidden);
  conv.ActivateHidden(ctx, false, rows, tile.before_first, tile.first);
  for (const Pair& pair : conv.pairs_) {
    Linear(ctx, tile.first + pair.hidden_offset, hidden, rows, pair.hidden, pair.hidden, pair.second.data(),
           pair.hidden, pair.second_bias.data(), tile.before_second + pair.hidden_offset, hidden);
  }
  conv.ActivateHidden(ctx, true, rows, tile.before_second, tile.second);
}

void Se3Conv::EdgeRun::SourceKernels(int64_t source, const Tile& tile) const {
  for (size_t i = 0; i < conv.pairs_.size(); ++i) {
    const Pair& pair = conv.pairs_[i];
    const int dim = Dim(pair.in_degree);
    const int64_t columns = int64_t{pair.hidden} * pair.frequencies * pair.c_out;
    const float* x = nodes.at(pair.in_degree).data() + source * pair.c_in * dim;
    ctx.graph->rows.transpose(x, dim, pair.c_in, dim, tile.channels, pair.c_in);
    ctx.graph->rows.matmul({.a = tile.channels,
                            .b = pair.last.data(),
                            .c = tile.kernels[i],
                            .a_stride = pair.c_in,
                            .b_stride = columns,
                            .c_stride = columns,
                            .m = dim,
                            .n = columns,
                            .k = pair.c_in});
  }
}

void Se3Conv::EdgeRun::Products(int first, int rows, const Tile& tile) const {
  ForComponents(
      tile.kernels, tile.products,
      [&](const Pair& pair, const float* kernel, float* product, int64_t stride, int columns) {
        ctx.graph->rows.matmul({.a = tile.second + int64_t{first} * conv.hidden_ + pair.hidden_offset,
                                .b = kernel,
                                .c = product + first * stride,
                                .a_stride = conv.hidden_,
                                .b_stride = columns,
                                .c_stride = stride,
                                .m = rows,
                                .n = columns,
                                .k = pair.hidden});
      });
}

Status Se3Conv::CheckInputs(const Se3Graph& edges, const FiberFeatures& nodes, const float* edge) const {
  RETURN_IF_ERROR(CheckNodeFeatures(in_, edges.graph().num_src(), nodes));
  for (const Fiber* fiber : {&out_, &in_}) {
    for (const auto& [degree, channels] : *fiber) {
      if (degree > edges.max_degree())
        return InvalidArgument("the graph has harmonics for degree {}, not {}", edges.max_degree(), degree);
    }
  }
  if (edge_inputs_ > 0 && edge == nullptr && edges.graph().num_edges() > 0)
    return InvalidArgument("edge features are missing");
  return OkStatus();
}

FiberFeatures Se3Conv::SelfFeatures(const graph::Context& ctx, int64_t rows,
                                    const FiberFeatures& nodes) const {
  FiberFeatures out;
  for (const auto& [degree, kernel] : self_)
    out[degree] = MultiplyChannels(ctx, kernel, rows, Dim(degree), nodes.at(degree));
  return out;
}

Status Se3Conv::RunEdges(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                         const float* edge, const Se3EdgeRows& out) const {
  RETURN_IF_ERROR(CheckInputs(edges, nodes, edge));
  const graph::ScratchScope scope(ctx);
  const FiberFeatures self = SelfFeatures(ctx, edges.graph().num_dst(), nodes);
  const EdgeRun run = {*this, ctx, edges, nodes, edge};
  std::vector<Tile> tiles;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) tiles.push_back(run.TakeTile());
  const graph::EdgeVector& own = edges.graph().by_destination().own();
  const graph::Segments& sources = edges.by_source();
  std::vector<graph::SegmentRange> ranges = graph::DivideByEdges(sources, ctx.exec.pool->size());
  for (const int32_t hub : sources.hubs) ranges.push_back({hub, hub + 1});
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t task, int worker) {
    const Tile& tile = tiles[worker];
    run.ForTiles(
        ranges[task], tile, [](int32_t, int, int) {},
        [&](int64_t p, int rows) {
          for (int r = 0; r < rows; ++r) {
            const int64_t position = run.PositionOf(p + r);
            for (size_t i = 0; i < outputs_.size(); ++i) {
              const Output& output = outputs_[i];
              const int dim = Dim(output.degree);
              ctx.graph->rows.matmul({.a = tile.basis + int64_t{r} * basis_ + output.basis_offset,
                                      .b = tile.products[i] + int64_t{r} * output.terms * output.channels,
                                      .c = tile.result,
                                      .a_stride = output.terms,
                                      .b_stride = output.channels,
                                      .c_stride = output.channels,
                                      .m = dim,
                                      .n = output.channels,
                                      .k = output.terms});
              const std::vector<int>& offsets = out.offsets.at(output.degree);
              const auto added = self.find(output.degree);
              const float* of_node =
                  added == self.end() ? nullptr
                                      : added->second.data() + int64_t{own[position]} * output.channels * dim;
              for (int c = 0; c < output.channels; ++c) {
                float* to = out.data + position * out.stride + offsets[c];
                for (int m = 0; m < dim; ++m)
                  to[m] =
                      tile.result[m * output.channels + c] + (of_node == nullptr ? 0 : of_node[c * dim + m]);
              }
            }
          }
        });
  });
  return OkStatus();
}

Se3EdgeRows Se3Conv::RowsIn(const graph::Output& matrix) const {
  Se3EdgeRows rows = {static_cast<float*>(matrix.data), matrix.stride, {}};
  int column = 0;
  for (const auto& [degree, channels] : out_) {
    for (int c = 0; c < channels; ++c, column += Dim(degree)) rows.offsets[degree].push_back(column);
  }
  return rows;
}

StatusOr<FiberFeatures> Se3Conv::RunNodes(const graph::Context& ctx, const Se3Graph& edges,
                                          const FiberFeatures& nodes, const float* edge) const {
  graph::ScratchScope scope(ctx);
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t rows = edges.graph().num_dst();
  const graph::Output messages = scope.Matrix(tensor::DType::kF32, csc.edges(), FiberWidth(out_)),
                      sums = scope.Matrix(tensor::DType::kF32, rows, FiberWidth(out_));
  Se3EdgeRows to = RowsIn(messages);
  RETURN_IF_ERROR(RunEdges(ctx, edges, nodes, edge, to));
  graph::Segments grouped;  // messages are in the order by destination
  grouped.ptr = csc.ptr;
  grouped.hubs = csc.hubs;
  RETURN_IF_ERROR(graph::Segment(ctx, graph::Reduce::kSum, grouped, messages, sums));
  FiberFeatures out;
  for (const auto& [degree, channels] : out_) {
    const int64_t width = channels * Dim(degree);
    std::vector<float>& values = out[degree];
    values.resize(rows * width);
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(static_cast<const float*>(sums.data) + r * sums.stride + to.offsets[degree][0], width,
                  values.data() + r * width);
  }
  return out;
}

}  // namespace moesaic::science
