// Element-wise reductions of two buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "tensor/dtype.h"

namespace moesaic::comm {

enum class ReduceOp : uint8_t { kSum, kProduct, kMin, kMax };
std::string_view Name(ReduceOp op);

/// target[i] = op(target[i], source[i]) for `count` elements. The buffers are aligned to the element and
/// disjoint. Integers wrap. bf16 and f16 are computed in f32 and rounded to nearest even. Min and max
/// are those of IEEE 754-2019 for all orders of operands: -0 is less than +0, and a NaN is the result.
using ReduceKernel = void (*)(std::byte* target, const std::byte* source, int64_t count);

/// Returns the kernel for F64, F32, F16, BF16, I64, I32, I8 or U8. Unimplemented for other types.
StatusOr<ReduceKernel> FindReduceKernel(tensor::DType dtype, ReduceOp op);

}  // namespace moesaic::comm
