// Element types of tensors in files and in kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace moesaic::tensor {

/// Scalar types of safetensors, then the block types of GGUF, whose blocks of elements share scales.
enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kMxfp4,  ///< e8m0 scale, then e2m1: byte i has elements i (low) and i + 16
};

/// Elements per block and bytes per block: {1, 4} for kF32, {32, 34} for kQ8_0.
struct BlockSize {
  int elements;
  int bytes;
};
BlockSize BlockOf(DType dtype);

std::string DTypeName(DType dtype);  ///< Spelling of safetensors and GGUF: "F32", "BF16", "Q4_K".

/// Returns the bytes of `elements` consecutive elements, which must form whole blocks.
inline int64_t BytesOf(DType dtype, int64_t elements) {
  const BlockSize block = BlockOf(dtype);
  return elements / block.elements * block.bytes;
}

/// A bfloat16 stored as its 16 bits.
struct BF16 {
  uint16_t bits;
};

inline float ToFloat(BF16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

/// Rounds to nearest, ties to even; keeps NaN a NaN.
inline BF16 ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

float HalfToFloat(uint16_t bits);   ///< IEEE binary16, denormals included.
uint16_t FloatToHalf(float value);  ///< Rounds to nearest, ties to even.
float F8E4M3ToFloat(uint8_t bits);  ///< e4m3fn: no infinity, 0x7f and 0xff are NaN, largest 448.
float F8E5M2ToFloat(uint8_t bits);
/// Rounds to the nearest e4m3fn, ties to even. Magnitudes beyond 448 saturate; NaN becomes 0x7f.
uint8_t FloatToF8E4M3(float value);

}  // namespace moesaic::tensor
