// Layout of FP8 (e4m3) weights with one f32 scale per 128 inputs of an output. It covers DeepSeek's blocks of
// 128 x 128 and per-channel scales.
//
//   W[r, i] = Value(code[r, i]) * scale[r, i / 128]
//
// A panel (16 outputs) is a sequence of units of 128 inputs. A unit holds 64 bytes of scales, f32 [16
// outputs], then 2 KiB of codes. A line of 64 bytes holds four inputs, and 16 bytes of it hold four outputs:
//
//   input i of output r of the panel is at byte  64 (i / 4) + 16 (r / 4) + 8 (i % 4 / 2) + 2 (r % 4) + i % 2
//
// Widening the codes of a line to bf16 and interleaving them thus gives two registers of [16 outputs][2
// inputs], which are rows of a bf16 panel. Every e4m3 value is exact in bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/packed.h"

namespace moesaic::tensor {

inline constexpr int kFp8Inputs = 128;  // inputs that share a scale
inline constexpr int kFp8ScaleBytes = 64;
inline constexpr int64_t kFp8UnitBytes = kFp8ScaleBytes + int64_t{kPanelRows} * kFp8Inputs;

/// Rows of codes and scales as a checkpoint stores them.
struct Fp8Rows {
  int rows = 0, k = 0;
  std::vector<uint8_t> codes;  // [rows, k] e4m3, no NaN
  std::vector<float> scales;   // [rows, ceil(k / 128)], finite

  void Resize(int new_rows, int new_k);
  /// Returns columns [first, first + count); first is a multiple of kFp8Inputs.
  Fp8Rows Columns(int first, int count) const;
  int groups() const { return (k + kFp8Inputs - 1) / kFp8Inputs; }
};

/// Quantizes values [rows, k] to the nearest codes. Each scale maps the largest magnitude of its group to
/// 448.
Fp8Rows QuantizeFp8(int rows, int k, const float* values);

/// Packs rows into `out`, which must have layout `layout` and be zeroed. first_row must be a multiple of 16.
void PackFp8Rows(const PackedLayout& layout, int first_row, const Fp8Rows& rows, std::byte* out);

/// Dequantizes output `row` to f32 [k].
void UnpackFp8Row(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
