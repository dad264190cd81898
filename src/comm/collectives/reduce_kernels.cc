#include "comm/collectives/reduce_kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

namespace moesaic::comm {
namespace {

using tensor::DType;

struct Half {
  uint16_t bits;
};
float Load(Half value) { return tensor::HalfToFloat(value.bits); }
float Load(tensor::BF16 value) { return tensor::ToFloat(value); }
template <typename T>
T Load(T value) {
  return value;
}

template <typename T, typename Compute>
T Store(Compute value) {
  if constexpr (std::is_same_v<T, Half>) {
    return {tensor::FloatToHalf(value)};
  } else if constexpr (std::is_same_v<T, tensor::BF16>) {
    return tensor::ToBF16(value);
  } else {
    return static_cast<T>(value);
  }
}

// The minimum and maximum of IEEE 754-2019: -0 is less than +0, and a NaN is the result. So ranks that take
// the operands in different orders agree. The two orders of a comparison differ for such operands only. Then
// the bits of both are combined: a NaN stays one, and of two zeros the negative one is the minimum.
template <ReduceOp kOp, typename T>
T Extreme(T a, T b) {
  constexpr bool kIsMin = kOp == ReduceOp::kMin;
  const T first = (kIsMin ? b < a : a < b) ? b : a;
  if constexpr (std::is_integral_v<T>) {
    return first;
  } else {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    constexpr Bits kFlipped = kIsMin ? 0 : Bits{1} << (8 * sizeof(T) - 1);  // max(a, b) = -min(-a, -b)
    const T second = (kIsMin ? a < b : b < a) ? a : b;
    const Bits either = (std::bit_cast<Bits>(first) ^ kFlipped) | (std::bit_cast<Bits>(second) ^ kFlipped);
    return std::bit_cast<T>(either ^ kFlipped);
  }
}

// Sums and products of integers are computed without a sign, where overflow is defined.
template <ReduceOp kOp, typename T>
T Combine(T a, T b) {
  if constexpr (kOp == ReduceOp::kMin || kOp == ReduceOp::kMax) return Extreme<kOp>(a, b);
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    const auto x = static_cast<Unsigned>(a), y = static_cast<Unsigned>(b);
    return static_cast<T>(kOp == ReduceOp::kSum ? x + y : x * y);
  } else {
    return kOp == ReduceOp::kSum ? a + b : a * b;
  }
}

template <ReduceOp kOp, typename T>
void Reduce(std::byte* target, const std::byte* source, int64_t count) {
  T* __restrict const to = reinterpret_cast<T*>(target);                // NOLINT
  const T* __restrict const from = reinterpret_cast<const T*>(source);  // NOLINT
  for (int64_t i = 0; i < count; ++i) to[i] = Store<T>(Combine<kOp>(Load(to[i]), Load(from[i])));
}

template <typename T>
ReduceKernel KernelOf(ReduceOp op) {
  static constexpr std::array<ReduceKernel, 4> kKernels = {
      Reduce<ReduceOp::kSum, T>, Reduce<ReduceOp::kProduct, T>, Reduce<ReduceOp::kMin, T>,
      Reduce<ReduceOp::kMax, T>};
  return kKernels[static_cast<size_t>(op)];
}

}  // namespace

std::string_view Name(ReduceOp op) {
  static constexpr std::array<std::string_view, 4> kNames = {"sum", "product", "min", "max"};
  return kNames[static_cast<size_t>(op)];
}

StatusOr<ReduceKernel> FindReduceKernel(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kF64:
      return KernelOf<double>(op);
    case DType::kF32:
      return KernelOf<float>(op);
    case DType::kF16:
      return KernelOf<Half>(op);
    case DType::kBF16:
      return KernelOf<tensor::BF16>(op);
    case DType::kI64:
      return KernelOf<int64_t>(op);
    case DType::kI32:
      return KernelOf<int32_t>(op);
    case DType::kI8:
      return KernelOf<int8_t>(op);
    case DType::kU8:
      return KernelOf<uint8_t>(op);
    default:
      return Unimplemented("reductions take F64, F32, F16, BF16, I64, I32, I8 or U8; found {}",
                           tensor::DTypeName(dtype));
  }
}

}  // namespace moesaic::comm
