// Loads and stores single elements of features.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace moesaic::graph {

inline bool IsFeatureType(tensor::DType dtype) {
  return dtype == tensor::DType::kF32 || dtype == tensor::DType::kBF16 || dtype == tensor::DType::kF16;
}

inline float LoadElement(const void* data, tensor::DType dtype, int64_t at) {
  if (dtype == tensor::DType::kF32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return dtype == tensor::DType::kBF16 ? tensor::ToFloat(tensor::BF16{bits}) : tensor::HalfToFloat(bits);
}

inline void StoreElement(void* data, tensor::DType dtype, int64_t at, float value) {
  if (dtype == tensor::DType::kF32) {
    static_cast<float*>(data)[at] = value;
  } else if (dtype == tensor::DType::kBF16) {
    static_cast<uint16_t*>(data)[at] = tensor::ToBF16(value).bits;
  } else {
    static_cast<uint16_t*>(data)[at] = tensor::FloatToHalf(value);
  }
}

}  // namespace moesaic::graph
