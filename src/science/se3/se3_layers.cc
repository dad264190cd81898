#include "science/se3/se3_layers.h"

#include <algorithm>
#include <cmath>

#include "science/run_tasks.h"
#include "science/se3/se3_conv_state.h"

namespace moesaic::science {
namespace {

constexpr float kSmallestLength = 0x1p-24F;  // the program's clamp

// Writes the lengths of the vectors [channels, dim] of a row, and their LayerNorm.
void NormalizeLengths(const graph::Context& ctx, const Norm& norm, const float* x, int dim, float* lengths,
                      float* normalized) {
  const int channels = static_cast<int>(norm.gamma.size());
  for (int c = 0; c < channels; ++c) {
    float squares = 0;
    for (int m = 0; m < dim; ++m) squares += x[c * dim + m] * x[c * dim + m];
    lengths[c] = std::max(std::sqrt(squares), kSmallestLength);
  }
  ctx.graph->rows.layer_norm(lengths, norm.gamma.data(), norm.beta.data(), channels, norm.eps, normalized);
}

}  // namespace

Status CheckFiber(const Fiber& fiber, const char* name) {
  for (const auto& [degree, channels] : fiber) {
    if (degree < 0 || degree > kMaxDegree || channels < 1) {
      return InvalidArgument("{} must have degrees up to {} with one channel or more, not {}: {}", name,
                             kMaxDegree, degree, channels);
    }
  }
  return OkStatus();
}

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
  RETURN_IF_ERROR(CheckFiber(in, "the input"));
  RETURN_IF_ERROR(CheckFiber(out, "the output"));
  Se3Linear layer;
  layer.out_ = out;
  for (const auto& [degree, channels] : out) {
    const auto from = in.find(degree);
    if (from == in.end())
      return InvalidArgument("a linear layer cannot make degree {} from other degrees", degree);
    ASSIGN_OR_RETURN(const WeightTensor* weight,
                     weights.Get(fmt::format("weights.{}", degree), {channels, from->second}));
    layer.in_[degree] = from->second;
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
  RETURN_IF_ERROR(CheckNodeFeatures(in_, rows, x));
  RETURN_IF_ERROR(CheckNodeFeatures(out_, rows, y_grad));
  for (const auto& [degree, weight] : weights_) {
    ASSIGN_OR_RETURN(float* weight_grad, parameters.Get(fmt::format("weights.{}", degree),
                                                        static_cast<int64_t>(weight.values.size())));
    const auto to = x_grad.find(degree);
    MultiplyChannelsBackward(ctx, weight, rows, Dim(degree), x.at(degree).data(), y_grad.at(degree).data(),
                             to == x_grad.end() ? nullptr : to->second, weight_grad);
  }
  return OkStatus();
}

StatusOr<FiberFeatures> Se3Linear::Run(const graph::Context& ctx, int64_t rows,
                                       const FiberFeatures& x) const {
  RETURN_IF_ERROR(CheckNodeFeatures(in_, rows, x));
  FiberFeatures out;
  for (const auto& [degree, weight] : weights_)
    out[degree] = MultiplyChannels(ctx, weight, rows, Dim(degree), x.at(degree));
  return out;
}

StatusOr<Se3Norm> Se3Norm::Load(const WeightScope& weights, const Fiber& fiber) {
  RETURN_IF_ERROR(CheckFiber(fiber, "the fiber"));
  Se3Norm layer;
  layer.fiber_ = fiber;
  layer.grouped_ = weights.Has("group_norm.weight");
  if (!layer.grouped_) {
    for (const auto& [degree, channels] : fiber) {
      ASSIGN_OR_RETURN(layer.norms_[degree],
                       weights.LayerNorm(fmt::format("layer_norms.{}", degree), channels));
    }
    return layer;
  }
  int64_t total = 0;
  for (const auto& [degree, channels] : fiber) {
    if (channels != fiber.begin()->second) {
      return InvalidArgument("\"group_norm\" needs degrees with {} channels each, but degree {} has {}",
                             fiber.begin()->second, degree, channels);
    }
    total += channels;
  }
  ASSIGN_OR_RETURN(const Norm all, weights.LayerNorm("group_norm", total));
  int64_t at = 0;
  for (const auto& [degree, channels] : fiber) {
    Norm& norm = layer.norms_[degree];
    norm.gamma.assign(all.gamma.begin() + at, all.gamma.begin() + at + channels);
    norm.beta.assign(all.beta.begin() + at, all.beta.begin() + at + channels);
    norm.eps = all.eps;
    at += channels;
  }
  return layer;
}

StatusOr<FiberFeatures> Se3Norm::Run(const graph::Context& ctx, int64_t rows, const FiberFeatures& x) const {
  RETURN_IF_ERROR(CheckNodeFeatures(fiber_, rows, x));
  FiberFeatures out;
  for (const auto& [degree, norm] : norms_) {
    const int64_t channels = static_cast<int64_t>(norm.gamma.size());
    const int dim = Dim(degree);
    const std::vector<float>& from = x.at(degree);
    std::vector<float>& to = out[degree];
    to.resize(from.size());
    ForRows(ctx, rows, 64, [&, &scale = norm](int64_t first, int64_t last) {
      std::vector<float> lengths(channels), normalized(channels);
      for (int64_t r = first; r < last; ++r) {
        const int64_t at = r * channels * dim;
        NormalizeLengths(ctx, scale, from.data() + at, dim, lengths.data(), normalized.data());
        for (int64_t c = 0; c < channels; ++c) {
          const float factor = std::max(normalized[c], 0.0F) / lengths[c];
          for (int m = 0; m < dim; ++m) to[at + c * dim + m] = from[at + c * dim + m] * factor;
        }
      }
    });
  }
  return out;
}

StatusOr<NormGradients> Se3Norm::FindGradients(int degree, const GradientScope& parameters) const {
  if (!grouped_)
    return NormGradients::Find(parameters, fmt::format("layer_norms.{}", degree), norms_.at(degree));
  int64_t total = 0, before = 0;
  for (const auto& [other, channels] : fiber_) {
    total += channels;
    before += other < degree ? channels : 0;
  }
  NormGradients out;
  ASSIGN_OR_RETURN(out.gamma, parameters.Get("group_norm.weight", total));
  ASSIGN_OR_RETURN(out.beta, parameters.Get("group_norm.bias", total));
  if (out.gamma != nullptr) out.gamma += before;
  if (out.beta != nullptr) out.beta += before;
  return out;
}

Status Se3Norm::Backward(const graph::Context& ctx, int64_t rows, const FiberFeatures& x,
                         const FiberFeatures& y_grad, const std::map<int, float*>& x_grad,
                         const GradientScope& parameters) const {
  RETURN_IF_ERROR(CheckNodeFeatures(fiber_, rows, x));
  RETURN_IF_ERROR(CheckNodeFeatures(fiber_, rows, y_grad));
  for (const auto& [degree, norm] : norms_) {
    ASSIGN_OR_RETURN(const NormGradients own, FindGradients(degree, parameters));
    const graph::ScratchScope scope(ctx);
    const int64_t channels = static_cast<int64_t>(norm.gamma.size());
    const int dim = Dim(degree);
    auto take = [&] { return ctx.exec.scratch->Take<float>(rows * channels).data(); };
    float *lengths = take(), *normalized = take(), *length_grad = take(), *normalized_grad = take();
    const float *from = x.at(degree).data(), *grad = y_grad.at(degree).data();
    const auto found = x_grad.find(degree);
    float* to = found == x_grad.end() ? nullptr : found->second;
    // y = x relu(normalized) / length: the length has a gradient of its own and one through LayerNorm.
    ForRows(ctx, rows, 64, [&, &scale = norm](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        NormalizeLengths(ctx, scale, from + r * channels * dim, dim, lengths + r * channels,
                         normalized + r * channels);
      for (int64_t i = first * channels; i < last * channels; ++i) {
        float dot = 0;
        for (int m = 0; m < dim; ++m) dot += grad[i * dim + m] * from[i * dim + m];
        const float by_factor = normalized[i] > 0 ? dot / lengths[i] : 0;
        normalized_grad[i] = by_factor;
        length_grad[i] = -by_factor * std::max(normalized[i], 0.0F) / lengths[i];
      }
    });
    NormBackward(ctx, norm, lengths, normalized_grad, rows, to == nullptr ? nullptr : length_grad, own);
    if (to == nullptr) continue;
    ForRows(ctx, rows, 64, [&](int64_t first, int64_t last) {
      for (int64_t i = first * channels; i < last * channels; ++i) {
        const float factor = std::max(normalized[i], 0.0F) / lengths[i];
        // A length that is clamped is constant.
        const float along = lengths[i] > kSmallestLength ? length_grad[i] / lengths[i] : 0;
        for (int m = 0; m < dim; ++m)
          to[i * dim + m] += factor * grad[i * dim + m] + along * from[i * dim + m];
      }
    });
  }
  return OkStatus();
}

}  // namespace moesaic::science
