#include "proxy/schedule/latency_model.h"

#include <algorithm>
#include <cmath>

namespace moesaic::proxy {
namespace {

// Samples that the prior counts for, in each feature at its typical size.
constexpr double kPriorSamples = 8;
// A sample's weight halves after about 700 further ones.
constexpr double kForget = 0.999;

// Features are scaled to about 1, so that one ridge fits all.
constexpr double kTokenScale = 4096;
constexpr double kPairScale = kTokenScale * kTokenScale;
constexpr double kBatchScale = 32;
constexpr double kKvScale = 65536;

// Solves the symmetric 3x3 system by Cramer's rule; false when it is singular.
bool Solve3(const double m[3][3], const double v[3], double out[3]) {
  const auto det = [](const double a[3][3]) {
    return a[0][0] * (a[1][1] * a[2][2] - a[1][2] * a[2][1]) -
           a[0][1] * (a[1][0] * a[2][2] - a[1][2] * a[2][0]) +
           a[0][2] * (a[1][0] * a[2][1] - a[1][1] * a[2][0]);
  };
  const double whole = det(m);
  if (!(std::abs(whole) > 1e-12)) return false;
  for (int column = 0; column < 3; ++column) {
    double replaced[3][3];
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) replaced[i][j] = j == column ? v[i] : m[i][j];
    }
    out[column] = det(replaced) / whole;
  }
  return true;
}

}  // namespace

double LatencyCoefficients::PrefillNanos(double new_tokens, double cached_tokens) const {
  return base + per_token * new_tokens + per_pair * Pairs(new_tokens, cached_tokens);
}

double LatencyCoefficients::StepNanos(double batch, double kv_tokens) const {
  return step_base + per_sequence * batch + per_kv_token * kv_tokens;
}

void LeastSquares3::Add(const std::array<double, 3>& x, double value, double forget) {
  int at = 0;
  for (int i = 0; i < 3; ++i) {
    for (int j = i; j < 3; ++j, ++at) moments_[at] = moments_[at] * forget + x[i] * x[j];
    products_[i] = products_[i] * forget + x[i] * value;
  }
  samples_ = samples_ * forget + 1;
}

std::array<double, 3> LeastSquares3::Solve(const std::array<double, 3>& prior) const {
  if (samples_ <= 0) return prior;
  double m[3][3], v[3];
  int at = 0;
  for (int i = 0; i < 3; ++i) {
    for (int j = i; j < 3; ++j, ++at) m[i][j] = m[j][i] = moments_[at];
    v[i] = products_[i];
  }
  for (int i = 0; i < 3; ++i) {
    m[i][i] += kPriorSamples;
    v[i] += kPriorSamples * prior[i];
  }
  // A coefficient that comes out negative is fixed at zero, and the others are solved again: times do not
  // fall with work.
  bool fixed[3] = {};
  double out[3] = {};
  for (int round = 0; round < 3; ++round) {
    double mm[3][3], vv[3];
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) mm[i][j] = fixed[i] || fixed[j] ? (i == j ? 1 : 0) : m[i][j];
      vv[i] = fixed[i] ? 0 : v[i];
    }
    if (!Solve3(mm, vv, out)) return prior;
    const auto* const lowest = std::min_element(out, out + 3);
    if (*lowest >= 0) break;
    fixed[lowest - out] = true;
  }
  return {std::max(out[0], 0.0), std::max(out[1], 0.0), std::max(out[2], 0.0)};
}

void LatencyModel::Init(const LatencyCoefficients& start) {
  coefficients = prior = start;
  prefill = {};
  decode = {};
}

void LatencyModel::ObservePrefill(double new_tokens, double pairs, Nanos time, double weight) {
  prefill.Add({1, new_tokens / kTokenScale, pairs / kPairScale}, static_cast<double>(time) * weight, kForget);
  const auto solved = prefill.Solve({prior.base, prior.per_token * kTokenScale, prior.per_pair * kPairScale});
  coefficients.base = solved[0];
  coefficients.per_token = solved[1] / kTokenScale;
  coefficients.per_pair = solved[2] / kPairScale;
}

void LatencyModel::ObserveStep(double batch, double kv_tokens, Nanos time, double weight) {
  decode.Add({1, batch / kBatchScale, kv_tokens / kKvScale}, static_cast<double>(time) * weight, kForget);
  const auto solved =
      decode.Solve({prior.step_base, prior.per_sequence * kBatchScale, prior.per_kv_token * kKvScale});
  coefficients.step_base = solved[0];
  coefficients.per_sequence = solved[1] / kBatchScale;
  coefficients.per_kv_token = solved[2] / kKvScale;
}

}  // namespace moesaic::proxy
