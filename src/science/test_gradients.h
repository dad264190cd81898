// Shared by tests of backward passes: gradients of parameters, compared with those of PyTorch.
#pragma once

#include "science/dense_gradient.h"
#include "science/test_goldens.h"

namespace moesaic::science {

/// A backward pass sums some hundred products per element three times as often as the forward pass.
inline constexpr float kGradientTolerance = 3e-5F;

/// Gradients of the parameters of one case, with their memory.
class ParameterGradients {
 public:
  ParameterGradients(const Goldens& goldens, const std::string& name, float tolerance = kGradientTolerance)
      : goldens_(goldens), name_(name), tolerance_(tolerance) {
    for (const auto& [key, tensor] : goldens.Weights(name + ".weights."))
      values_[key].resize(tensor.values.size());
    for (auto& [key, values] : values_) map_[key] = values;
  }
  const GradientMap& map() const { return map_; }
  void ExpectGoldens() const {
    for (const auto& [key, values] : values_)
      ExpectClose(values, goldens_.Floats(name_ + ".grad.parameter." + key), tolerance_, key.c_str());
  }
  const std::map<std::string, std::vector<float>>& values() const { return values_; }

 private:
  const Goldens& goldens_;
  std::string name_;
  float tolerance_;
  std::map<std::string, std::vector<float>> values_;
  GradientMap map_;
};

}  // namespace moesaic::science
