// Linear layers and normalization on f32 rows, over the packed matrix products of the kernels room.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "science/graph_kernels.h"
#include "tensor/packed.h"

namespace moesaic::science {

/// y = x W^T + b. Owns the packed weights. Products run on f32, bf16 or int8 weights; x and y are f32.
class Dense {
 public:
  Dense() = default;
  /// Packs weight [n, k] (row-major) and bias [n] (or empty).
  static StatusOr<Dense> Pack(int n, int k, std::span<const float> weight, std::span<const float> bias,
                              tensor::PackedFormat format = tensor::PackedFormat::kF32);

  bool empty() const { return matrix_.empty(); }
  int n() const { return matrix_.n(); }
  int k() const { return matrix_.k(); }
  const tensor::PackedMatrix& matrix() const { return matrix_; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  tensor::PackedMatrix matrix_;
  runtime::Buffer buffer_;
  std::vector<float> bias_;
};

/// Returns columns [first, first + count) of a matrix [rows, columns], contiguous.
std::vector<float> ColumnsOf(std::span<const float> matrix, int rows, int columns, int first, int count);

/// y [rows, n] = x [rows, k] W^T + b on the whole pool, or y += with accumulate. Strides are in floats.
void Apply(const graph::Context& ctx, const Dense& dense, const float* x, int64_t x_stride, int64_t rows,
           float* y, int64_t y_stride, bool accumulate = false);

/// Runs Dense layers on tiles of rows inside a task of the pool. One per worker.
class TileDense {
 public:
  /// Allocates scratch memory for tiles of at most `rows` rows and layers of at most `k` inputs in `format`.
  TileDense(const graph::Context& ctx, tensor::PackedFormat format, int rows, int k);
  /// y [rows, n] = x [rows, k] W^T + b. y may not overlap x.
  void Run(const Dense& dense, const float* x, int64_t x_stride, int rows, float* y, int64_t y_stride) const;

 private:
  const kernels::KernelTable* kernels_;
  std::span<std::byte> rows_;
  std::span<float> scales_;
};

/// Normalization weights of LayerNorm.
struct Norm {
  std::vector<float> gamma, beta;  ///< [n] each
  float eps = 1e-5F;
};
/// y [rows, n] = LayerNorm(x) inside a task of the pool; y may be x.
void NormalizeRows(const graph::Context& ctx, const Norm& norm, const float* x, int64_t rows, float* y);
/// The same on the whole pool.
void Apply(const graph::Context& ctx, const Norm& norm, const float* x, int64_t rows, float* y);

/// y[i] = activation(x[i]) for `count` floats on the whole pool; y may be x.
void Activate(const graph::Context& ctx, const float* x, int64_t count, graph::Activation activation,
              float* y);
inline void Activate(const graph::Context& ctx, float* y, int64_t count, graph::Activation activation) {
  Activate(ctx, y, count, activation, y);
}

}  // namespace moesaic::science
