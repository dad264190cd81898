// The router of a carved layer: a closed form first, then steps towards what it is for, which is to leave out
// the experts whose loss costs least.
#pragma once

#include <Eigen/Cholesky>
#include <span>
#include <vector>

#include "carve/least_squares.h"

namespace moesaic::carve {

/// An expert's score is weights u + bias; the best ones are on.
struct LinearRouter {
  RowMatrix weights;        // [routed, hidden]
  std::vector<float> bias;  // [routed]

  /// The experts that are off for the input `u` [hidden] when `active` are on.
  std::vector<int> Off(const float* u, int active) const;
};

/// Fits routers over the same inputs to several costs. Deterministic on a given instruction set.
class RouterFit {
 public:
  /// `inputs` [tokens, hidden]; fails when they are not finite.
  static StatusOr<RouterFit> Create(const kernels::ExecContext& ctx, const Rows& inputs);

  /// `costs` [tokens, routed]: what a token loses with an expert off, as a share of its energy; `importance`
  /// [tokens]: what it counts. Starts from
  /// the ridge regression of the costs' logarithms; then takes `steps` preconditioned steps down the mean
  /// cost of what is off, each choice softened into a probability.
  LinearRouter Fit(const RowMatrix& costs, std::span<const float> importance, int active, int steps) const;

 private:
  struct Solution;
  explicit RouterFit(const kernels::ExecContext& ctx) : ctx_(ctx) {}
  Solution Regress(const RowMatrix& costs) const;
  void Descend(const RowMatrix& costs, std::span<const float> importance, int active, int steps,
               Solution* solution) const;
  void Multiply(const kernels::PreparedRows& a, const RowMatrix& w, RowMatrix* c) const;

  const kernels::ExecContext& ctx_;
  Eigen::RowVectorXf mean_;             // [hidden]
  RowMatrix centered_;                  // [tokens, hidden] inputs less their mean
  Eigen::LLT<Eigen::MatrixXf> factor_;  // of their ridged covariance
};

}  // namespace moesaic::carve
