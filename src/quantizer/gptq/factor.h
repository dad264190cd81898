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
#include <functional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/gptq/hessian.h"
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
  /// Asked between blocks of columns; what it refuses with ends the work. Empty: goes on to the end.
  std::function<Status()> watch = {};
};

/// R in bf16, as the right operand of what errors ask for. Those are products of bf16 numbers, too, so each
/// is off by 2^-9 of itself or so, at random, and what columns are asked for is so far from right: it adds
/// some 2^-18 of the loss that the same errors have where inputs are independent, about that of rounding to
/// the nearest, to a loss of a fifth of that.
class FactorPanels {
 public:
  static int64_t Bytes(int k_padded);
  /// Takes `bytes` of memory, at least Bytes(k_padded), or keeps what it has if that is enough. What is in it
  /// stays anything until Put.
  StatusOr<std::byte*> Resize(int k_padded, int64_t bytes);

  /// Gives the memory behind the panels back to the system.
  void Trim();

  /// Elements of the 512 rows, or fewer, from `row` on, and how many come before them.
  int64_t RowElements(int row) const;
  int64_t RowOffset(int row) const;
  /// Lays R's block of 128 x 128 at `row` and `column` out in its place, of the elements of its 512 rows.
  void Put(int row, int column, const float (*block)[kFactorBlock], tensor::BF16* rows) const;

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
  // 512 rows have their own columns in pieces of 128 rows, then each wide block behind them in a piece of
  // 512; a piece has panels of 16 columns, and a panel its rows two by two.
  int64_t Piece(int begin, int row) const;  // elements before the one of a wide block that starts with `row`
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

/// Memory of a factor that a Factorizer holds: it stands where the triangle stood that it was made of.
int64_t FactorBytes(int k);
/// What of it is resident once it is made of inputs, not of a Hessian: the rest of the triangle goes back.
int64_t FactorBytesMade(int k);
/// Scratch memory that is taken while it is made.
int64_t FactoringScratchBytes(int k, int threads);

/// Gives all of a layer's inputs to a sink: the same runs of tokens each time. An error: not all of them
/// came.
using InputSource = std::function<Status(const TokenSink& sink)>;

/// Takes sizes and the order of a factor from the diagonal of the sums over tokens of so much weight; returns
/// the mean of H's. A diagonal that is not finite, or all 0, is an error.
StatusOr<float> BeginFactor(int k, double weight, const FactorOptions& options,
                            const std::function<float(int i)>& sum, HessianFactor* factor);
/// Calls attempt(added to the diagonal), which says whether H was positive definite, with the damping that
/// was asked for, and ten times as much up to 1 until it was.
Status FactorDamped(const FactorOptions& options, float mean,
                    const std::function<StatusOr<bool>(float added)>& attempt, HessianFactor* factor);

/// Makes factors one after another in the same memory.
class Factorizer {
 public:
  /// Factors the mean Hessian; damping is raised tenfold, up to 1, while the matrix is not positive definite.
  /// A Hessian without tokens, or that is not finite, is an error: there is nothing to stand in for it. Bits
  /// do not depend on the number of threads. The factor is there until the next call.
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options);

  /// The same factor, to the bit, without a Hessian: sums are gathered in the factor's memory, in its order.
  /// For that order inputs are asked for twice, and once more whenever damping is raised. Null where all of
  /// them are 0.
  struct FromInputs {
    const HessianFactor* factor = nullptr;
    TokenWeight seen;
  };
  StatusOr<FromInputs> Factor(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                              const FactorOptions& options);
  /// Memory of it beside FactorBytes.
  static int64_t FromInputsBytes(int k);

  HessianFactor Take() { return std::move(factor_); }

 private:
  // Factors what fill(added to the diagonal, triangle) fills, which returns a status.
  template <typename Fill>
  Status Make(const kernels::ExecContext& ctx, const FactorOptions& options, float mean, const Fill& fill);

  HessianFactor factor_;
};

/// The factor of one Hessian, by a Factorizer.
StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options);

}  // namespace moesaic::quantizer
