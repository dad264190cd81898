// The backward pass of tensor field convolutions.
#include <algorithm>

#include "base/round.h"
#include "science/se3/se3_conv_state.h"
#include "science/segment_ops.h"

namespace moesaic::science {
namespace {

// Parts of the edges with sums of their own, which are added in order: results do not depend on the number of
// threads.
constexpr int kConvParts = 16;

}  // namespace

// Gradients of parameters in the layouts of the packed weights.
struct Se3Conv::ParameterSums {
  struct OfPair {
    float *second, *second_bias, *first_norm, *second_norm, *last;  // norms: gamma, then beta
  };
  float *first, *first_bias;
  std::vector<OfPair> pairs;

  static int64_t Size(const Se3Conv& conv) {
    int64_t size = (int64_t{conv.edge_inputs_} + 2) * conv.hidden_;
    for (const Pair& pair : conv.pairs_)
      size += int64_t{pair.hidden} * (pair.hidden + 5) + static_cast<int64_t>(pair.last.size());
    return size;
  }
  ParameterSums(const Se3Conv& conv, float* at) {
    auto take = [&](int64_t count) {
      float* from = at;
      at += count;
      return from;
    };
    first = take((int64_t{conv.edge_inputs_} + 1) * conv.hidden_);
    first_bias = take(conv.hidden_);
    for (const Pair& pair : conv.pairs_) {
      const int64_t h = pair.hidden;
      float* second = take(h * h);
      float* second_bias = take(h);
      float* first_norm = take(2 * h);
      float* second_norm = take(2 * h);
      pairs.push_back(
          {second, second_bias, first_norm, second_norm, take(static_cast<int64_t>(pair.last.size()))});
    }
  }
};

// Gradients of one tile: buffers of one worker.
struct Se3Conv::BackwardRun {
  const EdgeRun& run;
  const Se3EdgeRows& grad;
  const Se3Gradients& out;
  float* offset_grad;  // [edges, 3] or null
  Tile tile;
  std::vector<float*> kernel_grads, product_grads;  // in the layouts of tile.kernels and tile.products
  float *result_grad, *transposed_basis;           // [2 out + 1, channels] and [terms, 2 out + 1] of one edge
  float *basis_grad, *harmonic_grad, *input_grad;  // [kConvTile, ..]
  float *hidden_grad, *other_grad, *transposed;    // [kConvTile, hidden_]; transposed: [hidden_, kConvTile]

  BackwardRun(const EdgeRun& edge_run, const Se3EdgeRows& rows, const Se3Gradients& to, float* offsets)
      : run(edge_run), grad(rows), out(to), offset_grad(offsets), tile(edge_run.TakeTile()) {
    const Se3Conv& conv = run.conv;
    auto take = [&](int64_t count) { return run.ctx.exec.scratch->Take<float>(count).data(); };
    int64_t result = 0, transposed_size = 0;
    for (const Pair& pair : conv.pairs_)
      kernel_grads.push_back(
          take(int64_t{Dim(pair.in_degree)} * pair.hidden * pair.frequencies * pair.c_out));
    for (const Output& output : conv.outputs_) {
      product_grads.push_back(take(int64_t{kConvTile} * output.terms * output.channels));
      result = std::max(result, int64_t{Dim(output.degree)} * output.channels);
      transposed_size = std::max(transposed_size, int64_t{Dim(output.degree)} * output.terms);
    }
    result_grad = take(result);
    transposed_basis = take(transposed_size);
    basis_grad = take(int64_t{kConvTile} * conv.basis_);
    harmonic_grad = take(int64_t{kConvTile} * conv.harmonics_);
    input_grad = take(int64_t{kConvTile} * (conv.edge_inputs_ + 1));
    hidden_grad = take(int64_t{kConvTile} * conv.hidden_);
    other_grad = take(int64_t{kConvTile} * conv.hidden_);
    transposed = take(int64_t{kConvTile} * conv.hidden_);
  }

