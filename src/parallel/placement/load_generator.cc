#include "parallel/placement/load_generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

constexpr int kCorrelationSteps = 16;  // of a bisection

// Quantile of the standard normal distribution by bisection of its distribution function.
double NormalQuantile(double probability) {
  double low = -9, high = 9;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::numbers::sqrt2) / 2 < probability ? low : high) = middle;
  }
  return low;
}

// Correlation of logarithms that gives log-normal loads the correlation `loads`.
double LogCorrelation(double loads, double sigma) {
  if (sigma <= 0) return 1;
  const double variance = sigma * sigma;
  return std::clamp(std::log1p(loads * std::expm1(variance)) / variance, 0.0, 1.0);
}

// Correlation of profiles that gives mixtures with shares uniform on the simplex the correlation `mixtures`.
// The expected product of two shares of one profile is 1 / profiles^2, the expected square 2 / (n (n + 1)).
double ProfileCorrelation(double mixtures, int profiles) {
  const double different = 1.0 / profiles, same = 2.0 / (profiles + 1);
  return std::clamp(1 - (1 - mixtures) / (1 - different - mixtures * (1 - same)), 0.0, 1.0);
}

Status CheckOptions(const GeneratorOptions& o) {
  if (o.layers < 1 || o.layers > kMaxLayers) return InvalidArgument("layers: found {}", o.layers);
  if (o.experts < 2 || o.experts > kMaxExperts) return InvalidArgument("experts: found {}", o.experts);
  if (o.workloads < 1 || o.workloads > 1000) return InvalidArgument("workloads: found {}", o.workloads);
  if (int64_t{o.layers} * o.experts > kMaxLoadValues)
    return InvalidArgument("layers * experts must be at most {}, found {}", kMaxLoadValues,
                           int64_t{o.layers} * o.experts);
  if (!(o.spread >= 0 && o.spread <= kMaxSpread))
    return InvalidArgument("spread must be from 0 to {}, found {}", kMaxSpread, o.spread);
  if (!o.spreads.empty() && std::ssize(o.spreads) != o.layers)
    return InvalidArgument("{} layers need as many spreads, found {}", o.layers, o.spreads.size());
  for (const double spread : o.spreads) {
    if (!(spread >= 0 && spread <= kMaxSpread))
      return InvalidArgument("spread must be from 0 to {}, found {}", kMaxSpread, spread);
  }
  if (!(o.spread_range >= 0 && o.spread_range <= 1))
    return InvalidArgument("range of the spread must be from 0 to 1, found {}", o.spread_range);
  if (o.profiles < 2 || o.profiles > 1000)
    return InvalidArgument("profiles must be from 2 to 1000, found {}", o.profiles);
  if (!(o.correlation >= 0 && o.correlation <= 1))
    return InvalidArgument("correlation must be from 0 to 1, found {}", o.correlation);
  if (!(o.tokens_per_layer >= 1 && o.tokens_per_layer <= 1e15))
    return InvalidArgument("tokens of a layer must be from 1 to 1e15, found {}", o.tokens_per_layer);
  return OkStatus();
}

double SpreadOf(const GeneratorOptions& options, int layer) {
  if (!options.spreads.empty()) return options.spreads[layer];
  if (options.layers < 2) return options.spread;
  return options.spread * (1 + options.spread_range * (2.0 * layer / (options.layers - 1) - 1));
}

// Loads of mean 1 from normal variables.
std::vector<double> LoadsOf(Skew skew, double spread, std::vector<double> normal) {
  if (skew == Skew::kLogNormal) {
    for (double& value : normal) value = std::exp(spread * value);
  } else {
    std::vector<int> order(normal.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return normal[a] > normal[b]; });
    for (size_t i = 0; i < order.size(); ++i)
      normal[order[i]] = std::pow(static_cast<double>(i + 1), -spread);
  }
  const double mean = std::accumulate(normal.begin(), normal.end(), 0.0) / static_cast<double>(normal.size());
  for (double& value : normal) value /= mean;
  return normal;
}

// Correlation of two load vectors; 0 if the loads of one are equal.
double PairCorrelation(std::span<const double> x, std::span<const double> y) {
  const auto count = static_cast<double>(x.size());
  const double mean_x = std::accumulate(x.begin(), x.end(), 0.0) / count;
  const double mean_y = std::accumulate(y.begin(), y.end(), 0.0) / count;
  double xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
}

// Load vectors from normal variables that they share, and own ones, which give each pair of vectors the
// correlation `near` of normal variables.
std::vector<std::vector<double>> MixedLoads(const GeneratorOptions& options, double spread, double near,
                                            std::span<const double> shared,
                                            const std::vector<std::vector<double>>& own) {
  std::vector<std::vector<double>> loads;
  for (std::vector<double> normal : own) {
    for (size_t e = 0; e < shared.size(); ++e)
      normal[e] = std::sqrt(near) * shared[e] + std::sqrt(1 - near) * normal[e];
    loads.push_back(LoadsOf(options.skew, spread, std::move(normal)));
  }
  return loads;
}

