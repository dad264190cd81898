#include "carve/router_fit.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "kernels/exec_context.h"
#include "kernels/linear.h"
#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::carve {
namespace {

using tensor::PackedFormat;

constexpr int kFitChunk = 512;      // tokens per task
constexpr int kStepTokens = 16384;  // tokens used by the gradient steps
constexpr float kMinCost = 1e-4F;   // minimum cost, so that the logarithm of an idle expert's cost is finite
constexpr float kRidge = 0.01F;     // times the mean diagonal of the covariance
// Temperature of the softened choice. Scores are logarithms of cost; a choice is uncertain where two of them
// differ by about this much.
constexpr float kTemperature = 0.3F;
// The first step changes scores by kTemperature on average. Later steps decay and keep a part of the previous
// step as momentum. Half of either value lowers the loss as smoothly.
constexpr float kMomentum = 0.7F, kDecay = 0.2F;

// Replaces a token's scores by the derivatives of its softened loss. Returns the cost of its inactive
// experts. `sorted` is scratch [routed].
double Differentiate(const float* cost, const Eigen::RowVectorXf& bias, int active, float* sorted,
                     float* score) {
  const auto routed = static_cast<int>(bias.size());
  for (int e = 0; e < routed; ++e) sorted[e] = score[e] += bias[e];
  std::sort(sorted, sorted + routed, std::greater<>());
  const float threshold = 0.5F * (sorted[active - 1] + sorted[active]);
  double loss = 0;
  float slopes = 0, weighted = 0;
  for (int e = 0; e < routed; ++e) {
    if (score[e] < threshold) loss += cost[e];
    // Probability of being inactive.
    const float off = 1 / (1 + std::exp((score[e] - threshold) / kTemperature));
    score[e] = off * (1 - off);
    slopes += score[e];
    weighted += score[e] * cost[e];
  }
  // The number of active experts is fixed, so only differences of cost count.
  const float mean = weighted / std::max(slopes, 1e-9F);
  for (int e = 0; e < routed; ++e) score[e] *= mean - cost[e];
  return loss;
}

}  // namespace

// A solution in centered inputs: scores = inputs * weights + bias.
struct RouterFit::Solution {
  Eigen::MatrixXf weights;  // [hidden, routed]
  Eigen::RowVectorXf bias;  // [routed]
};

std::vector<int> LinearRouter::Off(const float* u, int active) const {
  const auto routed = static_cast<int>(weights.rows());
  const Eigen::VectorXf score = weights * Eigen::Map<const Eigen::VectorXf>(u, weights.cols()) +
                                Eigen::Map<const Eigen::VectorXf>(bias.data(), routed);
  std::vector<int> order(static_cast<size_t>(routed));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score[a] > score[b]; });
  order.erase(order.begin(), order.begin() + active);
  return order;
}

StatusOr<RouterFit> RouterFit::Create(const kernels::ExecContext& ctx, const Rows& inputs) {
  RouterFit fit(ctx);
  const int tokens = inputs.count, hidden = inputs.columns;
  fit.centered_.resize(tokens, hidden);
  for (int t = 0; t < tokens; ++t) {
    fit.centered_.row(t) = Eigen::Map<const Eigen::RowVectorXf>(inputs.data + t * inputs.stride, hidden);
  }
  fit.mean_ = fit.centered_.cast<double>().colwise().mean().cast<float>();
  fit.centered_.rowwise() -= fit.mean_;
  RowMatrix gram = RowMatrix::Zero(hidden, hidden);
  const Rows rows{fit.centered_.data(), hidden, tokens, hidden};
  AddProducts(ctx, rows, rows, {}, &gram);
  Eigen::MatrixXf covariance = (0.5F / static_cast<float>(tokens)) * (gram + gram.transpose());
  covariance.diagonal().array() += kRidge * covariance.diagonal().mean();
  fit.factor_.compute(covariance);
  if (fit.factor_.info() != Eigen::Success || !covariance.allFinite()) {
    return DataLoss("the FFN's inputs on the calibration text are not finite or all equal");
  }
  return fit;
}

LinearRouter RouterFit::Fit(const RowMatrix& costs, std::span<const float> importance, int active,
                            int steps) const {
  Solution solution = Regress(costs);
  if (active < costs.cols()) Descend(costs, importance, active, steps, &solution);
  LinearRouter router;
  router.weights = solution.weights.transpose();
  const Eigen::RowVectorXf intercept = solution.bias - mean_ * solution.weights;
  router.bias.assign(intercept.data(), intercept.data() + intercept.size());
  return router;
}