  // Computes the gradients of the products and the basis of row r of the tile, whose edge is at a position by
  // destination.
  void EdgeGradients(int r, int64_t position) const {
    const Se3Conv& conv = run.conv;
    for (size_t i = 0; i < conv.outputs_.size(); ++i) {
      const Output& output = conv.outputs_[i];
      const int dim = Dim(output.degree), channels = output.channels, terms = output.terms;
      const std::vector<int>& offsets = grad.offsets.at(output.degree);
      for (int c = 0; c < channels; ++c) {
        for (int m = 0; m < dim; ++m)
          result_grad[m * channels + c] = grad.data[position * grad.stride + offsets[c] + m];
      }
      const int64_t at = int64_t{r} * conv.basis_ + output.basis_offset,
                    product = int64_t{r} * terms * channels;
      run.ctx.graph->rows.transpose(tile.basis + at, terms, dim, terms, transposed_basis, dim);
      run.ctx.graph->rows.matmul({transposed_basis, result_grad, product_grads[i] + product, dim, channels,
                                  channels, terms, channels, dim});
      if (offset_grad != nullptr) {
        run.ctx.graph->rows.matmul({result_grad, tile.products[i] + product, basis_grad + at, channels,
                                    channels, terms, dim, terms, channels, false, true});
      }
    }
  }

  // Computes the gradients of the hidden values of rows [first, first + rows), and adds those of the kernels
  // of their source.
  void RunGradients(int64_t p, int first, int rows) const {
    const Se3Conv& conv = run.conv;
    for (int r = first; r < first + rows; ++r) EdgeGradients(r, run.PositionOf(p + r));
    const int hidden = conv.hidden_;
    run.ctx.graph->rows.transpose(tile.second + int64_t{first} * hidden, hidden, rows, hidden, transposed,
                                  kConvTile);
    std::fill_n(hidden_grad + int64_t{first} * hidden, int64_t{rows} * hidden, 0.0F);
    run.ForComponents(
        tile.kernels, product_grads,
        [&](const Pair& pair, const float* kernel, const float* product, int64_t stride, int columns) {
          run.ctx.graph->rows.matmul({product + first * stride, kernel,
                                      hidden_grad + int64_t{first} * hidden + pair.hidden_offset, stride,
                                      columns, hidden, rows, pair.hidden, columns, true, true});
        });
    run.ForComponents(
        kernel_grads, product_grads,
        [&](const Pair& pair, float* kernel, const float* product, int64_t stride, int columns) {
          run.ctx.graph->rows.matmul({transposed + int64_t{pair.hidden_offset} * kConvTile,
                                      product + first * stride, kernel, kConvTile, stride, columns,
                                      pair.hidden, columns, rows, true});
        });
  }

  void ClearKernels() const {
    for (size_t i = 0; i < kernel_grads.size(); ++i) {
      const Pair& pair = run.conv.pairs_[i];
      std::fill_n(kernel_grads[i], int64_t{Dim(pair.in_degree)} * pair.hidden * pair.frequencies * pair.c_out,
                  0.0F);
    }
  }

  // Adds the gradients of a source's features and of the last layers, given those of its kernels.
  void SourceGradients(int64_t source, const ParameterSums& sums) const {
    for (size_t i = 0; i < kernel_grads.size(); ++i) {
      const Pair& pair = run.conv.pairs_[i];
      const int dim = Dim(pair.in_degree);
      const int64_t columns = int64_t{pair.hidden} * pair.frequencies * pair.c_out,
                    at = source * pair.c_in * dim;
      run.ctx.graph->rows.matmul({run.nodes.at(pair.in_degree).data() + at, kernel_grads[i],
                                  sums.pairs[i].last, dim, columns, columns, pair.c_in, columns, dim, true});
      float* x_grad = out.Of(pair.in_degree);
      if (x_grad == nullptr) continue;
      run.ctx.graph->rows.matmul({kernel_grads[i], pair.last.data(), tile.channels, columns, columns,
                                  pair.c_in, dim, pair.c_in, columns, false, true});
      for (int c = 0; c < pair.c_in; ++c) {
        for (int m = 0; m < dim; ++m) x_grad[at + c * dim + m] += tile.channels[m * pair.c_in + c];
      }
    }
  }

