// Layout of group-scaled weights: small codes with one scale per 16 or 32 inputs of an output.
//
//   W[r, i] = Value(code[r, i]) * group scale[r, i / group] * output scale[r]
//
// A panel (16 outputs) is a sequence of units of 64 inputs. A unit holds 64 bytes of scales, then its codes:
//
//   scales    [64 / group][16 outputs], f16 for groups of 32, e4m3 for groups of 16: one load per group
//   kQ4K      [2][16] u8 scales, then [2][16] u8 minima
//   kQ6K      [4][16] i8 scales
//   8 bits    [16][16 outputs][4 inputs], like int8 elements, but biased by 128 (unsigned)
//   4 bits    [8][16 outputs][4 bytes]: byte s of pair j holds input 8 j + s low and input 8 j + 4 + s high
//   6 bits    the low 4 bits as above, then the high 2: [4][16 outputs][4 bytes], byte s of quad j holds
//             inputs 16 j + s, + 4, + 8 and + 12 from its low bits up
//
// A stream of weights therefore contains its scales, and a register holds two groups of four inputs. kQ4K and
// kQ6K have 64 extra bytes before every fourth unit: f16 factors of the scales [16 outputs] and of the minima
// [16].
//
//   W = code * (scale * d) - minimum * dmin        (kQ4K; code not biased)
//   W = (code - 32) * (scale * d)                  (kQ6K)
//
// Kernels multiply unsigned codes + `zero` by signed activations and then subtract zero x sum(activations).
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
  int zero;          // offset that kernels add to the value (e2m1: to twice the value) to make it unsigned
  int scale_bytes;   // bytes of one group's scale of one output
  bool has_super;    // whether f16 factors of 256 inputs multiply the scales
  bool has_minimum;  // only kQ4K

  int groups_per_unit() const { return kUnitInputs / group; }
  int64_t unit_bytes() const { return kUnitScaleBytes + int64_t{2} * kUnitInputs * code_bits; }
  int64_t unit_offset(int unit) const {  // offset from the start of the panel
    return unit * unit_bytes() + (has_super ? kSuperBytes * (unit / kSuperUnits + 1) : 0);
  }
  int64_t panel_bytes(int k_padded) const {
    const int units = k_padded / kUnitInputs;
    return units * unit_bytes() + (has_super ? base::CeilDiv(units, kSuperUnits) * kSuperBytes : 0);
  }
};
const GroupFormat& GroupFormatOf(PackedFormat format);

/// e2m1 values by code; the sign is bit 3 (OCP MX 1.0, table 2).
inline constexpr float kE2M1[16] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};

/// Returns the nearest e2m1 code, ties to even codes; magnitudes beyond 6 saturate.
uint8_t FloatToE2M1(float value);

/// Rows of codes and scales as a checkpoint stores them, before packing.
struct GroupRows {
  int rows = 0, k = 0;
  std::vector<uint8_t> codes;    // [rows, k]: int8 + 128, int4 + 8, int6 + 32; kQ4K's and e2m1's without bias
  std::vector<uint16_t> scales;  // [rows, ceil(k / group)]: bits of f16, e4m3, u8 or i8, no NaN
  std::vector<uint8_t> minima;   // shaped like scales, kQ4K only
  std::vector<uint16_t> supers;  // [rows, ceil(k / 256), 2]: f16 bits of the factors of scales and of minima
  std::vector<float> output_scales;  // [rows], finite

  void Resize(PackedFormat format, int new_rows, int new_k);
  /// Returns columns [first, first + count); first is a multiple of ScaledInputs(format).
  GroupRows Columns(PackedFormat format, int first, int count) const;
};

/// Quantizes values [rows, k] to the nearest codes. A group's scale maps its largest magnitude to the end of
/// the code range: 127, -8 (like Q4_0) or 6. For kMxfp4 the scale is rounded to a power of two. Output scales
/// are powers of two that keep group scales near 1; for kNvfp4 they are amax / (448 x 6).
GroupRows QuantizeGroups(PackedFormat format, int rows, int k, const float* values);

/// Packs rows into `out`, which must have layout `layout` and be zeroed. first_row must be a multiple of 16.
/// A negative e4m3 scale becomes positive and the signs of its codes flip.
void PackGroupRows(const PackedLayout& layout, int first_row, const GroupRows& rows, std::byte* out);

/// Dequantizes output `row` to f32 [k].
void UnpackGroupRow(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
