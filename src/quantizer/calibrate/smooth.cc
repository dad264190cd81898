#include "quantizer/calibrate/smooth.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "quantizer/calibrate/activation.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {
namespace {

constexpr float kAlphas[] = {0.3F, 0.4F, 0.5F, 0.6F, 0.7F, 0.75F, 0.8F, 0.85F, 0.9F, 0.95F};
constexpr float kMinSmoothing = 1e-5F;
constexpr int kMaxOutputs = 512;  // sampled outputs of a matrix, evenly spaced

// Sampled rows of a matrix.
struct Sample {
  std::vector<float> rows;
  int n;
};

Sample SampleRows(const WeightRows& w, int k) {
  Sample sample{{}, std::min(w.n, kMaxOutputs)};
  sample.rows.resize(static_cast<size_t>(sample.n) * k);
  for (int i = 0; i < sample.n; ++i) {
    std::copy_n(w.rows + int64_t{i} * w.n / sample.n * k, k, sample.rows.data() + int64_t{i} * k);
  }
  return sample;
}

std::vector<float> LargestOfInputs(const kernels::ExecContext& ctx, std::span<const WeightRows> linears,
                                   int k) {
  std::vector<std::vector<float>> parts(ctx.pool->size(), std::vector<float>(k));
  for (const WeightRows& w : linears) {
    ctx.pool->Run(w.n, [&](int64_t r, int worker) {
      const float* row = w.rows + r * k;
      for (int j = 0; j < k; ++j) parts[worker][j] = std::max(parts[worker][j], std::fabs(row[j]));
    });
  }
  std::vector<float> largest(k);
  for (const auto& part : parts) {
    for (int j = 0; j < k; ++j) largest[j] = std::max(largest[j], part[j]);
  }
  return largest;
}

// Returns the squared error of the outputs if inputs are divided and weights multiplied by s, and both
// rounded.
StatusOr<double> LossWith(const kernels::ExecContext& ctx, const TokenSample& x, float largest,
                          std::span<const Sample> linears, std::span<const std::vector<float>> exact,
                          std::span<const float> scales, const SmoothOptions& options) {
  std::vector<float> tokens(x.rows, x.rows + int64_t{x.count} * x.k);
  for (int64_t at = 0; at < std::ssize(tokens); ++at) tokens[at] /= scales[at % x.k];
  const std::vector<float> rounded_tokens =
      RoundActivations(ctx, {tokens.data(), x.count, x.k},
                       options.static_activations ? tensor::StaticScale::WithInverse(largest / 127) : 0);
  double loss = 0;
  for (size_t i = 0; i < linears.size(); ++i) {
    std::vector<float> rows = linears[i].rows;
    MultiplyInputs(ctx, scales, linears[i].n, rows.data());
    ASSIGN_OR_RETURN(const QuantizedMatrix rounded,
                     RoundToNearest(ctx, options.grid, rows.data(), linears[i].n, x.k, {}));
    Dequantize(rounded, 0, rounded.n, rows.data());
    loss += SquaredDistance(
        ctx, Outputs(ctx, {rounded_tokens.data(), x.count, x.k}, {rows.data(), rounded.n}), exact[i]);
  }
  return loss;
}

}  // namespace

std::vector<float> SmoothScales(std::span<const float> activation_largest,
                                std::span<const float> weight_largest, float alpha, bool powers_of_two) {
  MOESAIC_CHECK_EQ(activation_largest.size(), weight_largest.size());
  std::vector<float> scales(activation_largest.size(), 1.0F);
  double logs = 0;
  int live = 0;
  const auto is_live = [&](size_t j) { return activation_largest[j] > 0 && weight_largest[j] > 0; };
  for (size_t j = 0; j < scales.size(); ++j) {
    if (!is_live(j)) continue;
    scales[j] = std::max(std::pow(activation_largest[j], alpha) / std::pow(weight_largest[j], 1 - alpha),
                         kMinSmoothing);
    logs += std::log2(double{scales[j]});
    ++live;
  }
  const double mean = live > 0 ? logs / live : 0;
  for (size_t j = 0; j < scales.size(); ++j) {
    if (!is_live(j)) continue;
    const double log = std::log2(double{scales[j]}) - mean;
    scales[j] = static_cast<float>(std::exp2(powers_of_two ? std::nearbyint(log) : log));
  }
  return scales;
}

StatusOr<Smoothing> SearchSmoothing(const kernels::ExecContext& ctx, const TokenSample& x,
                                    std::span<const float> largest, std::span<const WeightRows> linears,
                                    const SmoothOptions& options) {
  MOESAIC_CHECK_EQ(std::ssize(largest), x.k);
  for (size_t j = 0; j < largest.size(); ++j) {
    if (!std::isfinite(largest[j])) {
      return DataLoss("input {} is not finite in every calibration token: it cannot be smoothed", j);
    }
  }
  std::vector<Sample> samples;
  std::vector<std::vector<float>> exact;
  double squares = 0;
  for (const WeightRows& w : linears) {
    samples.push_back(SampleRows(w, x.k));
    exact.push_back(Outputs(ctx, x, {samples.back().rows.data(), samples.back().n}));
    squares += SquaredDistance(ctx, exact.back(), std::vector<float>(exact.back().size()));
  }
  const std::vector<float> weight_largest = LargestOfInputs(ctx, linears, x.k);
  const auto loss_with = [&](std::span<const float> scales) {
    float most = 0;
    for (int j = 0; j < x.k; ++j) most = std::max(most, largest[j] / scales[j]);
    return LossWith(ctx, x, most, samples, exact, scales, options);
  };
  Smoothing best{.alpha = 0, .scales = std::vector<float>(x.k, 1.0F)};
  ASSIGN_OR_RETURN(best.loss_without, loss_with(best.scales));
  best.loss = best.loss_without;
  for (const float alpha : kAlphas) {
    std::vector<float> scales = SmoothScales(largest, weight_largest, alpha, options.powers_of_two);
    ASSIGN_OR_RETURN(const double loss, loss_with(scales));
    if (!(loss < best.loss)) continue;
    best.loss = loss;
    best.alpha = alpha;
    best.scales = std::move(scales);
  }
  if (squares > 0) {
    best.loss /= squares;
    best.loss_without /= squares;
  }
  return best;
}

void MultiplyInputs(const kernels::ExecContext& ctx, std::span<const float> scales, int n, float* rows) {
  const auto k = std::ssize(scales);
  ctx.pool->Run(n, [&](int64_t r, int) {
    for (int64_t j = 0; j < k; ++j) rows[r * k + j] *= scales[j];
  });
}

}  // namespace moesaic::quantizer
