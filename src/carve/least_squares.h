// Linear least squares over many tokens: sums of products on the kernels' matrix units, solved by Cholesky.
#pragma once

#include <Eigen/Core>
#include <span>

#include "base/status.h"
#include "kernels/ops.h"

namespace moesaic::carve {

using RowMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Rows of f32 that somebody else owns.
struct Rows {
  const float* data;  // [count][stride]
  int64_t stride;     // floats
  int count, columns;
};

/// sum [a.columns, b.columns] += over tokens t of weight[t] a[t]^T b[t]; weight is [count] or empty (all 1).
/// Values are rounded to bf16 on the way into the products, sums are f32.
void AddProducts(const kernels::ExecContext& ctx, const Rows& a, const Rows& b, std::span<const float> weight,
                 RowMatrix* sum);

/// X [n, m] that solves (gram + ridge * mean(diag(gram)) I) X = right, for a symmetric gram [n, n] and right
/// [n, m]. Fails when gram is not positive definite even so (not finite, for one).
StatusOr<RowMatrix> SolveRidge(runtime::ThreadPool& pool, const RowMatrix& gram, const RowMatrix& right,
                               float ridge);

}  // namespace moesaic::carve