// Load vectors of a power law; the first ones have the mean correlation `loads` with their neighbours. No
// formula gives the correlation of the normal variables, so it is bisected for these variables.
std::vector<std::vector<double>> PowerLawLoads(const GeneratorOptions& options, double spread, double loads,
                                               std::span<const double> shared,
                                               const std::vector<std::vector<double>>& own) {
  const std::vector<std::vector<double>> first(own.begin(),
                                               own.begin() + std::min<std::ptrdiff_t>(8, std::ssize(own)));
  double low = 0, high = 1;
  for (int step = 0; step < kCorrelationSteps; ++step) {
    const double middle = (low + high) / 2;
    const std::vector<std::vector<double>> mixed = MixedLoads(options, spread, middle, shared, first);
    double sum = 0;
    for (size_t i = 1; i < mixed.size(); ++i) sum += PairCorrelation(mixed[i - 1], mixed[i]);
    (sum < loads * static_cast<double>(mixed.size() - 1) ? low : high) = middle;
  }
  return MixedLoads(options, spread, high, shared, own);
}

// `count` load vectors whose loads correlate pairwise. Profiles of a power law correlate as log-normal loads
// of sigma 1 would.
std::vector<std::vector<double>> CorrelatedLoads(const GeneratorOptions& options, double spread, int count,
                                                 double correlation, Random& random) {
  std::vector<double> shared(options.experts);
  for (double& value : shared) value = random.Normal();
  std::vector<std::vector<double>> own(count, std::vector<double>(options.experts));
  for (std::vector<double>& normal : own) {
    for (double& value : normal) value = random.Normal();
  }
  const bool power_law = options.skew == Skew::kPowerLaw;
  if (power_law && options.drift == Drift::kIndependent && count > 1)
    return PowerLawLoads(options, spread, correlation, shared, own);
  const double near = LogCorrelation(correlation, power_law ? 1 : spread);
  return MixedLoads(options, spread, near, shared, own);
}

// Shares of profiles in each workload: normalised exponential variables, equal in all layers.
std::vector<std::vector<double>> Shares(const GeneratorOptions& options) {
  Random random(options.seed ^ 0x5DEECE66D);
  std::vector<std::vector<double>> shares(options.workloads, std::vector<double>(options.profiles));
  for (std::vector<double>& of_workload : shares) {
    for (double& share : of_workload) share = -std::log(random.Uniform());
    const double sum = std::accumulate(of_workload.begin(), of_workload.end(), 0.0);
    for (double& share : of_workload) share = sum > 0 ? share / sum : 1.0 / options.profiles;
  }
  return shares;
}

// Expected loads of all workloads in one layer, of mean 1.
std::vector<std::vector<double>> LayerLoads(const GeneratorOptions& options, int layer,
                                            const std::vector<std::vector<double>>& shares, Random& random) {
  const double spread = SpreadOf(options, layer);
  if (options.drift == Drift::kIndependent)
    return CorrelatedLoads(options, spread, options.workloads, options.correlation, random);
  const double between = ProfileCorrelation(options.correlation, options.profiles);
  const auto profiles = CorrelatedLoads(options, spread, options.profiles, between, random);
  std::vector<std::vector<double>> loads(options.workloads, std::vector<double>(options.experts, 0));
  for (int w = 0; w < options.workloads; ++w) {
    for (int k = 0; k < options.profiles; ++k) {
      for (int e = 0; e < options.experts; ++e) loads[w][e] += shares[w][k] * profiles[k][e];
    }
  }
  return loads;
}

}  // namespace

StatusOr<std::vector<Workload>> GenerateLoads(const GeneratorOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::vector<Workload> workloads(options.workloads);
  for (int w = 0; w < options.workloads; ++w) {
    workloads[w].name = fmt::format("synthetic-{}", w);
    workloads[w].total = {options.layers, options.experts};
  }
  const auto shares = Shares(options);
  const double scale = options.tokens_per_layer / options.experts;
  for (int layer = 0; layer < options.layers; ++layer) {
    Random random(options.seed * 1'000'003 + static_cast<uint64_t>(layer));
    const auto loads = LayerLoads(options, layer, shares, random);
    for (int w = 0; w < options.workloads; ++w) {
      std::vector<double>& tokens = workloads[w].total.tokens;
      double sum = 0;
      for (const double load : loads[w]) {
        // Poisson noise, by its normal approximation.
        const double mean = load * scale;
        tokens.push_back(std::max(0.0, std::round(mean + std::sqrt(mean) * random.Normal())));
        sum += tokens.back();
      }
      if (sum == 0) tokens.back() = 1;
    }
  }
  return workloads;
}