  // Writes the gradient of `before`, the result of a linear layer, for y_grad: that of
  // after = relu(norm(before)). Adds the gradients of the norm.
  void ThroughActivation(bool second, int rows, const float* before, const float* after, float* y_grad,
                         float* to, const ParameterSums& sums) const {
    const int hidden = run.conv.hidden_;
    for (int64_t i = 0; i < int64_t{rows} * hidden; ++i) y_grad[i] = after[i] > 0 ? y_grad[i] : 0;
    std::fill_n(to, int64_t{rows} * hidden, 0.0F);
    for (size_t i = 0; i < run.conv.pairs_.size(); ++i) {
      const Pair& pair = run.conv.pairs_[i];
      const Norm& norm = second ? pair.second_norm : pair.first_norm;
      float* norm_grad = second ? sums.pairs[i].second_norm : sums.pairs[i].first_norm;
      for (int r = 0; r < rows; ++r) {
        const int64_t at = int64_t{r} * hidden + pair.hidden_offset;
        if (norm.gamma.empty()) {
          std::copy_n(y_grad + at, pair.hidden, to + at);
        } else {
          run.ctx.graph->rows.layer_norm_gradient(before + at, norm.gamma.data(), y_grad + at, pair.hidden,
                                                  norm.eps, to + at, norm_grad, norm_grad + pair.hidden);
        }
      }
    }
  }

  // Adds the gradients of the radial perceptrons for edges [p, p + rows) by source, and those of their inputs
  // and offsets.
  void RadialGradients(int64_t p, int rows, const ParameterSums& sums) const {
    const Se3Conv& conv = run.conv;
    const graph::Context& ctx = run.ctx;
    const int hidden = conv.hidden_, inputs = conv.edge_inputs_ + 1;
    ThroughActivation(true, rows, tile.before_second, tile.second, hidden_grad, other_grad, sums);
    ctx.graph->rows.transpose(tile.first, hidden, rows, hidden, transposed, kConvTile);
    for (size_t i = 0; i < conv.pairs_.size(); ++i) {
      const Pair& pair = conv.pairs_[i];
      const float* from = other_grad + pair.hidden_offset;
      ctx.graph->rows.matmul({transposed + int64_t{pair.hidden_offset} * kConvTile, from,
                              sums.pairs[i].second, kConvTile, hidden, pair.hidden, pair.hidden, pair.hidden,
                              rows, true});
      for (int r = 0; r < rows; ++r)
        ctx.exec.kernels->axpy(1, from + int64_t{r} * hidden, pair.hidden, sums.pairs[i].second_bias);
      ctx.graph->rows.matmul({from, pair.second.data(), hidden_grad + pair.hidden_offset, hidden, pair.hidden,
                              hidden, rows, pair.hidden, pair.hidden, false, true});
    }
    ThroughActivation(false, rows, tile.before_first, tile.first, hidden_grad, other_grad, sums);
    for (int r = 0; r < rows; ++r) {
      const float* row = other_grad + int64_t{r} * hidden;
      ctx.exec.kernels->axpy(1, row, hidden, sums.first_bias);
      for (int k = 0; k < inputs; ++k)
        ctx.exec.kernels->axpy(tile.inputs[int64_t{r} * inputs + k], row, hidden,
                               sums.first + int64_t{k} * hidden);
    }
    if (out.edge == nullptr && offset_grad == nullptr) return;
    ctx.graph->rows.matmul({other_grad, conv.first_.data(), input_grad, hidden, hidden, inputs, rows, inputs,
                            hidden, false, true});
    for (int r = 0; r < rows && out.edge != nullptr; ++r) {
      float* to = out.edge + run.EdgeAt(run.PositionOf(p + r)) * conv.edge_inputs_;
      for (int k = 0; k < conv.edge_inputs_; ++k) to[k] += input_grad[int64_t{r} * inputs + k];
    }
    if (offset_grad == nullptr) return;
    ctx.graph->rows.matmul({basis_grad, conv.coupling_.data(), harmonic_grad, conv.basis_, conv.basis_,
                            conv.harmonics_, rows, conv.harmonics_, conv.basis_, false, true});
    OffsetGradients(p, rows);
  }

  void OffsetGradients(int64_t p, int rows) const {
    const Se3Conv& conv = run.conv;
    for (int r = 0; r < rows; ++r) {
      const int64_t position = run.PositionOf(p + r);
      const float *offset = run.edges.offsets_.data() + 3 * position, distance = run.edges.distance(position);
      float* to = offset_grad + 3 * position;
      std::fill_n(to, 3, 0.0F);
      conv.used_harmonics_.AddGradient(offset, harmonic_grad + int64_t{r} * conv.harmonics_, to);
      const float along = input_grad[int64_t{r} * (conv.edge_inputs_ + 1) + conv.edge_inputs_];
      for (int axis = 0; axis < 3 && distance > 0; ++axis) to[axis] += along * offset[axis] / distance;
    }
  }

