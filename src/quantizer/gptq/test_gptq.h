// Fixtures shared by the tests of GPTQ on the CPU and on a device.
#pragma once

#include <gtest/gtest.h>

#include <Eigen/Cholesky>
#include <Eigen/LU>
#include <cmath>

#include "kernels/rounding.h"
#include "quantizer/gptq/gptq.h"
#include "quantizer/test_context.h"

namespace moesaic::quantizer {

inline constexpr Grid kGrids[] = {{GridKind::kInt8Channel, 0}, {GridKind::kInt4Group, 32},
                                  {GridKind::kInt4Group, 128}, {GridKind::kNvfp4, 16},
                                  {GridKind::kFp8Block, 128},  {GridKind::kInt8Group, 32},
                                  {GridKind::kInt8Group, 0}};

inline Hessian HessianOf(const TestContext& threads, const std::vector<float>& x, int k) {
  auto hessian = *Hessian::Create(k);
  hessian.Add(threads.ctx, AllTokens(x, k));
  return hessian;
}

// Returns the mean Hessian in double precision, with damping.
inline Eigen::MatrixXd Damped(const Hessian& hessian, float damping) {
  const int k = hessian.k();
  Eigen::MatrixXd h(k, k);
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j <= i; ++j) {
      h(i, j) = h(j, i) = hessian.sums(i)[j] / static_cast<double>(hessian.tokens());
    }
  }
  h.diagonal().array() += damping * h.diagonal().mean();
  return h;
}

inline std::vector<float> Errors(const std::vector<float>& weights, const QuantizedMatrix& matrix) {
  std::vector<float> errors(weights.size());
  Dequantize(matrix, 0, matrix.n, errors.data());
  for (size_t i = 0; i < errors.size(); ++i) errors[i] = weights[i] - errors[i];
  return errors;
}

inline double LossOf(const std::vector<float>& errors, const Eigen::MatrixXd& h) {
  double loss = 0;
  const auto k = h.rows();
  for (size_t at = 0; at < errors.size(); at += k) {
    const Eigen::VectorXd e = Eigen::Map<const Eigen::VectorXf>(errors.data() + at, k).cast<double>();
    loss += e.dot(h * e);
  }
  return loss;
}

// Repeats the steps of Frantar et al. in double precision, column by column with the Cholesky factor of the
// inverse, on our codes. Each code must be the nearest to its corrected weight within the known error. Errors
// and factor are rounded to bf16, so each product in a correction may have a relative error of 2^-8. Values
// in f32 or halves (diagonal blocks, the factor itself) have a hundredth of that.
inline void ExpectCodesOfGptq(const std::vector<float>& weights, const QuantizedMatrix& matrix,
                              const HessianFactor& factor, const Eigen::MatrixXd& h) {
  const int k = matrix.k;
  Eigen::MatrixXd ordered(k, k);
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j < k; ++j) ordered(i, j) = h(factor.order[i], factor.order[j]);
  }
  const Eigen::MatrixXd inverse = ordered.inverse();
  const Eigen::MatrixXd u = Eigen::LLT<Eigen::MatrixXd>(inverse).matrixU();
  const Eigen::MatrixXd r_factor = u.inverse();  // H = R R^T
  std::vector<float> rounded(weights.size());
  Dequantize(matrix, 0, matrix.n, rounded.data());
  for (int r = 0; r < matrix.n; ++r) {
    Eigen::VectorXd w(k);
    for (int p = 0; p < k; ++p) w[p] = weights[int64_t{r} * k + factor.order[p]];
    Eigen::VectorXd errors = Eigen::VectorXd::Zero(k);
    for (int p = 0; p < k; ++p) {
      const int input = factor.order[p];
      const double scale = std::fabs(double{matrix.Scale(r, input)});
      const double taken = rounded[int64_t{r} * k + input];
      double best = HUGE_VAL;
      for (int code = 0; code < 256; ++code) {
        const double value = CodeValue(matrix.grid.kind, static_cast<uint8_t>(code));
        if (matrix.grid.kind == GridKind::kInt4Group && (value < -8 || value > 7)) continue;
        if (matrix.grid.numbers() == kernels::NumberGrid::kInt8 && value == -128) continue;
        if (std::isnan(value)) continue;
        best = std::min(best, std::fabs(value * matrix.Scale(r, input) - w[p]));
      }
      const double products = (errors.array() * r_factor.col(p).array()).abs().sum() / r_factor(p, p);
      ASSERT_LE(std::fabs(taken - w[p]), best + 0x1p-8 * products + 1e-3 * scale) << r << " " << p;
      errors[p] = weights[int64_t{r} * k + input] - taken;
      const double error = (w[p] - taken) / u(p, p);
      for (int q = p; q < k; ++q) w[q] -= error * u(p, q);
    }
  }
}

}  // namespace moesaic::quantizer
