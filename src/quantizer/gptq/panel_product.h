// Products of f32 matrices, which take most of the time of a Hessian's factorization.
//
// Machines with bf16 tile instructions multiply bf16 some twenty times as fast as f32. There a value is
// stored as the sum of two bf16 halves (16 bits of mantissa, relative error 2^-17), and the three significant
// products of halves are summed. Elsewhere values stay f32.
// below that are taken. Elsewhere values stay f32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/exec_context.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {

/// Columns of a row whose halves are adjacent: all upper halves, then all lower ones. A row's last strip may
/// be shorter.
inline constexpr int kStrip = 512;
/// Column ranges start and end at multiples of it.
inline constexpr int kPanelBlock = 128;

/// True if `ctx` multiplies by halves, false for f32. Both operands must use the same form.
bool MultipliesHalves(const kernels::ExecContext& ctx);

/// The rows of an operand: `size` columns, each of the size of a float.
struct StripRows {
  bool halves;
  int size;

  int Begin(int column) const { return column / kStrip * kStrip; }
  int Width(int column) const { return std::min(kStrip, size - Begin(column)); }
  /// Put stores 128 values from `column` on; Get reads them back. All columns of a strip must be stored by
  /// Put.
  void Put(const float* values, int column, float* row) const;
  void Get(const float* row, int column, float* values) const;
};

/// A right operand [inner][columns], both multiples of 128, in the kernels' layout, one strip's rows after
/// another.
class PackedPanels {
 public:
  /// Returns the number of floats that an operand of this size takes.
  static int64_t Floats(int inner, int columns) { return int64_t{inner} * columns; }

  PackedPanels(StripRows rows, std::span<float> memory) : rows_(rows), memory_(memory) {}

  /// Packs the transpose of columns [first, last) of `columns` rows, times -1 if `negative`.
  void PackTransposed(const kernels::ExecContext& ctx, const float* rows, int64_t stride, int columns,
                      int first, int last, bool negative);

  /// Adds columns [first, last) of `a` times this operand to c [rows][columns]; with `accumulate` false it
  /// overwrites c. Strides are in floats. Runs on the calling thread. A row's bits do not depend on the other
  /// rows of the call.
  void Multiply(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows, bool accumulate,
                float* c, int64_t c_stride) const;

 private:
  // Columns of the operands' rows within one strip.
  struct Piece {
    int first, height;
  };
  Piece PieceAt(int column) const;
  // Returns the memory of a piece: floats [columns / 16][height][16], or words [2][columns / 16][height /
  // 2][16] with pairs of upper halves, then of lower ones.
  float* At(const Piece& piece) const { return memory_.data() + int64_t{piece.first - first_} * columns_; }

  StripRows rows_;
  std::span<float> memory_;
  int first_ = 0, last_ = 0, columns_ = 0;
};

}  // namespace moesaic::quantizer