  // Computes the gradients of all edges of a range of sources.
  void Run(const graph::SegmentRange& range, const ParameterSums& sums) const {
    int64_t current = -1;
    const std::vector<int32_t>& ptr = run.edges.by_source().ptr;
    int64_t p_of_tile = ptr[range.first];
    run.ForTiles(
        range, tile,
        [&](int32_t source, int first, int rows) {
          if (source != current) {
            if (current >= 0) SourceGradients(current, sums);
            ClearKernels();
            current = source;
          }
          RunGradients(p_of_tile, first, rows);
        },
        [&](int64_t p, int rows) {
          RadialGradients(p, rows, sums);
          p_of_tile = p + rows;
        });
    if (current >= 0) SourceGradients(current, sums);
  }
};

namespace {

// Adds from [k, n] to a weight [n, k].
void AddTransposed(const float* from, int64_t from_stride, int64_t k, int64_t n, float* to) {
  for (int64_t j = 0; j < n && to != nullptr; ++j) {
    for (int64_t i = 0; i < k; ++i) to[j * k + i] += from[i * from_stride + j];
  }
}

}  // namespace

Status Se3Conv::AddParameters(const graph::Context& ctx, const ParameterSums& sums,
                              const GradientScope& parameters) const {
  for (size_t i = 0; i < pairs_.size(); ++i) {
    const Pair& pair = pairs_[i];
    const ParameterSums::OfPair& own = sums.pairs[i];
    const GradientScope net = parameters.Under(fmt::format("conv.{},{}", pair.in_degree, pair.out_degree))
                                  .Under("radial_func")
                                  .Under("net");
    const bool norms = !pair.first_norm.gamma.empty();
    const int64_t h = pair.hidden, inputs = edge_inputs_ + 1;
    const std::string second = norms ? "3" : "2";
    struct {
      std::string name;
      int64_t size;
      const float* from;
    } const vectors[] = {
        {"0.bias", h, sums.first_bias + pair.hidden_offset}, {second + ".bias", h, own.second_bias},
        {"1.weight", norms ? h : 0, own.first_norm},         {"1.bias", norms ? h : 0, own.first_norm + h},
        {"4.weight", norms ? h : 0, own.second_norm},        {"4.bias", norms ? h : 0, own.second_norm + h}};
    for (const auto& vector : vectors) {
      if (vector.size == 0) continue;
      ASSIGN_OR_RETURN(float* to, net.Get(vector.name, vector.size));
      AddTo(ctx, vector.from, vector.size, to);
    }
    ASSIGN_OR_RETURN(float* first, net.Get("0.weight", h * inputs));
    AddTransposed(sums.first + pair.hidden_offset, hidden_, inputs, h, first);
    ASSIGN_OR_RETURN(float* second_weight, net.Get(second + ".weight", h * h));
    AddTransposed(own.second, h, h, h, second_weight);
    ASSIGN_OR_RETURN(float* last,
                     net.Get(norms ? "6.weight" : "4.weight", static_cast<int64_t>(pair.last.size())));
    // [c_in][hidden][frequencies][c_out] to [c_out][c_in][frequencies][hidden]
    for (int64_t o = 0; o < pair.c_out && last != nullptr; ++o) {
      for (int64_t c = 0; c < pair.c_in; ++c) {
        for (int64_t f = 0; f < pair.frequencies; ++f) {
          float* row = last + ((o * pair.c_in + c) * pair.frequencies + f) * h;
          for (int64_t k = 0; k < h; ++k)
            row[k] += own.last[((c * h + k) * pair.frequencies + f) * pair.c_out + o];
        }
      }
    }
  }
  return OkStatus();
}

// Adds the gradients of to_kernel_self. It adds the same features to all edges of a destination, so that the
// gradients of these are summed first.
Status Se3Conv::SelfBackward(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                             const Se3EdgeRows& grad, const Se3Gradients& out,
                             const GradientScope& parameters) const {
  if (self_.empty()) return OkStatus();
  graph::ScratchScope scope(ctx);
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t rows = edges.graph().num_dst();
  const graph::Features messages = {grad.data, tensor::DType::kF32, csc.edges(), grad.stride, grad.stride};
  const graph::Output sums = scope.Matrix(tensor::DType::kF32, rows, grad.stride);
  graph::Segments grouped;  // rows are in the order by destination
  grouped.ptr = csc.ptr;
  grouped.hubs = csc.hubs;
  RETURN_IF_ERROR(graph::Segment(ctx, graph::Reduce::kSum, grouped, messages, sums));
  for (const auto& [degree, kernel] : self_) {
    const int64_t dim = Dim(degree), channels = kernel.shape[0];
    const std::vector<int>& offsets = grad.offsets.at(degree);
    std::vector<float> y_grad(rows * channels * dim);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = static_cast<const float*>(sums.data) + r * sums.stride;
      for (int64_t c = 0; c < channels; ++c)
        std::copy_n(from + offsets[c], dim, y_grad.data() + (r * channels + c) * dim);
    }
    ASSIGN_OR_RETURN(float* kernel_grad, parameters.Get(fmt::format("to_kernel_self.{}", degree),
                                                        static_cast<int64_t>(kernel.values.size())));
    MultiplyChannelsBackward(ctx, kernel, rows, static_cast<int>(dim), nodes.at(degree).data(), y_grad.data(),
                             out.Of(degree), kernel_grad);
  }
  return OkStatus();
}

