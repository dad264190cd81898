// Weights that a checkpoint stores in one of our formats with scales for groups of inputs: taken over code by
// code. No code is rounded, and no scale but f32 ones of int4 and int8 groups.
#pragma once

#include <optional>

#include "checkpoint/checkpoint.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"

namespace moesaic::checkpoint {

/// The packed format that keeps what `source` stores: GGUF's Q8_0, Q4_0, Q4_K, Q6_K and MXFP4,
/// compressed-tensors' symmetric int4 and int8 in groups of whole 32s or one for an output, NVFP4, and FP8
/// whose scales reach over whole 128s of inputs (DeepSeek's blocks). Nothing when there is none.
std::optional<tensor::PackedFormat> StoredFormat(const LinearSource& source);

/// Rows [first, first + count) of a source whose stored format is group-scaled. One scale for an output stays
/// as it is. Of several, f16 ones do; bf16 ones become f16 beside a power of two for each output, exact down
/// to 2^-17 of the output's largest; and f32 ones likewise, with a relative error of 2^-11 down to 2^-14 of
/// it. So a code c of a group, which stands for c scales, is off by at most c / 2048 of them: 1/16 of a scale
/// for int8 and 1/256 for int4, where rounding a weight to its code is off by 1/2. MXFP4's powers of two are
/// exact down to 2^-39 of the output's largest.
Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, tensor::GroupRows& out);

/// Likewise of a source whose stored format is kF8G128.
Status ReadFp8Rows(const LinearSource& source, int64_t first, int64_t count, tensor::Fp8Rows& out);

}  // namespace moesaic::checkpoint
