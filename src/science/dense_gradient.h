// Gradients of linear layers and normalization, for the backward passes of layers. They run on the whole
// pool; every element is summed in an order that does not depend on the number of threads.
#pragma once

#include <map>
#include <string>

#include "science/weights.h"

namespace moesaic::science {

/// Gradients of parameters by their names in the state dict. An array has as many elements as the parameter
/// and is added to. Gradients of parameters without an array are not computed.
using GradientMap = std::map<std::string, std::span<float>>;

/// Returns the gradients under a prefix NAME. of the map, without it.
GradientMap GradientsUnder(const GradientMap& gradients, const std::string& name);

/// Looks gradients up by name under a prefix, as WeightScope does with weights.
class GradientScope {
 public:
  explicit GradientScope(const GradientMap& gradients, std::string prefix = "")
      : gradients_(&gradients), prefix_(std::move(prefix)) {}
  GradientScope Under(const std::string& name) const {
    return GradientScope(*gradients_, prefix_ + name + ".");
  }
  /// Returns null if the gradient is not wanted; fails if it has not `size` elements.
  StatusOr<float*> Get(const std::string& name, int64_t size) const;

 private:
  const GradientMap* gradients_;
  std::string prefix_;
};

/// Output buffers to which a linear layer's gradients are added; null: not computed.
struct DenseGradients {
  float* weight = nullptr;  ///< [n, k]
  float* bias = nullptr;    ///< [n]
  /// Looks up NAME.weight and NAME.bias.
  static StatusOr<DenseGradients> Find(const GradientScope& scope, const std::string& name,
                                       const Dense& dense);
};

/// Backward pass of y = x W^T + b. Owns a row-major copy of W: kernels pack it for the forward pass only.
class DenseBackward {
 public:
  explicit DenseBackward(const Dense& dense);
  int n() const { return n_; }
  int k() const { return k_; }
  const float* weight() const { return weight_.data(); }  ///< [n, k]
  /// x_grad [rows, k] = y_grad [rows, n] W, or += with accumulate.
  void Inputs(const graph::Context& ctx, const float* y_grad, int64_t y_stride, int64_t rows, float* x_grad,
              int64_t x_stride, bool accumulate = false) const;

 private:
  int n_, k_;
  std::vector<float> weight_;
};

/// Adds y_grad^T x and the column sums of y_grad [rows, n].
void AddWeightGradients(const graph::Context& ctx, const float* y_grad, int64_t y_stride, int n,
                        const float* x, int64_t x_stride, int k, int64_t rows, const DenseGradients& out);

/// grad[i] *= activation'(x[i]). For a ReLU, x may also be its result.
void ActivationBackward(const graph::Context& ctx, const float* x, int64_t count,
                        graph::Activation activation, float* grad);

/// Adds from [count] to out, which may be null.
void AddTo(const graph::Context& ctx, const float* from, int64_t count, float* out);

/// Adds sum_r scale[r] * x[r, :] to out [n]; scale may be null.
void AddColumnSums(const graph::Context& ctx, const float* x, int64_t x_stride, int64_t rows, int n,
                   const float* scale, float* out);

/// Output buffers to which LayerNorm's gradients are added; null: not computed.
struct NormGradients {
  float* gamma = nullptr;
  float* beta = nullptr;
  static StatusOr<NormGradients> Find(const GradientScope& scope, const std::string& name, const Norm& norm);
};
/// x_grad [rows, n] += the gradient of y = LayerNorm(x) for y_grad. x_grad may be null, and may not overlap
/// y_grad.
void NormBackward(const graph::Context& ctx, const Norm& norm, const float* x, const float* y_grad,
                  int64_t rows, float* x_grad, const NormGradients& out);

}  // namespace moesaic::science