Status Se3Conv::Backward(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                         const float* edge, const Se3EdgeRows& grad, const Se3Gradients& out,
                         const GradientScope& parameters) const {
  RETURN_IF_ERROR(CheckInputs(edges, nodes, edge));
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const EdgeRun run = {*this, ctx, edges, nodes, edge};
  const int64_t count = edges.graph().num_edges(), size = ParameterSums::Size(*this);
  float* offset_grad = out.xyz == nullptr ? nullptr : take(3 * count);
  float* sums = take(kConvParts * size);
  std::fill_n(sums, kConvParts * size, 0.0F);
  std::vector<BackwardRun> workers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) workers.emplace_back(run, grad, out, offset_grad);
  // Parts have about as many edges and whole sources.
  const std::vector<int32_t>& ptr = edges.by_source().ptr;
  auto boundary = [&](int64_t part) {
    return static_cast<int32_t>(std::lower_bound(ptr.begin(), ptr.end(), part * count / kConvParts) -
                                ptr.begin());
  };
  ctx.exec.pool->Run(kConvParts, [&](int64_t part, int worker) {
    const graph::SegmentRange range = {
        boundary(part), part + 1 == kConvParts ? edges.by_source().count() : boundary(part + 1)};
    if (range.first < range.last) workers[worker].Run(range, ParameterSums(*this, sums + part * size));
  });
  for (int part = 1; part < kConvParts; ++part) AddTo(ctx, sums + part * size, size, sums);
  RETURN_IF_ERROR(AddParameters(ctx, ParameterSums(*this, sums), parameters));
  if (out.xyz != nullptr) edges.AddPositionGradients(offset_grad, out.xyz);
  return SelfBackward(ctx, edges, nodes, grad, out, parameters);
}

Status Se3Conv::BackwardNodes(const graph::Context& ctx, const Se3Graph& edges, const FiberFeatures& nodes,
                              const float* edge, const FiberFeatures& out_grad, const Se3Gradients& out,
                              const GradientMap& parameters) const {
  RETURN_IF_ERROR(CheckNodeFeatures(out_, edges.graph().num_dst(), out_grad));
  graph::ScratchScope scope(ctx);
  const graph::Adjacency& csc = edges.graph().by_destination();
  const Se3EdgeRows rows = RowsIn(scope.Matrix(tensor::DType::kF32, csc.edges(), FiberWidth(out_)));
  const graph::EdgeVector& own = csc.own();
  // A sum has the same gradient by each of its edges.
  ForRows(ctx, csc.edges(), kConvTile, [&](int64_t first, int64_t last) {
    for (const auto& [degree, channels] : out_) {
      const int64_t width = int64_t{channels} * Dim(degree);
      float* to = rows.data + rows.offsets.at(degree)[0];
      for (int64_t p = first; p < last; ++p)
        std::copy_n(out_grad.at(degree).data() + own[p] * width, width, to + p * rows.stride);
    }
  });
  return Backward(ctx, edges, nodes, edge, rows, out, GradientScope(parameters));
}

}  // namespace moesaic::science