FittedSkew FitSkew(const LoadMatrix& load) {
  FittedSkew mean;
  const int experts = load.experts;
  int layers = 0;
  for (int layer = 0; layer < load.layers; ++layer) {
    if (!HasTokens(load, layer)) continue;
    ++layers;
    std::vector<double> logs;
    double sum = 0, squares = 0, largest = 0;
    for (const double tokens : load.layer(layer)) {
      logs.push_back(std::log(tokens + 0.5));
      sum += tokens;
      squares += tokens * tokens;
      largest = std::max(largest, tokens);
    }
    std::sort(logs.begin(), logs.end(), std::greater<>());
    const double average = std::accumulate(logs.begin(), logs.end(), 0.0) / experts;
    double spread = 0, sxy = 0, sxx = 0, mean_x = 0;
    for (int i = 0; i < experts; ++i) mean_x += std::log(i + 1.0) / experts;
    for (int i = 0; i < experts; ++i) {
      const double x = std::log(i + 1.0) - mean_x;
      spread += (logs[i] - average) * (logs[i] - average);
      sxy += x * (logs[i] - average);
      sxx += x * x;
    }
    const double sigma = std::sqrt(spread / experts), alpha = sxx > 0 ? -sxy / sxx : 0;
    double normal_error = 0, power_error = 0;
    for (int i = 0; i < experts; ++i) {
      const double normal = average - sigma * NormalQuantile((i + 0.5) / experts);
      const double power = average - alpha * (std::log(i + 1.0) - mean_x);
      normal_error += (logs[i] - normal) * (logs[i] - normal);
      power_error += (logs[i] - power) * (logs[i] - power);
    }
    const double mean_tokens = sum / experts;
    mean.sigma += sigma;
    mean.alpha += alpha;
    mean.log_normal_error += std::sqrt(normal_error / experts);
    mean.power_law_error += std::sqrt(power_error / experts);
    mean.max_over_mean += largest / mean_tokens;
    mean.variation += std::sqrt(std::max(0.0, squares / experts / (mean_tokens * mean_tokens) - 1));
  }
  for (double* value : {&mean.sigma, &mean.alpha, &mean.log_normal_error, &mean.power_law_error,
                        &mean.max_over_mean, &mean.variation})
    *value /= std::max(1, layers);
  return mean;
}

GeneratorOptions FitGenerator(std::span<const LoadMatrix> loads, double correlation) {
  const int experts = loads.front().experts;
  GeneratorOptions fit{.layers = 0, .experts = experts, .drift = Drift::kIndependent};
  std::vector<FittedSkew> layers;  // means over loads
  double log_normal = 0, power_law = 0, tokens = 0;
  for (int layer = 0; layer < loads.front().layers; ++layer) {
    const auto has_tokens = [layer](const LoadMatrix& load) { return HasTokens(load, layer); };
    if (!std::ranges::all_of(loads, has_tokens)) continue;
    FittedSkew mean;
    for (const LoadMatrix& load : loads) {
      const std::span<const double> values = load.layer(layer);
      const FittedSkew skew = FitSkew({1, experts, {values.begin(), values.end()}});
      mean.sigma += skew.sigma / static_cast<double>(loads.size());
      mean.alpha += skew.alpha / static_cast<double>(loads.size());
      log_normal += skew.log_normal_error;
      power_law += skew.power_law_error;
      tokens += std::accumulate(values.begin(), values.end(), 0.0);
    }
    layers.push_back(mean);
  }
  fit.layers = static_cast<int>(layers.size());
  fit.skew = log_normal <= power_law ? Skew::kLogNormal : Skew::kPowerLaw;
  for (const FittedSkew& layer : layers)
    fit.spreads.push_back(
        std::clamp(fit.skew == Skew::kLogNormal ? layer.sigma : layer.alpha, 0.0, kMaxSpread));
  fit.tokens_per_layer = tokens / static_cast<double>(std::max<size_t>(1, layers.size() * loads.size()));
  fit.correlation = correlation;
  double sum = 0;
  int pairs = 0;
  for (size_t a = 0; a < loads.size(); ++a) {
    for (size_t b = a + 1; b < loads.size(); ++b, ++pairs) sum += LoadCorrelation(loads[a], loads[b]);
  }
  if (pairs > 0) fit.correlation = std::clamp(sum / pairs, 0.0, 1.0);
  return fit;
}

double LoadCorrelation(const LoadMatrix& a, const LoadMatrix& b) {
  double sum = 0;
  int layers = 0;
  for (int layer = 0; layer < a.layers; ++layer) {
    if (!HasTokens(a, layer) || !HasTokens(b, layer)) continue;
    ++layers;
    sum += PairCorrelation(a.layer(layer), b.layer(layer));
  }
  return layers > 0 ? sum / layers : 0;
}

}  // namespace moesaic::parallel
