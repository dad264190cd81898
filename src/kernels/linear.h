// Linear operators: quantization of activations and products with packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec_context.h"
#include "tensor/packed.h"
#include "tensor/static_scale.h"

namespace moesaic::kernels {

/// Activations quantized once and shared by all matrices with the same format and k (q/k/v, gate/up).
struct QuantizedActivations {
  tensor::PackedFormat format;
  int rows = 0;
  int k = 0;
  int k_padded = 0;
  int64_t stride = 0;         // bytes between rows
  std::span<std::byte> data;  // [rows][stride]
  std::span<float> scales;    // [rows], kI8 only
};

/// Quantizes x [rows, k] (row stride x_stride floats) for `format`. The memory comes from ctx.scratch and is
/// valid until the caller rewinds it. static_scale is described at PrepareRowFn.
QuantizedActivations QuantizeActivations(const ExecContext& ctx, tensor::PackedFormat format, const float* x,
                                         int64_t x_stride, int rows, int k,
                                         tensor::StaticScale static_scale = {});

/// C [rows, n] = A W^T (+ bias), or C += with accumulate.
struct LinearParams {
  const QuantizedActivations* a;  // [rows, k], in the format of w
  const tensor::PackedMatrix* w;  // [n, k]
  const float* bias = nullptr;    // [n] or null
  float* c;                       // [rows, c_stride]
  int64_t c_stride;               // floats
  bool accumulate = false;
};
void Linear(const ExecContext& ctx, const LinearParams& params);

/// Runs several independent linears in one parallel loop (q/k/v; per-head MLA absorption).
void LinearGroup(const ExecContext& ctx, std::span<const LinearParams> group);

}  // namespace moesaic::kernels
