// Constants of the group-scaled formats for kernels, and the layout of their activations
// (tensor/group_format.h).
//
// A prepared row of k inputs holds s8 elements [k_padded], f32 scales per 32 inputs [k_padded / 32], and i32
// corrections [k_padded / kGroup]. A correction is -kZero times the sum of a group's elements: the initial
// value of a dot product of biased codes, so that it ends as the dot product of the values. For formats with
// minima, corrections are f32: the sum of a group's elements times their scale.
//
// All instruction sets use one expression, so that their results have the same bits and a row's result does
// not depend on the number of rows. For the groups g of an output in order, from acc = 0:
//
//   acc = fma(float(dot) * activation_scale, group_scale, acc)
//   acc = fma(-correction, group_minimum, acc)                   with minima
//
// and finally C = acc * (kUnit * output_scale), where dot is an exact integer and kUnit a power of two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kUnitInputs = 64;
constexpr int kUnitScaleBytes = 64;
constexpr int kActivationGroup = 32;
constexpr int kSuperUnits = 4;
constexpr int64_t kSuperBytes = 64;

enum class GroupScale {
  kHalf,   // f16
  kE4M3,   // not negative; its bits, shifted by 7, are an f16 of 2^-8 times its value
  kSuper,  // u8 (kMinimum) or i8, times an f16 per 256 inputs
};

/// Defaults of the formats; each format overrides some.
struct GroupDefaults {
  static constexpr int kGroup = 32, kBits = 4;
  static constexpr bool kTable = false, kMinimum = false;
  static constexpr GroupScale kScale = GroupScale::kHalf;
  static constexpr float kUnit = 1;
};
struct I8G32 : GroupDefaults {
  static constexpr int kBits = 8, kZero = 128;
};
struct I4G32 : GroupDefaults {
  static constexpr int kZero = 8;
};
// e2m1 is looked up as twice its value.
struct Mxfp4 : GroupDefaults {
  static constexpr int kZero = 12;
  static constexpr bool kTable = true;
  static constexpr float kUnit = 0.5F;
};
struct Nvfp4 : Mxfp4 {
  static constexpr int kGroup = 16;
  static constexpr GroupScale kScale = GroupScale::kE4M3;
  static constexpr float kUnit = Mxfp4::kUnit * 256;
};
struct Q4K : GroupDefaults {
  static constexpr int kZero = 0;
  static constexpr bool kMinimum = true;
  static constexpr GroupScale kScale = GroupScale::kSuper;
};
struct Q6K : GroupDefaults {
  static constexpr int kGroup = 16, kBits = 6, kZero = 32;
  static constexpr GroupScale kScale = GroupScale::kSuper;
};

template <typename Format>
constexpr int kUnitBytes = kUnitScaleBytes + 2 * kUnitInputs* Format::kBits;
template <typename Format>
constexpr bool kHasSuper = Format::kScale == GroupScale::kSuper;

/// Return the unit of inputs [64 unit, 64 unit + 64) of a panel, and the f16 factors of its 256 inputs, if
/// any: [16 outputs] of scales, then [16] of minima.
template <typename Format>
inline const std::byte* UnitAt(const std::byte* panel, int unit) {
  const int64_t supers = kHasSuper<Format> ? kSuperBytes * (unit / kSuperUnits + 1) : 0;
  return panel + int64_t{unit} * kUnitBytes<Format> + supers;
}
template <typename Format>
inline const std::byte* SuperAt(const std::byte* panel, int unit) {
  return UnitAt<Format>(panel, unit / kSuperUnits * kSuperUnits) - kSuperBytes;
}

/// Stores the correction of group `g`, whose elements have the sum `sum`; see above.
template <typename Format>
inline void StoreCorrection(int32_t sum, float scale, int64_t g, std::byte* corrections) {
  if constexpr (Format::kMinimum) {
    const float value = static_cast<float>(sum) * scale;
    __builtin_memcpy(corrections + 4 * g, &value, 4);
  } else {
    const int32_t value = -Format::kZero * sum;
    __builtin_memcpy(corrections + 4 * g, &value, 4);
  }
}

/// Twice the value of each e2m1 code, plus 12.
alignas(16) constexpr uint8_t kE2M1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
}  // namespace moesaic::kernels::cpu
