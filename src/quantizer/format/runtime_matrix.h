// A rounded linear as the engine runs it once it is loaded: calibration goes on through it.
#pragma once

#include <span>

#include "quantizer/calibrate/dense_layer.h"
#include "quantizer/format/scheme.h"

namespace moesaic::quantizer {

class RuntimeMatrix {
 public:
  /// Of a linear [n, k] on `grid`, packed in the format that loading gives it.
  static StatusOr<RuntimeMatrix> OfRounded(const Grid& grid, int n, int k);
  /// Of one that is kept, in f32 or bf16.
  static StatusOr<RuntimeMatrix> OfKept(tensor::DType dtype, int n, int k);
  static int64_t Bytes(const Grid& grid, int n, int k);

  /// Adds rows [first, first + matrix.n), first a multiple of 128, whose stored form is in `encoded`, one for
  /// each of `tensors` (EncodeRows). They are read as loading reads them.
  Status Add(runtime::ThreadPool& pool, int first, const QuantizedMatrix& matrix,
             std::span<const StoredTensor> tensors, std::span<std::byte* const> encoded);
  void AddKept(runtime::ThreadPool& pool, int first, int count, const float* rows);
  /// All rows of `module`, some at a time. A value that is not finite is an error that says where it stands.
  Status ReadKept(runtime::ThreadPool& pool, const checkpoint::Checkpoint& source, const std::string& module);

  /// The static scale of the linear's activations.
  void SetInputScale(float scale) { owned_.matrix.input_scale = tensor::StaticScale::Of(scale); }

  OwnedMatrix Take() { return std::move(owned_); }

 private:
  static StatusOr<RuntimeMatrix> Create(tensor::PackedFormat format, int n, int k);
  OwnedMatrix owned_;
};

}  // namespace moesaic::quantizer
