// Online latency model in tokens: time of a prefill and of a decode step on one class of instances.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Coefficients of
///   prefill(new, cached) = base + per_token * new + per_pair * (new + cached)^2 - per_pair * cached^2
///   decode step(batch, kv) = step_base + per_sequence * batch + per_kv_token * kv
/// in nanoseconds and tokens. The quadratic term is attention: new queries see cached and new keys.
struct LatencyCoefficients {
  double base = 16.5e6, per_token = 15'183, per_pair = 0.421;
  double step_base = 5.74e6, per_sequence = 50e3, per_kv_token = 12;

  /// Query-key pairs of attention, twice: (new + cached)^2 - cached^2.
  static double Pairs(double new_tokens, double cached_tokens) {
    return new_tokens * (new_tokens + 2 * cached_tokens);
  }
  double PrefillNanos(double new_tokens, double cached_tokens) const;
  double StepNanos(double batch, double kv_tokens) const;
};

/// Least squares with exponential forgetting over three features. Plain data in shared memory, of which all
/// bytes are zero without samples. The caller holds the zone's lock.
class LeastSquares3 {
 public:
  void Add(const std::array<double, 3>& features, double value, double forget);
  /// Returns coefficients, none of them negative. With few samples they are close to `prior`.
  std::array<double, 3> Solve(const std::array<double, 3>& prior) const;
  double samples() const { return samples_; }

 private:
  std::array<double, 6> moments_;   // upper triangle of sum x x^T
  std::array<double, 3> products_;  // sum x y
  double samples_;
};

/// The model of one class of instances, in shared memory.
struct LatencyModel {
  LatencyCoefficients coefficients;  ///< current; the prior before the first sample
  LatencyCoefficients prior;
  LeastSquares3 prefill, decode;

  void Init(const LatencyCoefficients& start);
  /// `weight` is the relative speed of the instance: times are scaled to weight 1. `pairs` is the sum of
  /// LatencyCoefficients::Pairs over the requests of a batch.
  void ObservePrefill(double new_tokens, double pairs, Nanos time, double weight);
  void ObserveStep(double batch, double kv_tokens, Nanos time, double weight);
};

}  // namespace moesaic::proxy
