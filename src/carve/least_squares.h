// Linear least squares over many tokens. The kernels' matrix units sum the products; a Cholesky factorization
// solves them.
#pragma once

#include <Eigen/Core>
#include <span>

#include "base/status.h"
#include "kernels/exec_context.h"

namespace moesaic::carve {

using RowMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// A borrowed view of f32 rows.
struct Rows {
  const float* data;  // [count][stride]
  int64_t stride;     // floats
  int count, columns;
};

/// Adds weight[t] a[t]^T b[t] of all tokens t to sum [a.columns, b.columns]. `weight` is [count] or empty
/// (all 1). Operands are rounded to bf16; sums are f32.
void AddProducts(const kernels::ExecContext& ctx, const Rows& a, const Rows& b, std::span<const float> weight,
                 RowMatrix* sum);

/// Returns the X [n, m] that solves (gram + ridge * mean(diag(gram)) I) X = right, for a symmetric gram [n,
/// n] and right [n, m]. Fails if the ridged gram is not positive definite, for example because it is not
/// finite.
StatusOr<RowMatrix> SolveRidge(runtime::ThreadPool& pool, const RowMatrix& gram, const RowMatrix& right,
                               float ridge);

}  // namespace moesaic::carve
