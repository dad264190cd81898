// Group-scaled weights: small codes with a scale for every 16 or 32 inputs of an output.
//
//   W[r, i] = Value(code[r, i]) * group scale[r, i / group] * output scale[r]
//
// A panel (16 outputs) is a run of units of 64 inputs. A unit is 64 bytes of scales, then its codes:
//
//   scales    [64 / group][16 outputs], f16 for groups of 32, e4m3 for groups of 16: one load is a group's
//   8 bits    [16][16 outputs][4 inputs], as the elements of int8 stand, but biased by 128 (unsigned)
//   4 bits    [8][16 outputs][4 bytes]: byte s of pair j holds input 8 j + s low and input 8 j + 4 + s high
//
// so that a stream of weights brings its scales along, and a register holds two groups of four inputs.
// Kernels multiply unsigned codes + `zero` by signed activations and take zero x sum(activations) off again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/packed.h"

namespace moesaic::tensor {

inline constexpr int kUnitInputs = 64;
inline constexpr int kUnitScaleBytes = 64;

struct GroupFormat {
  int group;      // inputs that share a scale: 16 (e4m3 scales) or 32 (f16 scales)
  int code_bits;  // 4 or 8
  int zero;       // what kernels add to twice the value (e2m1) or to the value to make it unsigned

  int groups_per_unit() const { return kUnitInputs / group; }
  int64_t unit_bytes() const { return kUnitScaleBytes + int64_t{2} * kUnitInputs * code_bits; }
};
const GroupFormat& GroupFormatOf(PackedFormat format);

/// e2m1 by its code, sign in bit 3 (OCP MX 1.0, table 2).
inline constexpr float kE2M1[16] = {0,  0.5F,  1,  1.5F,  2,  3,  4,  6,
                                    -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};

/// Rows of codes and scales as they stand in a checkpoint, before they are packed.
struct GroupRows {
  int rows = 0, k = 0;
  std::vector<uint8_t> codes;    // [rows, k]: int8 + 128, int4 + 8, or e2m1 codes
  std::vector<uint16_t> scales;  // [rows, ceil(k / group)]: bits of f16 or e4m3, not NaN
  std::vector<float> output_scales;  // [rows], finite

  void Resize(PackedFormat format, int new_rows, int new_k);
};

/// Rounds values [rows, k] to the nearest codes. The scale of a group puts its largest magnitude at the end of
/// the codes: 127, -8 (as Q4_0), or 6, for kMxfp4 up to a power of two. Output scales are powers of two that
/// keep group scales near 1; for kNvfp4 amax / (448 x 6).
GroupRows QuantizeGroups(PackedFormat format, int rows, int k, const float* values);

/// Packs rows into `out`, which is laid out as `layout` and zeroed. first_row must be a multiple of 16. A
/// negative e4m3 scale changes the signs of its codes.
void PackGroupRows(const PackedLayout& layout, int first_row, const GroupRows& groups, std::byte* out);

/// Reads output `row` back as f32 [k].
void UnpackGroupRow(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
