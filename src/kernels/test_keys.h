// The keys of a block as the cache stores them, for tests of key summaries.
#pragma once

#include <vector>

#include "kernels/micro_kernels.h"
#include "tensor/dtype.h"

namespace moesaic::kernels {

/// 64 keys of key_dim dimensions; those from key_split on have their own scales (int8).
struct TestKeys {
  TestKeys(tensor::DType dtype, int key_dim, int key_split)
      : dtype(dtype),
        key_dim(key_dim),
        key_split(key_split),
        stride(tensor::BytesOf(dtype, key_dim) + 32),
        bytes(kBlockKeys * stride, std::byte{0}) {}

  float scale(int key, int d) const { return scales[(d < key_split ? 0 : kBlockKeys) + key]; }
  /// Stores the value for f32 and bf16, the code for int8.
  void Put(int key, int d, float x) {
    std::byte* to = bytes.data() + key * stride;
    if (dtype == tensor::DType::kF32) reinterpret_cast<float*>(to)[d] = x;
    if (dtype == tensor::DType::kBF16) reinterpret_cast<tensor::BF16*>(to)[d] = tensor::ToBF16(x);
    if (dtype == tensor::DType::kI8) reinterpret_cast<int8_t*>(to)[d] = static_cast<int8_t>(x);
  }
  double At(int key, int d) const {
    const std::byte* from = bytes.data() + key * stride;
    if (dtype == tensor::DType::kF32) return reinterpret_cast<const float*>(from)[d];
    if (dtype == tensor::DType::kBF16) return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(from)[d]);
    return static_cast<float>(reinterpret_cast<const int8_t*>(from)[d]) * scale(key, d);  // rounded to f32
  }
  KeySummaryTask Task(std::byte* summary) const {
    return {.keys = bytes.data(),
            .key_stride = stride,
            .kv_dtype = dtype,
            .key_dim = key_dim,
            .key_split = key_split,
            .key_scales = scales.data(),
            .rest_scales = scales.data() + kBlockKeys,
            .summary = summary};
  }

  tensor::DType dtype;
  int key_dim, key_split;
  int64_t stride;
  std::vector<std::byte> bytes;
  std::vector<float> scales;  // int8: [2][kBlockKeys]
};

}  // namespace moesaic::kernels
