#include "science/weights.h"

#include <fmt/ranges.h>

namespace moesaic::science {

StatusOr<const WeightTensor*> WeightScope::Get(const std::string& name,
                                               const std::vector<int64_t>& shape) const {
  const auto found = weights_->find(prefix_ + name);
  if (found == weights_->end()) return NotFound("the weights have no tensor \"{}{}\"", prefix_, name);
  const WeightTensor& tensor = found->second;
  bool fits = shape.empty() || shape.size() == tensor.shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == tensor.shape[i];
  if (!fits) {
    return InvalidArgument("tensor \"{}{}\" must have the shape [{}], but has [{}]", prefix_, name,
                           fmt::join(shape, ", "), fmt::join(tensor.shape, ", "));
  }
  return &tensor;
}

StatusOr<std::vector<float>> WeightScope::Vector(const std::string& name, int64_t size) const {
  ASSIGN_OR_RETURN(const WeightTensor* tensor, Get(name, {size}));
  return tensor->values;
}

StatusOr<Dense> WeightScope::Linear(const std::string& name, int64_t n, int64_t k) const {
  ASSIGN_OR_RETURN(const WeightTensor* weight, Get(name + ".weight", {n, k}));
  std::vector<float> bias;
  if (Has(name + ".bias")) {
    ASSIGN_OR_RETURN(bias, Vector(name + ".bias", weight->shape[0]));
  }
  return Dense::Pack(static_cast<int>(weight->shape[0]), static_cast<int>(weight->shape[1]), weight->values,
                     bias, format_);
}

StatusOr<Norm> WeightScope::LayerNorm(const std::string& name, int64_t n, float eps) const {
  Norm norm;
  norm.eps = eps;
  ASSIGN_OR_RETURN(norm.gamma, Vector(name + ".weight", n));
  ASSIGN_OR_RETURN(norm.beta, Vector(name + ".bias", n));
  return norm;
}

}  // namespace moesaic::science
