// Shared by tests of layers: goldens of goldens/make_goldens.py as weights and arrays.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "science/test_graphs.h"
#include "science/weights.h"
#include "support/npz.h"

namespace moesaic::science {

class Goldens {
 public:
  explicit Goldens(const std::string& name)
      : arrays_(test_support::ReadNpz(std::string(MOESAIC_SOURCE_DIR) + "/src/science/goldens/" + name +
                                      ".npz")) {}
  std::vector<float> Floats(const std::string& name) const { return arrays_.at(name).As<float>(); }
  std::vector<int32_t> Ints(const std::string& name) const { return arrays_.at(name).As<int32_t>(); }
  const std::vector<int64_t>& Shape(const std::string& name) const { return arrays_.at(name).shape; }
  /// Returns all float arrays under a prefix, without it.
  WeightMap Weights(const std::string& prefix) const {
    WeightMap weights;
    for (const auto& [name, array] : arrays_) {
      if (name.rfind(prefix, 0) == 0 && array.dtype == "<f4")
        weights[name.substr(prefix.size())] = {.shape = array.shape, .values = array.As<float>()};
    }
    return weights;
  }

 private:
  std::map<std::string, test_support::NpyArray> arrays_;
};

/// Checks |got - want| <= tolerance * max(1, largest |want|). A difference that is not finite fails.
inline void ExpectClose(const std::vector<float>& got, const std::vector<float>& want, float tolerance,
                        const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  float largest = 1, worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const float difference = std::abs(got[i] - want[i]);
    ASSERT_TRUE(std::isfinite(difference)) << what << "[" << i << "] is " << got[i] << ", not " << want[i];
    largest = std::max(largest, std::abs(want[i]));
    if (difference > worst) {
      worst = difference;
      at = i;
    }
  }
  EXPECT_LE(worst, tolerance * largest) << what << "[" << at << "] is " << got[at] << ", not " << want[at];
}

/// Returns the first two elements of the first two rows of x [rows, columns, width].
inline std::vector<float> FirstTwo(const std::vector<float>& x, int64_t columns, int64_t width) {
  std::vector<float> out(x.begin(), x.begin() + 2 * width);
  out.insert(out.end(), x.begin() + columns * width, x.begin() + (columns + 2) * width);
  return out;
}

/// A random rotation, row-major.
inline std::array<float, 9> RandomRotation(std::mt19937* rng) {
  std::normal_distribution<double> normal;
  double q[4], norm = 0;
  for (double& x : q) {
    x = normal(*rng);
    norm += x * x;
  }
  for (double& x : q) x /= std::sqrt(norm);
  const auto [w, x, y, z] = std::tie(q[0], q[1], q[2], q[3]);
  return {static_cast<float>(1 - 2 * (y * y + z * z)), static_cast<float>(2 * (x * y - w * z)),
          static_cast<float>(2 * (x * z + w * y)),     static_cast<float>(2 * (x * y + w * z)),
          static_cast<float>(1 - 2 * (x * x + z * z)), static_cast<float>(2 * (y * z - w * x)),
          static_cast<float>(2 * (x * z - w * y)),     static_cast<float>(2 * (y * z + w * x)),
          static_cast<float>(1 - 2 * (x * x + y * y))};
}

/// Rotates and shifts rows [n, 3].
inline std::vector<float> Moved(const std::vector<float>& xyz, const std::array<float, 9>& r,
                                const std::array<float, 3>& shift) {
  std::vector<float> out(xyz.size());
  for (size_t i = 0; i + 2 < xyz.size(); i += 3) {
    for (int row = 0; row < 3; ++row)
      out[i + row] =
          r[3 * row] * xyz[i] + r[3 * row + 1] * xyz[i + 1] + r[3 * row + 2] * xyz[i + 2] + shift[row];
  }
  return out;
}

}  // namespace moesaic::science
