// The triangular factor of a Hessian that GPTQ rounds by.
//
// Weights are rounded in an order; with H in that order, H = R R^T for an upper triangular R. An output's
// loss e H e^T is then the sum over columns c of (sum over i <= c of e[i] R[i][c])^2, so the best a rounding
// can do at column c, given the columns before it, is to round w[c] + (sum over i < c of e[i] R[i][c]) /
// R[c][c]. These are GPTQ's steps (Frantar et al. 2022, whose factor of the inverse is R^-1) without its
// inversions, as Chen et al. 2025, "The geometry of LLM quantization", reads them: Babai's nearest plane.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/hessian.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {

/// Columns rounded together; the factor is padded to a multiple with a unit diagonal.
inline constexpr int kFactorBlock = 128;
/// Columns that get what columns before all of them ask for in one product.
inline constexpr int kWideBlock = 512;

struct FactorOptions {
  float damping = 0.01F;  // added to the diagonal, of its mean: > 0
  bool act_order = true;  // inputs with the largest H[i][i] first (else as they stand)
};

/// R in bf16, as the right operand of what errors ask for. Those are products of bf16 numbers, too, so each
/// is off by 2^-9 of itself or so, at random, and what columns are asked for is so far from right: it adds
/// some 2^-18 of the loss that the same errors have where inputs are independent, about that of rounding to
/// the nearest, to a loss of a fifth of that.
class FactorPanels {
 public:
  static int64_t Bytes(int k_padded);
  /// Takes memory for a factor, or keeps what it has if that is enough.
  Status Resize(int k_padded);

  /// Takes R's block of 128 x 128 at `row` and `column`.
  void Put(int row, int column, const float (*block)[kFactorBlock]);

  /// What errors in columns before the wide block at `begin` ask its columns for: out [rows][kWideBlock].
  /// Errors are [rows][stride], from column 0 on. On the calling thread, as is AddInside.
  void Multiply(const kernels::ExecContext& ctx, int begin, const tensor::BF16* errors, int64_t stride,
                int rows, float* out) const;
  /// Adds what errors in its columns before `end` ask columns [column, column + 128) of a wide block for.
  void AddInside(const kernels::ExecContext& ctx, int column, int end, const tensor::BF16* errors,
                 int64_t stride, int rows, float* out) const;

  /// Of the wide block at `begin`.
  int columns(int begin) const { return std::min(kWideBlock, k_padded_ - begin); }

 private:
  // A wide block has its rows before it in pieces of 512, then its own in pieces of 128; a piece has panels
  // of 16 columns, and a panel its rows two by two.
  int64_t Piece(int begin, int row) const;  // elements before the one that starts with `row`
  // Errors in columns [piece, piece + height) times what those rows have in `columns` columns from `column`
  // on.
  void Product(const kernels::ExecContext& ctx, int piece, int height, int column, int columns,
               const tensor::BF16* errors, int64_t stride, int rows, bool accumulate, float* out) const;

  int k_padded_ = 0;
  runtime::Buffer memory_;
};

struct HessianFactor {
  int k = 0, k_padded = 0;
  FactorPanels panels;
  runtime::Buffer diagonal_blocks;  // f32 [k_padded / 128][128][128], turned: [c][i] is R[i][c]
  std::vector<int> order;           // [k]: the input that is rounded first, second, ...
  std::vector<float> diagonal;      // [k]: of H, damping included, by input
  float damping = 0;                // that made it positive definite
  int attempts = 0;                 // 1 unless damping had to be raised
  int dead = 0;                     // inputs that were 0 in every token

  /// Of columns [begin, begin + 128).
  const float* diagonal_block(int begin) const {
    return diagonal_blocks.as<float>() + int64_t{begin} * kFactorBlock;
  }
};

/// Memory of a factor.
int64_t FactorBytes(int k);
/// What is taken while it is made, the factor and scratch memory of `threads` included.
int64_t FactoringBytes(int k, int threads);

/// Makes factors one after another in the same memory.
class Factorizer {
 public:
  /// Factors the mean Hessian; damping is raised tenfold, up to 1, while the matrix is not positive definite.
  /// A Hessian without tokens, or that is not finite, is an error: there is nothing to stand in for it. Bits
  /// do not depend on the number of threads. The factor is there until the next call.
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options);
  HessianFactor Take() { return std::move(factor_); }

 private:
  runtime::Buffer triangle_;
  HessianFactor factor_;
};

/// The factor of one Hessian, by a Factorizer.
StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options);

}  // namespace moesaic::quantizer
