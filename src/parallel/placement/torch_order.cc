#include "parallel/placement/torch_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>

namespace moesaic::parallel {
namespace {

constexpr int kLanes = 8;         // floats of the vector type: SumKernel.cpp is compiled for AVX2 at most
constexpr int kAccumulators = 4;  // interleaved partial sums of a row
constexpr int kLevels = 4;        // of the cascade

int CeilLog2(int64_t value) {
  return value <= 2 ? 1 : 64 - std::countl_zero(static_cast<uint64_t>(value - 1));
}

// Sums `count` rows; row i is at values + i * kAccumulators * Lanes. Returns one sum per accumulator and
// lane.
template <int Lanes>
std::array<std::array<float, Lanes>, kAccumulators> CascadeSum(const float* values, int64_t count) {
  const int power = std::max(4, CeilLog2(count) / kLevels);
  const int64_t step = int64_t{1} << power, mask = step - 1;
  std::array<std::array<std::array<float, Lanes>, kAccumulators>, kLevels> sums{};
  const auto add_row = [&](int64_t row) {
    for (int k = 0; k < kAccumulators; ++k) {
      for (int lane = 0; lane < Lanes; ++lane)
        sums[0][k][lane] += values[(row * kAccumulators + k) * Lanes + lane];
    }
  };
  const auto fold = [&](int from, int to) {
    for (int k = 0; k < kAccumulators; ++k) {
      for (int lane = 0; lane < Lanes; ++lane) sums[to][k][lane] += sums[from][k][lane];
    }
  };
  int64_t row = 0;
  while (row + step <= count) {
    for (int64_t j = 0; j < step; ++j) add_row(row++);
    for (int level = 1; level < kLevels; ++level) {
      fold(level - 1, level);
      sums[level - 1] = {};
      if ((row & (mask << (level * power))) != 0) break;
    }
  }
  while (row < count) add_row(row++);
  for (int level = 1; level < kLevels; ++level) fold(level, 0);
  return sums[0];
}

// Sum of `count` vectors of `Lanes` values, per lane.
template <int Lanes>
std::array<float, Lanes> RowSum(const float* values, int64_t count) {
  const int64_t rows = count / kAccumulators;
  auto sums = CascadeSum<Lanes>(values, rows);
  for (int64_t i = rows * kAccumulators; i < count; ++i) {
    for (int lane = 0; lane < Lanes; ++lane) sums[0][lane] += values[i * Lanes + lane];
  }
  for (int k = 1; k < kAccumulators; ++k) {
    for (int lane = 0; lane < Lanes; ++lane) sums[0][lane] += sums[k][lane];
  }
  return sums[0];
}

}  // namespace

float TorchSum(std::span<const float> values) {
  const auto count = static_cast<int64_t>(values.size());
  if (count < kLanes) return RowSum<1>(values.data(), count)[0];
  const int64_t vectors = count / kLanes;
  const std::array<float, kLanes> lanes = RowSum<kLanes>(values.data(), vectors);
  float sum = 0;
  for (int64_t i = vectors * kLanes; i < count; ++i) sum += values[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

std::vector<int> TorchSortDescending(std::span<const float> values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

}  // namespace moesaic::parallel
