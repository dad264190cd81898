// A rounded linear in the form that the engine runs after loading it. Calibration uses it for the forward
// pass.
#pragma once

#include <span>

#include "quantizer/calibrate/dense_layer.h"
#include "quantizer/format/scheme.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {

class RuntimeMatrix {
 public:
  /// Creates the matrix of a linear [n, k] on `grid`, packed in the format that the loader gives it.
  static StatusOr<RuntimeMatrix> OfRounded(const Grid& grid, int n, int k);
  /// Creates the matrix of a linear that is kept in f32 or bf16.
  static StatusOr<RuntimeMatrix> OfKept(tensor::DType dtype, int n, int k);
  static int64_t Bytes(const Grid& grid, int n, int k);

  /// Adds rows [first, first + matrix.n), where `first` is a multiple of 128. `encoded` holds their stored
  /// form, one pointer for each of `tensors` (EncodeRows). They are decoded as the loader decodes them.
  Status Add(runtime::ThreadPool& pool, int first, const QuantizedMatrix& matrix,
             std::span<const StoredTensor> tensors, std::span<std::byte* const> encoded);
  void AddKept(runtime::ThreadPool& pool, int first, int count, const float* rows);
  /// Reads all rows of `module` in bands. A value that is not finite is an error that states its position.
  Status ReadKept(runtime::ThreadPool& pool, const checkpoint::Checkpoint& source, const std::string& module);

  /// Sets the static scale of the linear's activations.
  void SetInputScale(float scale) { owned_.matrix.input_scale = tensor::StaticScale::Of(scale); }

  OwnedMatrix Take() { return std::move(owned_); }

 private:
  static StatusOr<RuntimeMatrix> Create(tensor::PackedFormat format, int n, int k);
  OwnedMatrix owned_;
};

}  // namespace moesaic::quantizer
