// The triangular factor of a Hessian that GPTQ rounds by.
//
// Weights are rounded in an order. With H in that order, H = R R^T for an upper triangular R. The loss e H
// e^T of an output is the sum over columns c of (sum over i <= c of e[i] R[i][c])^2. Given the errors of the
// columns before c, the loss is therefore smallest if w[c] + (sum over i < c of e[i] R[i][c]) / R[c][c] is
// rounded to the nearest code. These are the steps of GPTQ (Frantar et al. 2022, whose factor of the inverse
// is R^-1) without its inversions. Chen et al. 2025, "The geometry of LLM quantization", describe them as
// Babai's nearest plane algorithm.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/gptq/hessian.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {

/// Columns that are rounded together. The factor is padded to a multiple of it with a unit diagonal.
inline constexpr int kFactorBlock = 128;
/// Columns updated by one trailing-update GEMM (lazy batch).
inline constexpr int kWideBlock = 512;

struct FactorOptions {
  float damping = 0.01F;  // fraction of the mean diagonal that is added to the diagonal; > 0
  /// Called between blocks of columns. An error ends the factorization. Empty: never interrupted.
  std::function<Status()> watch = {};
};

/// R in bf16: right operand of the GPTQ error-propagation GEMM. The errors, its left operand, are bf16 as
/// well. Each operand has a random relative error of about 2^-9. This adds some 2^-18 of the loss that the
/// same errors have with independent inputs. That loss is about that of rounding to the nearest; GPTQ's is
/// about a fifth of it.
class FactorPanels {
 public:
  static int64_t Bytes(int k_padded);
  /// Allocates `bytes`, at least Bytes(k_padded), or keeps the present memory if it is large enough. The
  /// contents are undefined until Put.
  StatusOr<std::byte*> Resize(int k_padded, int64_t bytes);

  /// Releases the memory past the panels to the system.
  void Trim();

  /// Number of elements of the (up to) 512 rows from `row` on, and of all rows before them.
  int64_t RowElements(int row) const;
  int64_t RowOffset(int row) const;
  /// Stores the 128 x 128 block of R at `row` and `column` in its place within the elements of its 512 rows.
  void Put(int row, int column, const float (*block)[kFactorBlock], tensor::BF16* rows) const;

  /// Computes the corrections of the wide block at `begin` from the errors of all columns before it: out
  /// [rows][kWideBlock]. Errors are [rows][stride] and start with column 0. Runs on the calling thread, as
  /// does AddInside.
  void Multiply(const kernels::ExecContext& ctx, int begin, const tensor::BF16* errors, int64_t stride,
                int rows, float* out) const;
  /// Adds the corrections of columns [column, column + 128) from the errors of the wide block's columns
  /// before `end`.
  void AddInside(const kernels::ExecContext& ctx, int column, int end, const tensor::BF16* errors,
                 int64_t stride, int rows, float* out) const;

  /// Returns the number of columns of the wide block at `begin`.
  int columns(int begin) const { return std::min(kWideBlock, k_padded_ - begin); }

 private:
  // Each 512 rows store their own columns in pieces of 128 rows, then each later wide block in a piece of
  // 512. A piece consists of panels of 16 columns; a panel stores its rows in pairs.
  // Elements before the piece of a wide block that starts with `row`.
  int64_t Piece(int begin, int row) const;
  // Multiplies errors of columns [piece, piece + height) by those rows' `columns` columns from `column` on.
  void Product(const kernels::ExecContext& ctx, int piece, int height, int column, int columns,
               const tensor::BF16* errors, int64_t stride, int rows, bool accumulate, float* out) const;

  int k_padded_ = 0;
  runtime::Buffer memory_;
};

struct HessianFactor {
  int k = 0, k_padded = 0;
  FactorPanels panels;
  runtime::Buffer diagonal_blocks;  // f32 [k_padded / 128][128][128], transposed: [c][i] is R[i][c]
  std::vector<int> order;           // [k]: inputs in rounding order
  std::vector<float> diagonal;      // [k]: diagonal of the damped H, by input
  float damping = 0;                // damping that made H positive definite
  int attempts = 0;                 // 1 unless damping had to be raised
  int dead = 0;                     // number of inputs that were 0 in every token

  /// Returns the diagonal block of columns [begin, begin + 128).
  const float* diagonal_block(int begin) const {
    return diagonal_blocks.as<float>() + int64_t{begin} * kFactorBlock;
  }
};

/// Returns the bytes of a factor that a Factorizer holds. The factor replaces the triangle from which it is
/// computed.
int64_t FactorBytes(int k);
/// Returns the resident bytes of a factor after it was computed from inputs instead of a Hessian. The rest of
/// the triangle is released.
int64_t FactorBytesMade(int k);
/// Returns the scratch memory in bytes of a factorization.
int64_t FactoringScratchBytes(int k, int threads);

/// Sends all of a layer's inputs to a sink, in the same runs of tokens each time. An error means that some
/// inputs are missing.
using InputSource = std::function<Status(const TokenSink& sink)>;

/// Sets the sizes and the order of a factor from the diagonal of the sums over `tokens` tokens. Returns
/// the mean diagonal of H. A diagonal that is not finite or all 0 is an error.
StatusOr<float> BeginFactor(int k, int64_t tokens, const FactorOptions& options,
                            const std::function<float(int i)>& sum, HessianFactor* factor);
/// Calls attempt(added to the diagonal), which returns whether H was positive definite. Starts with the
/// damping of `options` and multiplies it by ten, up to 1, until H is positive definite.
Status FactorDamped(const FactorOptions& options, float mean,
                    const std::function<StatusOr<bool>(float added)>& attempt, HessianFactor* factor);

/// Makes factors one after another in the same memory.
class Factorizer {
 public:
  /// Factors the mean Hessian. Damping is raised tenfold, up to 1, while the matrix is not positive definite.
  /// A Hessian without tokens or with non-finite values is an error. Bits do not depend on the number of
  /// threads. The factor is valid until the next call.
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options);

  /// Makes a bit-identical factor without a Hessian: sums are gathered in the factor's memory and order.
  /// Inputs are requested twice to find the order, and again whenever damping is raised. Returns null if all
  /// inputs are 0.
  struct FromInputs {
    const HessianFactor* factor = nullptr;
    int64_t tokens = 0;
  };
  StatusOr<FromInputs> Factor(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                              const FactorOptions& options);
  /// Returns the bytes that this path needs in addition to FactorBytes.
  static int64_t FromInputsBytes(int k);

  HessianFactor Take() { return std::move(factor_); }

 private:
  // Factors the matrix that fill(added to the diagonal, triangle) writes. `fill` returns a status.
  template <typename Fill>
  Status Make(const kernels::ExecContext& ctx, const FactorOptions& options, float mean, const Fill& fill);

  HessianFactor factor_;
};

/// Factors one Hessian with a Factorizer of its own.
StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options);

}  // namespace moesaic::quantizer
