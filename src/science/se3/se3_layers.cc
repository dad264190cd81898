#include "science/se3/se3_layers.h"

#include <algorithm>
#include <cmath>

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
  out.offsets_.resize(3 * int64_t{csc.edges()});
  out.source_minus_destination_ = source_minus_destination;
  for (int32_t p = 0; p < csc.edges(); ++p) {
    float* d = out.offsets_.data() + 3 * int64_t{p};
    for (int axis = 0; axis < 3; ++axis) {
      d[axis] = xyz[3 * int64_t{csc.neighbor[p]} + axis] - xyz[3 * int64_t{csc.own()[p]} + axis];
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

void Se3Graph::AddPositionGradients(const float* offset_grad, float* xyz_grad) const {
  const graph::Adjacency& csc = graph_.by_destination();
  for (int64_t p = 0; p < csc.edges(); ++p) {
    for (int axis = 0; axis < 3; ++axis) {
      const float g = source_minus_destination_ ? offset_grad[3 * p + axis] : -offset_grad[3 * p + axis];
      xyz_grad[3 * int64_t{csc.neighbor[p]} + axis] += g;
      xyz_grad[3 * int64_t{csc.own()[p]} + axis] -= g;
    }
  }
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

void MultiplyChannelsBackward(const graph::Context& ctx, const WeightTensor& weight, int64_t rows, int dim,
                              const float* x, const float* y_grad, float* x_grad, float* weight_grad) {
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int n = static_cast<int>(weight.shape[0]), k = static_cast<int>(weight.shape[1]);
  // Components are rows, as in the forward pass.
  float *from = take(rows * dim * k), *grad = take(rows * dim * n);
  ForRows(ctx, rows, 64, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      ctx.graph->rows.transpose(x + r * k * dim, dim, k, dim, from + r * dim * k, k);
      ctx.graph->rows.transpose(y_grad + r * n * dim, dim, n, dim, grad + r * dim * n, n);
    }
  });
  AddWeightGradients(ctx, grad, n, n, from, k, k, rows * dim, {weight_grad, nullptr});
  if (x_grad == nullptr) return;
  ForRows(ctx, rows, 64, [&](int64_t first, int64_t last) {
    ctx.graph->rows.matmul({.a = grad + first * dim * n,
                            .b = weight.values.data(),
                            .c = from + first * dim * k,
                            .a_stride = n,
                            .b_stride = k,
                            .c_stride = k,
                            .m = (last - first) * dim,
                            .n = k,
                            .k = n});
    for (int64_t r = first; r < last; ++r) {
      for (int c = 0; c < k; ++c) {
        for (int m = 0; m < dim; ++m) x_grad[(r * k + c) * dim + m] += from[(r * dim + m) * k + c];
      }
    }
  });
}

Status Se3Linear::Backward(const graph::Context& ctx, int64_t rows, const FiberFeatures& x,
                           const FiberFeatures& y_grad, const std::map<int, float*>& x_grad,
                           const GradientScope& parameters) const {
  for (const auto& [degree, weight] : weights_) {
    ASSIGN_OR_RETURN(float* weight_grad, parameters.Get(fmt::format("weights.{}", degree),
                                                        static_cast<int64_t>(weight.values.size())));
    const auto to = x_grad.find(degree);
    MultiplyChannelsBackward(ctx, weight, rows, Dim(degree), x.at(degree).data(), y_grad.at(degree).data(),
                             to == x_grad.end() ? nullptr : to->second, weight_grad);
  }
  return OkStatus();
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

}  // namespace moesaic::science
