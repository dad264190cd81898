#include "tensor/dtype.h"

#include <cmath>
#include <limits>

#include "base/check.h"

namespace moesaic::tensor {
namespace {

struct Traits {
  const char* name;
  BlockSize block;
};

// In the order of DType. Block bytes follow ggml: scales (f16, or 6-bit packed for K types) and quants.
constexpr Traits kTraits[] = {
    {"F64", {1, 8}},      {"F32", {1, 4}},      {"F16", {1, 2}},      {"BF16", {1, 2}},
    {"F8_E4M3", {1, 1}},  {"F8_E5M2", {1, 1}},  {"I64", {1, 8}},      {"I32", {1, 4}},
    {"I16", {1, 2}},      {"I8", {1, 1}},       {"U8", {1, 1}},       {"BOOL", {1, 1}},
    {"Q4_0", {32, 18}},   {"Q4_1", {32, 20}},   {"Q5_0", {32, 22}},   {"Q5_1", {32, 24}},
    {"Q8_0", {32, 34}},   {"Q2_K", {256, 84}},  {"Q3_K", {256, 110}}, {"Q4_K", {256, 144}},
    {"Q5_K", {256, 176}}, {"Q6_K", {256, 210}}, {"MXFP4", {32, 17}},
};
static_assert(std::size(kTraits) == static_cast<size_t>(DType::kMxfp4) + 1);

const Traits& TraitsOf(DType dtype) {
  MOESAIC_CHECK_LT(static_cast<size_t>(dtype), std::size(kTraits));
  return kTraits[static_cast<size_t>(dtype)];
}

}  // namespace

BlockSize BlockOf(DType dtype) { return TraitsOf(dtype).block; }
std::string DTypeName(DType dtype) { return TraitsOf(dtype).name; }

float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0) {  // zero or denormal: mantissa x 2^-24, exact in f32
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x477ff000U)
    return static_cast<uint16_t>(sign | 0x7c00U);  // 65520 and larger round to infinity
  if (magnitude < 0x38800000U) {
    // Below 2^-14: adding 0.5 leaves the value in units of 2^-24 in the sum's low bits, rounded to nearest
    // even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

float F8E4M3ToFloat(uint8_t bits) {
  const uint32_t sign = (bits & 0x80U) << 24, magnitude = bits & 0x7fU;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000U);
  if (magnitude < 8) {  // denormal, in units of 2^-9
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9F));
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000U));
}

uint8_t FloatToF8E4M3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 0x7f;
  if (magnitude >= 0x43e00000U) return static_cast<uint8_t>(sign | 0x7e);  // 448 and larger
  if (magnitude < 0x3c800000U) {
    // Below 2^-6: adding 2^14 leaves the value in units of 2^-9 in the sum's low bits, rounded to even.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000U));
  }
  const uint32_t rounded = magnitude + 0x7ffffU + (magnitude >> 20 & 1U);
  return static_cast<uint8_t>(sign | (rounded - 0x3c000000U) >> 20);
}

// e5m2 is the upper byte of an IEEE half.
float F8E5M2ToFloat(uint8_t bits) { return HalfToFloat(static_cast<uint16_t>(bits << 8)); }

}  // namespace moesaic::tensor
