// Reads weights that a checkpoint stores in one of our group-scaled formats, code by code. No code is
// rounded, and of the scales only f32 ones of int4 and int8 groups are.
#pragma once

#include <optional>

#include "checkpoint/checkpoint.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"

namespace moesaic::checkpoint {

/// Returns the packed format that preserves the stored codes of `source`, or nullopt if there is none. It
/// covers:
/// - GGUF's Q8_0, Q4_0, Q4_K, Q6_K and MXFP4;
/// - compressed-tensors' symmetric int4 and int8 in groups of multiples of 32, or with one scale per output;
/// - NVFP4;
/// - FP8 whose scales cover multiples of 128 inputs (DeepSeek's blocks).
std::optional<tensor::PackedFormat> StoredFormat(const LinearSource& source);

/// Reads rows [first, first + count) of a source whose stored format is group-scaled. Scales are converted as
/// follows:
/// - A single scale per output is kept.
/// - f16 group scales are kept.
/// - bf16 group scales become f16 with a power of two per output, exact down to 2^-17 of the output's largest
///   scale.
/// - f32 group scales become f16 likewise, with a relative error of 2^-11 down to 2^-14 of the largest.
/// - MXFP4's powers of two are exact down to 2^-39 of the output's largest scale.
///
/// For f32 scales a code c is therefore off by at most c / 2048 scales: 1/16 of a scale for int8 and 1/256
/// for int4. Rounding a weight to its code is off by 1/2.
Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, tensor::GroupRows& out);

/// Reads rows [first, first + count) of a source whose stored format is kF8G128.
Status ReadFp8Rows(const LinearSource& source, int64_t first, int64_t count, tensor::Fp8Rows& out);

}  // namespace moesaic::checkpoint
