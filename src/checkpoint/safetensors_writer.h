// Writes a plain safetensors file, the way Hub checkpoints are stored.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// A tensor to be written and where its bytes come from.
struct TensorOutput {
  std::string name;
  tensor::DType dtype;  // a scalar type
  std::vector<int64_t> shape;
  std::function<std::vector<std::byte>()> bytes;  // called once, when its turn comes
};

/// A tensor that keeps a copy of `values`.
TensorOutput HeldTensor(std::string name, tensor::DType dtype, std::vector<int64_t> shape,
                        std::span<const std::byte> values);

/// Writes all tensors in order. The file appears under `path` only when complete.
Status WriteSafetensors(const std::string& path, const std::vector<TensorOutput>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace moesaic::checkpoint
