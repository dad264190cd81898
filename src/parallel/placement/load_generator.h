// Loads of experts with a given skew, and the skew of given loads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {

/// Largest spread of generated loads.
inline constexpr double kMaxSpread = 5;

/// Distribution of the loads of one layer's experts.
enum class Skew {
  kLogNormal,  ///< loads are exp(sigma * normal)
  kPowerLaw,   ///< the expert of rank k has the load k^-alpha
};

/// Differences between the workloads of one generator.
enum class Drift {
  /// A workload mixes a few load profiles, such as those of prompts, answers and domains, in its own shares.
  kMixtures,
  /// Each expert's load drifts independently.
  kIndependent,
};

struct GeneratorOptions {
  int layers = 58;
  int experts = 256;
  int workloads = 6;
  Skew skew = Skew::kLogNormal;
  double spread = 0.9;               ///< sigma or alpha of the middle layer, of each profile
  double spread_range = 0.2;         ///< relative difference of the first and last layer's spread to it
  std::vector<double> spreads = {};  ///< sigma or alpha of each layer; empty: from spread and spread_range
  Drift drift = Drift::kMixtures;
  int profiles = 4;  ///< of mixtures, whose shares are uniform on the simplex
  /// Of two workloads' loads, on average. Mixtures of power laws have another one, which depends on alpha.
  double correlation = 0.83;
  double tokens_per_layer = 4'000'000;  ///< tokens times experts per token
  uint64_t seed = 1;
};

/// Draws workloads "synthetic-0", ... with Poisson noise of counts. InvalidArgument for options out of range.
StatusOr<std::vector<Workload>> GenerateLoads(const GeneratorOptions& options);

/// Skew of loads, averaged over layers with tokens.
struct FittedSkew {
  double sigma = 0;             ///< standard deviation of log(load + 1/2)
  double alpha = 0;             ///< least-squares slope of log(load + 1/2) over log(rank), negated
  double log_normal_error = 0;  ///< RMS distance of sorted log loads to the log-normal's
  double power_law_error = 0;   ///< the same for the power law
  double max_over_mean = 0;     ///< of experts
  double variation = 0;         ///< standard deviation over mean of experts
};

FittedSkew FitSkew(const LoadMatrix& load);

/// Options with which generated loads have the skew of each layer of `loads`, their tokens, and the mean
/// correlation of all pairs of them; of one load, `correlation`. Spreads are at most kMaxSpread. Layers in
/// which a load has no tokens are left out. All loads have one shape. Generated loads drift independently,
/// because the loads of experts are then those of the fitted distribution.
GeneratorOptions FitGenerator(std::span<const LoadMatrix> loads, double correlation);

/// Correlation of two workloads' loads, averaged over layers with tokens in both; 0 without any. Equal loads
/// of all experts correlate with nothing.
double LoadCorrelation(const LoadMatrix& a, const LoadMatrix& b);

}  // namespace moesaic::parallel
