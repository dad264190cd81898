// Named weights of a model, as its state dict holds them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "science/dense.h"

namespace moesaic::science {

struct WeightTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using WeightMap = std::map<std::string, WeightTensor>;

/// Reads weights by name under a prefix ("encoder_layers.0."), and checks their shapes.
class WeightScope {
 public:
  explicit WeightScope(const WeightMap& weights, std::string prefix = "",
                       tensor::PackedFormat format = tensor::PackedFormat::kF32)
      : weights_(&weights), prefix_(std::move(prefix)), format_(format) {}

  WeightScope Under(const std::string& name) const {
    return WeightScope(*weights_, prefix_ + name + ".", format_);
  }
  bool Has(const std::string& name) const { return weights_->count(prefix_ + name) > 0; }
  /// Returns the tensor; fails if it is missing, or if `shape` is given and differs. -1 accepts any size.
  StatusOr<const WeightTensor*> Get(const std::string& name, const std::vector<int64_t>& shape = {}) const;
  StatusOr<std::vector<float>> Vector(const std::string& name, int64_t size) const;
  /// Packs NAME.weight [n, k] and NAME.bias [n], which may be absent. -1 accepts any size.
  StatusOr<Dense> Linear(const std::string& name, int64_t n = -1, int64_t k = -1) const;
  /// Reads NAME.weight and NAME.bias of a LayerNorm.
  StatusOr<Norm> LayerNorm(const std::string& name, int64_t n, float eps = 1e-5F) const;
  tensor::PackedFormat format() const { return format_; }

 private:
  const WeightMap* weights_;
  std::string prefix_;
  tensor::PackedFormat format_;
};

}  // namespace moesaic::science
