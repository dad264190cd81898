#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "comm/exchange/exchange_cost.h"

namespace moesaic::comm {
namespace {

using Row = std::array<double, 4>;  // three coefficients and the right side

// Solves a symmetric system by elimination with pivots. Columns without a pivot get 0.
std::array<double, 3> SolveThree(std::array<Row, 3> m) {
  std::array<int, 3> pivot_of_column = {-1, -1, -1};
  int row = 0;
  for (int column = 0; column < 3; ++column) {
    int best = row;
    for (int i = row; i < 3; ++i) {
      if (std::abs(m[i][column]) > std::abs(m[best][column])) best = i;
    }
    if (row == 3 || std::abs(m[best][column]) < 1e-12) continue;
    std::swap(m[row], m[best]);
    for (int i = 0; i < 3; ++i) {
      if (i == row) continue;
      const double factor = m[i][column] / m[row][column];
      for (int j = column; j < 4; ++j) m[i][j] -= factor * m[row][j];
    }
    pivot_of_column[column] = row++;
  }
  std::array<double, 3> x = {};
  for (int column = 0; column < 3; ++column) {
    const int at = pivot_of_column[column];
    if (at >= 0) x[column] = m[at][3] / m[at][column];
  }
  return x;
}

// Fits the samples with the given binding links. Bytes are scaled by `unit` so that coefficients are of one
// magnitude.
LinkTimes FitSplit(std::span<const ExchangeSample> samples, std::span<const int> order, size_t inner,
                   double unit, double time_unit) {
  std::array<Row, 3> normal = {};
  for (size_t i = 0; i < order.size(); ++i) {
    const ExchangeSample& sample = samples[order[i]];
    const double weight = time_unit / sample.seconds;
    const Row row = {weight, i < inner ? weight * sample.inner_bytes / unit : 0,
                     i < inner ? 0 : weight * sample.outer_bytes / unit, 1};
    for (int a = 0; a < 3; ++a) {
      for (int b = 0; b < 4; ++b) normal[a][b] += row[a] * row[b];
    }
  }
  const auto x = SolveThree(normal);
  return {x[0] * time_unit, x[1] * time_unit / unit, x[2] * time_unit / unit};
}

}  // namespace

double HitProbability(int experts, int in_group, int k) {
  double miss = 1;
  for (int i = 0; i < k; ++i)
    miss *= std::max(0.0, static_cast<double>(experts - in_group - i) / (experts - i));
  return 1 - miss;
}

double LinkTimes::Predict(double inner_bytes, double outer_bytes) const {
  return alpha_s + std::max(inner_bytes * inner_s_per_byte, outer_bytes * outer_s_per_byte);
}

StatusOr<LinkTimes> FitLinkTimes(std::span<const ExchangeSample> samples) {
  if (samples.size() < 3)
    return InvalidArgument("link times: a fit needs at least 3 samples, found {}", samples.size());
  double unit = 0, time_unit = 0;
  for (const ExchangeSample& sample : samples) {
    if (!(sample.seconds > 0) || !(sample.inner_bytes + sample.outer_bytes > 0) || sample.inner_bytes < 0 ||
        sample.outer_bytes < 0) {
      return InvalidArgument(
          "link times: samples need positive seconds and bytes, found {} s for {} + {} bytes", sample.seconds,
          sample.inner_bytes, sample.outer_bytes);
    }
    unit = std::max({unit, sample.inner_bytes, sample.outer_bytes});
    time_unit = std::max(time_unit, sample.seconds);
  }
  std::vector<int> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  const auto share = [&](int i) {
    return samples[i].outer_bytes / (samples[i].inner_bytes + samples[i].outer_bytes);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return share(a) < share(b); });
  LinkTimes best;
  double best_error = std::numeric_limits<double>::infinity();
  for (size_t inner = 0; inner <= order.size(); ++inner) {
    const LinkTimes fit = FitSplit(samples, order, inner, unit, time_unit);
    if (fit.alpha_s < 0 || fit.inner_s_per_byte < 0 || fit.outer_s_per_byte < 0) continue;
    double error = 0;
    for (const ExchangeSample& sample : samples) {
      const double relative = fit.Predict(sample.inner_bytes, sample.outer_bytes) / sample.seconds - 1;
      error += relative * relative;
    }
    if (error < best_error) {
      best = fit;
      best_error = error;
    }
  }
  if (best_error < std::numeric_limits<double>::infinity()) return best;
  return InvalidArgument("link times: no model with positive coefficients fits the {} samples",
                         samples.size());
}

}  // namespace moesaic::comm
