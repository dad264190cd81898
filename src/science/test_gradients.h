// Shared by tests of backward passes: gradients of parameters, compared with those of PyTorch.
#pragma once

#include "science/dense_gradient.h"
#include "science/test_goldens.h"

namespace moesaic::science {

/// A backward pass sums some hundred products per element three times as often as the forward pass.
inline constexpr float kGradientTolerance = 3e-5F;

/// Zeros for the gradients of all parameters, and their map.
struct ZeroGradients {
  std::map<std::string, std::vector<float>> values;
  GradientMap map;

  explicit ZeroGradients(const WeightMap& weights) {
    for (const auto& [key, tensor] : weights) values[key].resize(tensor.values.size());
    for (auto& [key, zeros] : values) map[key] = zeros;
  }
};

/// Gradients of the parameters of one case, with their memory.
class ParameterGradients {
 public:
  ParameterGradients(const Goldens& goldens, const std::string& name, float tolerance = kGradientTolerance)
      : goldens_(goldens), name_(name), tolerance_(tolerance), zeros_(goldens.Weights(name + ".weights.")) {}
  const GradientMap& map() const { return zeros_.map; }
  void ExpectGoldens() const {
    for (const auto& [key, values] : zeros_.values)
      ExpectClose(values, goldens_.Floats(name_ + ".grad.parameter." + key), tolerance_, key.c_str());
  }
  const std::map<std::string, std::vector<float>>& values() const { return zeros_.values; }

 private:
  const Goldens& goldens_;
  std::string name_;
  float tolerance_;
  ZeroGradients zeros_;
};

}  // namespace moesaic::science
