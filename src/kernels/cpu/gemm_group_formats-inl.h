// The group-scaled formats as kernels see them, and the activations that go with them (tensor/group_format.h).
//
// A prepared row of k inputs: s8 elements [k_padded], f32 scales of 32 inputs [k_padded / 32], and i32
// corrections [k_padded / kGroup], -kZero times the sum of a group's elements: what a dot product of biased
// codes begins with, so that it ends as the dot product of the values.
//
// One expression for all instruction sets, so that their results are the same bits and a row's result does not
// depend on how many rows stand beside it. For the groups g of an output in order, from acc = 0:
//
//   acc = fma(float(dot) * activation_scale, float(group_scale), acc)
//
// and at the end C = acc * (kUnit * output_scale), where dot is an exact integer and kUnit a power of two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kUnitInputs = 64;
constexpr int kUnitScaleBytes = 64;
constexpr int kActivationGroup = 32;

struct I8G32 {
  static constexpr int kGroup = 32, kBits = 8, kZero = 128;
  static constexpr bool kTable = false, kE4M3 = false;
  static constexpr float kUnit = 1;
};
struct I4G32 {
  static constexpr int kGroup = 32, kBits = 4, kZero = 8;
  static constexpr bool kTable = false, kE4M3 = false;
  static constexpr float kUnit = 1;
};
// e2m1 is looked up as twice its value.
struct Mxfp4 {
  static constexpr int kGroup = 32, kBits = 4, kZero = 12;
  static constexpr bool kTable = true, kE4M3 = false;
  static constexpr float kUnit = 0.5F;
};
// The bits of an e4m3 that is not negative, shifted by 7, are an f16 of 2^-8 its value.
struct Nvfp4 {
  static constexpr int kGroup = 16, kBits = 4, kZero = 12;
  static constexpr bool kTable = true, kE4M3 = true;
  static constexpr float kUnit = 0.5F * 256;
};

template <typename Format>
constexpr int kUnitBytes = kUnitScaleBytes + 2 * kUnitInputs * Format::kBits;

/// Twice the value of each e2m1 code, plus 12.
alignas(16) constexpr uint8_t kE2M1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
}  // namespace moesaic::kernels::cpu
