// Dequantizes the block-quantized types of GGUF files to f32, bit for bit like ggml.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// Dequantizes `elements` consecutive elements (whole blocks) of F32, F16, BF16 or a ggml block type into
/// `out`.
void DequantizeBlocks(tensor::DType dtype, const std::byte* in, int64_t elements, float* out);

/// Decodes the 6-bit scale and minimum of sub-block j of a Q4_K or Q5_K block from its 12 packed bytes.
void ScaleMinK4(const uint8_t* packed, int j, int* scale, int* min);

}  // namespace moesaic::checkpoint
