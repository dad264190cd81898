// The triangular factor of a Hessian that GPTQ rounds by.
//
// Weights are rounded in an order; with H in that order, H = R R^T for an upper triangular R. An output's
// loss e H e^T is then the sum over columns c of (sum over i <= c of e[i] R[i][c])^2, so the best a rounding
// can do at column c, given the columns before it, is to round w[c] + (sum over i < c of e[i] R[i][c]) /
// R[c][c]. These are GPTQ's steps (Frantar et al. 2022, whose factor of the inverse is R^-1) without its
// inversions, as Chen et al. 2025, "The geometry of LLM quantization", reads them: Babai's nearest plane.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/hessian.h"
#include "quantizer/panel_product.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// Columns rounded together; the factor is padded to a multiple with a unit diagonal.
inline constexpr int kFactorBlock = kPanelBlock;

struct FactorOptions {
  float damping = 0.01F;  // added to the diagonal, of its mean: > 0
  bool act_order = true;  // inputs with the largest H[i][i] first (else as they stand)
};

struct HessianFactor {
  int k = 0, k_padded = 0;
  int64_t stride = 0;           // floats
  bool halves = false;          // how the blocks of R are kept: see PutBlock
  runtime::Buffer memory;       // R [k_padded][stride], 0 below the diagonal inside diagonal blocks only
  std::vector<int> order;       // [k]: the input that is rounded first, second, ...
  std::vector<float> diagonal;  // [k]: of H, damping included, by input
  float damping = 0;            // that made it positive definite
  int attempts = 0;             // 1 unless damping had to be raised
  int dead = 0;                 // inputs that were 0 in every token

  float* row(int i) { return memory.as<float>() + i * stride; }
  const float* row(int i) const { return memory.as<float>() + i * stride; }
};

/// Memory of a factor. Making it takes 1 KiB an input more for a while.
int64_t FactorBytes(int k);

/// Factors the mean Hessian; damping is raised tenfold, up to 1, while the matrix is not positive definite. A
/// Hessian without tokens, or that is not finite, is an error: there is nothing to stand in for it. Bits do
/// not depend on the number of threads.
StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options);

}  // namespace moesaic::quantizer
