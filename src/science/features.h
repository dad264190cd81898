// Borrowed views of the arrays that graph operators read and write.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace moesaic::graph {

/// Index array of a caller, int32 or int64.
struct Indices {
  const void* data = nullptr;
  int64_t size = 0;
  bool wide = false;  ///< Elements are int64.

  static Indices Of(const int32_t* data, int64_t size) { return {data, size, false}; }
  static Indices Of(const int64_t* data, int64_t size) { return {data, size, true}; }
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// Feature matrix [rows, cols] of f32, bf16 or f16. Elements of a row are contiguous.
struct Features {
  const void* data = nullptr;
  tensor::DType dtype = tensor::DType::kF32;
  int64_t rows = 0, cols = 0;
  int64_t stride = 0;  ///< Elements between rows.

  bool empty() const { return data == nullptr; }
};

/// Writable feature matrix.
struct Output {
  void* data = nullptr;
  tensor::DType dtype = tensor::DType::kF32;
  int64_t rows = 0, cols = 0;
  int64_t stride = 0;  ///< Elements between rows.

  bool empty() const { return data == nullptr; }
  operator Features() const { return {data, dtype, rows, cols, stride}; }  // NOLINT: a read-only view
};

inline Features View(const float* data, int64_t rows, int64_t cols) {
  return {data, tensor::DType::kF32, rows, cols, cols};
}
inline Output View(float* data, int64_t rows, int64_t cols) {
  return {data, tensor::DType::kF32, rows, cols, cols};
}

}  // namespace moesaic::graph
