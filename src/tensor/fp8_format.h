// Weights in FP8 (e4m3) with one f32 scale for 128 inputs of an output: DeepSeek's blocks of 128 x 128, and
// channels.
//
//   W[r, i] = Value(code[r, i]) * scale[r, i / 128]
//
// A panel (16 outputs) is a run of units of 128 inputs. A unit is 64 bytes of scales, f32 [16 outputs], then
// 2 KiB of codes: a line of 64 bytes holds four inputs, and 16 bytes of it four outputs,
//
//   input i of output r of the panel at byte  64 (i / 4) + 16 (r / 4) + 8 (i % 4 / 2) + 2 (r % 4) + i % 2
//
// so that interleaving the two bytes of every code's bf16 gives two registers of [16 outputs][2 inputs], rows
// of a bf16 panel. An e4m3 is exactly a bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/packed.h"

namespace moesaic::tensor {

inline constexpr int kFp8Inputs = 128;  // that share a scale
inline constexpr int kFp8ScaleBytes = 64;
inline constexpr int64_t kFp8UnitBytes = kFp8ScaleBytes + int64_t{kPanelRows} * kFp8Inputs;

/// Rows of codes and scales as they stand in a checkpoint.
struct Fp8Rows {
  int rows = 0, k = 0;
  std::vector<uint8_t> codes;  // [rows, k] e4m3, none of them NaN
  std::vector<float> scales;   // [rows, ceil(k / 128)], finite

  void Resize(int new_rows, int new_k);
  int groups() const { return (k + kFp8Inputs - 1) / kFp8Inputs; }
};

/// Rounds values [rows, k] to the nearest codes; a scale puts the largest of its magnitudes at 448.
Fp8Rows QuantizeFp8(int rows, int k, const float* values);

/// Packs rows into `out`, which is laid out as `layout` and zeroed. first_row must be a multiple of 16.
void PackFp8Rows(const PackedLayout& layout, int first_row, const Fp8Rows& rows, std::byte* out);

/// Reads output `row` back as f32 [k].
void UnpackFp8Row(const PackedMatrix& matrix, int row, std::span<float> out);

}  // namespace moesaic::tensor
