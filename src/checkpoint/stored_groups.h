// Weights that a checkpoint stores in one of our formats with scales for groups of inputs: taken over code by
// code, never rounded.
#pragma once

#include <optional>

#include "checkpoint/checkpoint.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"

namespace moesaic::checkpoint {

/// The packed format that keeps what `source` stores: GGUF's Q8_0, Q4_0, Q4_K, Q6_K and MXFP4,
/// compressed-tensors' symmetric int4 in groups of whole 32s with f16 or bf16 scales, NVFP4, and FP8 whose
/// scales reach over whole 128s of inputs (DeepSeek's blocks). Nothing when there is none.
std::optional<tensor::PackedFormat> StoredFormat(const LinearSource& source);

/// Rows [first, first + count) of a source whose stored format is group-scaled. bf16 scales become f16 beside
/// a power of two for each output: exact down to 2^-17 of the output's largest; so do MXFP4's powers of two,
/// exact down to 2^-39.
Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, tensor::GroupRows& out);

/// Likewise of a source whose stored format is kF8G128.
Status ReadFp8Rows(const LinearSource& source, int64_t first, int64_t count, tensor::Fp8Rows& out);

}  // namespace moesaic::checkpoint
