// The block-quantised types of GGUF files, turned back into f32 exactly as ggml does it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// Dequantises `elements` consecutive elements (whole blocks) of F32, F16, BF16 or a ggml block type into
/// `out`.
void DequantizeBlocks(tensor::DType dtype, const std::byte* in, int64_t elements, float* out);

}  // namespace moesaic::checkpoint
