// Products of f32 matrices in blocks of 128 columns, which the triangular algorithms spend their time in.
//
// Where the machine multiplies bf16 in tiles, some twenty times as fast as f32, a value is kept as the sum of
// two bf16 (16 bits of mantissa: what is off is 2^-17 of it) and all four products of the halves are taken.
// Elsewhere values stay f32.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {

inline constexpr int kPanelBlock = 128;

/// How `ctx` multiplies: by halves or in f32. The same for both operands.
bool MultipliesHalves(const kernels::ExecContext& ctx);

/// Stores 128 values of a left operand's row where 128 floats fit; and reads them back.
void PutBlock(bool halves, const float* values, float* at);
void GetBlock(bool halves, const float* at, float* values);

/// A right operand [inner][128], packed as the kernels read it in pieces of kInner rows.
class PackedPanels {
 public:
  // 512 x 128 values are 256 KiB, twice that as halves, and stay in the L2 cache while rows of the left
  // operand pass by.
  static constexpr int kInner = 512;
  static constexpr int kPanels = kPanelBlock / tensor::kPanelRows;

  /// Floats of memory for an operand of up to `inner` rows, a multiple of 128.
  static int64_t Floats(int inner) { return int64_t{2} * inner * kPanelBlock; }

  PackedPanels(bool halves, std::span<float> memory) : halves_(halves), memory_(memory) {}

  /// Takes 128 columns from `at` on of rows [0, inner), which stand as left operands do.
  void PackColumns(const kernels::ExecContext& ctx, const float* at, int64_t stride, int inner);
  /// Takes the transpose of 128 rows [128][inner] that stand as left operands do, times -1 if `negative`.
  void PackTransposed(const kernels::ExecContext& ctx, const float* rows, int64_t stride, int inner,
                      bool negative);

  /// c [rows][128] += a [rows][inner] times this one; with `accumulate` false it is set. Strides in floats.
  /// On the calling thread. A row's bits do not depend on which other rows are in the call.
  void Multiply(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows, bool accumulate,
                float* c, int64_t c_stride) const;

 private:
  int PieceHeight(int piece) const { return inner_ - piece < kInner ? inner_ - piece : kInner; }
  // Where 128 rows from `first` on of a panel's 16 columns stand: [128][16] floats or [2][64][16] words.
  float* Block(int panel, int first, int part);
  int64_t part_floats() const { return int64_t{inner_} * kPanelBlock; }

  bool halves_;
  std::span<float> memory_;  // as halves: upper ones, each twice, then lower ones, each twice
  int inner_ = 0;
};

}  // namespace moesaic::quantizer
