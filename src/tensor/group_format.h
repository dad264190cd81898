// Group-scaled weights: small codes with a scale for every 16 or 32 inputs of an output.
//
//   W[r, i] = Value(code[r, i]) * group scale[r, i / group] * output scale[r]
//
// A panel (16 outputs) is a run of units of 64 inputs. A unit is 64 bytes of scales, then its codes:
//
//   scales    [64 / group][16 outputs], f16 for groups of 32, e4m3 for groups of 16: one load is a group's
//   kQ4K      [2][16] u8 scales, then [2][16] u8 minima
//   kQ6K      [4][16] i8 scales
//   8 bits    [16][16 outputs][4 inputs], as the elements of int8 stand, but biased by 128 (unsigned)
//   4 bits    [8][16 outputs][4 bytes]: byte s of pair j holds input 8 j + s low and input 8 j + 4 + s high
//   6 bits    the low 4 bits so, then the high 2: [4][16 outputs][4 bytes], byte s of quad j holds inputs
//             16 j + s, + 4, + 8 and + 12 from its low bits up
//
// so that a stream of weights brings its scales along, and a register holds two groups of four inputs.
// kQ4K and kQ6K have 64 bytes before every fourth unit: f16 that multiply scales [16 outputs] and minima
// [16].
//
//   W = code * (scale * d) - minimum * dmin        (kQ4K; code not biased)
//   W = (code - 32) * (scale * d)                  (kQ6K)
//
// Kernels multiply unsigned codes + `zero` by signed activations and take zero x sum(activations) off again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/round.h"
#include "tensor/packed.h"

namespace moesaic::tensor {

inline constexpr int kUnitInputs = 64;
inline constexpr int kUnitScaleBytes = 64;
inline constexpr int kSuperUnits = 4;
inline constexpr int64_t kSuperBytes = 64;

struct GroupFormat {
  int group;         // inputs that share a scale: 16 or 32
  int code_bits;     // 4, 6 or 8
  int zero;          // what kernels add to twice the value (e2m1) or to the value to make it unsigned
  int scale_bytes;   // of a group of one output
  bool has_super;    // f16 scales of 256 inputs
  bool has_minimum;  // kQ4K

  int groups_per_unit() const { return kUnitInputs / group; }
  int64_t unit_bytes() const { return kUnitScaleBytes + int64_t{2} * kUnitInputs * code_bits; }
  int64_t unit_offset(int unit) const {  // in its panel
    return unit * unit_bytes() + (has_super ? kSuperBytes * (unit / kSuperUnits + 1) : 0);
  }
  int64_t panel_bytes(int k_padded) const {
    const int units = k_padded / kUnitInputs;
    return units * unit_bytes() + (has_super ? base::CeilDiv(units, kSuperUnits) * kSuperBytes : 0);
  }
};
const GroupFormat& GroupFormatOf(PackedFormat format);

/// e2m1 by its code, sign in bit 3 (OCP MX 1.0, table 2).
inline constexpr float kE2M1[16] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};

/// The nearest e2m1 code, ties to even codes, beyond 6 saturates.
uint8_t FloatToE2M1(float value);

/// Rows of codes and scales as they stand in a checkpoint, before they are packed.
struct GroupRows {
  int rows = 0, k = 0;
  std::vector<uint8_t> codes;    // [rows, k]: int8 + 128, int4 + 8, int6 + 32, kQ4K's and e2m1's as they are
  std::vector<uint16_t> scales;  // [rows, ceil(k / group)]: bits of f16, e4m3, u8 or i8, not NaN
  std::vector<uint8_t> minima;   // as scales, kQ4K only
  std::vector<uint16_t> supers;  // [rows, ceil(k / 256), 2]: bits of f16, of scales and of minima
  std::vector<float> output_scales;  // [rows], finite

  void Resize(PackedFormat format, int new_rows, int new_k);
};

/// Rounds values [rows, k] to the nearest codes. The scale of a group puts its largest magnitude at the end
/// of the codes: 127, -8 (as Q4_0), or 6, for kMxfp4 up to a power of two. Output scales are powers of two
/// that keep group scales near 1; for kNvfp4 amax / (448 x 6).
GroupRows QuantizeGroups(PackedFormat format, int rows, int k, const float* values);

/// Packs rows into `out`, which is laid out as `layout` and zeroed. first_row must be a multiple of 16. A
/// negative e4m3 scale changes the signs of its codes.
void PackGroupRows(const PackedLayout& layout, int first_row, const GroupRows& rows, std::byte* out);

/// Reads output `row` back as f32 [k].
void UnpackGroupRow(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
