// Writes plain safetensors files like those of Hub checkpoints.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// A tensor to write and the source of its bytes.
struct TensorOutput {
  std::string name;
  tensor::DType dtype;  // a scalar type
  std::vector<int64_t> shape;
  std::function<std::vector<std::byte>()> bytes;  // called once, when the tensor is written
};

/// Returns a tensor that holds a copy of `values`.
TensorOutput HeldTensor(std::string name, tensor::DType dtype, std::vector<int64_t> shape,
                        std::span<const std::byte> values);

/// Writes all tensors in order. The file appears under `path` only when it is complete.
Status WriteSafetensors(const std::string& path, const std::vector<TensorOutput>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace moesaic::checkpoint
