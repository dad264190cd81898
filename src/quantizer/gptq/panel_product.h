// Products of f32 matrices, which factoring a Hessian spends its time in.
//
// Where the machine multiplies bf16 in tiles, some twenty times as fast as f32, a value is kept as the sum of
// two bf16 (16 bits of mantissa: what is off is 2^-17 of it) and the three products of halves that are not
// below that are taken. Elsewhere values stay f32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {

/// Columns of a row whose halves stand together: all upper ones, then all lower ones. A row's last strip may
/// be shorter.
inline constexpr int kStrip = 512;
/// Ranges of columns start and end at multiples of it.
inline constexpr int kPanelBlock = 128;

/// How `ctx` multiplies: by halves or in f32. The same for both operands.
bool MultipliesHalves(const kernels::ExecContext& ctx);

/// The rows of an operand: `size` columns, each as large as a float.
struct StripRows {
  bool halves;
  int size;

  int Begin(int column) const { return column / kStrip * kStrip; }
  int Width(int column) const { return std::min(kStrip, size - Begin(column)); }
  /// Stores 128 values from `column` on, and reads them back. The strip's other columns must be stored so,
  /// too.
  void Put(const float* values, int column, float* row) const;
  void Get(const float* row, int column, float* values) const;
};

/// A right operand [inner][columns], both multiples of 128, as the kernels read it, a strip's rows after
/// another's.
class PackedPanels {
 public:
  /// Floats of memory for an operand of up to so many rows and columns.
  static int64_t Floats(int inner, int columns) { return int64_t{inner} * columns; }

  PackedPanels(StripRows rows, std::span<float> memory) : rows_(rows), memory_(memory) {}

  /// Takes the transpose of columns [first, last) of `columns` rows, times -1 if `negative`.
  void PackTransposed(const kernels::ExecContext& ctx, const float* rows, int64_t stride, int columns,
                      int first, int last, bool negative);

  /// c [rows][columns] += columns [first, last) of `a` times this one; `accumulate` false: it is set. Strides
  /// in floats. On the calling thread. A row's bits do not depend on which other rows are in the call.
  void Multiply(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows, bool accumulate,
                float* c, int64_t c_stride) const;

 private:
  // Columns of the operands' rows that are in one strip.
  struct Piece {
    int first, height;
  };
  Piece PieceAt(int column) const;
  // Its floats [columns / 16][height][16], or its words [2][columns / 16][height / 2][16]: pairs of upper
  // halves, then of lower ones.
  float* At(const Piece& piece) const { return memory_.data() + int64_t{piece.first - first_} * columns_; }

  StripRows rows_;
  std::span<float> memory_;
  int first_ = 0, last_ = 0, columns_ = 0;
};

}  // namespace moesaic::quantizer