RouterFit::Solution RouterFit::Regress(const RowMatrix& costs) const {
  const auto tokens = static_cast<int>(costs.rows()), routed = static_cast<int>(costs.cols());
  const auto hidden = static_cast<int>(centered_.cols());
  RowMatrix target = (costs.array() + kMinCost).log();
  const Eigen::RowVectorXf mean = target.cast<double>().colwise().mean().cast<float>();
  target.rowwise() -= mean;
  RowMatrix right = RowMatrix::Zero(hidden, routed);
  AddProducts(ctx_, {centered_.data(), hidden, tokens, hidden}, {target.data(), routed, tokens, routed}, {},
              &right);
  return {.weights = factor_.solve(Eigen::MatrixXf(right / static_cast<float>(tokens))), .bias = mean};
}

void RouterFit::Descend(const RowMatrix& costs, std::span<const float> importance, int active, int steps,
                        Solution* solution) const {
  const auto tokens = static_cast<int>(costs.rows()), routed = static_cast<int>(costs.cols());
  const auto hidden = static_cast<int>(centered_.cols());
  const int stride = std::max(1, tokens / kStepTokens), sample = tokens / stride;
  RowMatrix x(sample, hidden), cost(sample, routed), score(sample, routed), slope(hidden, routed);
  for (int i = 0; i < sample; ++i) {
    x.row(i) = centered_.row(int64_t{i} * stride);
    cost.row(i) = importance[int64_t{i} * stride] * costs.row(int64_t{i} * stride);
  }
  const RowMatrix turned = x.transpose();
  const layers::ScratchScope scratch(ctx_);
  const auto rows = kernels::QuantizeActivations(ctx_, PackedFormat::kBF16, x.data(), hidden, sample, hidden);
  const auto columns =
      kernels::QuantizeActivations(ctx_, PackedFormat::kBF16, turned.data(), sample, hidden, sample);

  Solution now = *solution;
  Solution move{.weights = Eigen::MatrixXf::Zero(hidden, routed), .bias = Eigen::RowVectorXf::Zero(routed)};
  double best = std::numeric_limits<double>::infinity();
  std::vector<double> losses(static_cast<size_t>(base::CeilDiv(sample, kFitChunk)));
  for (int step = 0; step <= steps; ++step) {
    Multiply(rows, now.weights.transpose(), &score);
    ctx_.pool->Run(std::ssize(losses), [&](int64_t chunk, int) {
      std::vector<float> sorted(static_cast<size_t>(routed));
      losses[chunk] = 0;
      for (int64_t i = chunk * kFitChunk; i < std::min<int64_t>(sample, (chunk + 1) * kFitChunk); ++i) {
        losses[chunk] +=
            Differentiate(cost.row(i).data(), now.bias, active, sorted.data(), score.row(i).data());
      }
    });
    const double loss = std::accumulate(losses.begin(), losses.end(), 0.0);
    if (loss < best) {
      best = loss;
      *solution = now;
    }
    if (step == steps) break;
    Multiply(columns, score.transpose(), &slope);
    const Eigen::RowVectorXf bias_slope = score.colwise().sum();
    const Eigen::MatrixXf slopes = slope, direction = factor_.solve(slopes);
    // With C the covariance, a unit step C^-1 s changes scores by (C^-1 s)' C (C^-1 s) = (C^-1 s)' s in the
    // mean square.
    const float change = std::sqrt((direction.cwiseProduct(slopes).sum() + bias_slope.squaredNorm()) /
                                   static_cast<float>(routed));
    const float length =
        kTemperature / std::max(change, 1e-12F) / std::sqrt(1 + kDecay * static_cast<float>(step));
    move.weights = kMomentum * move.weights - length * direction;
    move.bias = kMomentum * move.bias - length * bias_slope;
    now.weights += move.weights;
    now.bias += move.bias;
  }
}

// Computes c = a w^T on the matrix units.
void RouterFit::Multiply(const kernels::QuantizedActivations& a, const RowMatrix& w, RowMatrix* c) const {
  const auto n = static_cast<int>(w.rows()), k = static_cast<int>(w.cols());
  const auto layout = tensor::PackedLayout::Of(PackedFormat::kBF16, n, k);
  const auto memory = runtime::Buffer::Allocate(static_cast<size_t>(layout.total_bytes), /*huge=*/true);
  MOESAIC_CHECK(memory.ok());
  for (int row = 0; row < n; row += tensor::kPanelRows) {
    tensor::PackRows(layout, row, std::min(tensor::kPanelRows, n - row), w.data() + int64_t{row} * k,
                     memory->data());
  }
  const tensor::PackedMatrix matrix{.layout = layout, .data = memory->data()};
  kernels::Linear(ctx_, {.a = &a, .w = &matrix, .c = c->data(), .c_stride = n});
}

}  // namespace moesaic::carve
