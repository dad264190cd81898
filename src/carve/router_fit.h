// Fits the router of a carved layer. A closed form gives the start; gradient steps then minimize the cost of
// the experts that the router leaves out.
#pragma once

#include <Eigen/Cholesky>
#include <span>
#include <vector>

#include "carve/least_squares.h"
#include "kernels/exec_context.h"
#include "kernels/linear.h"

namespace moesaic::carve {

/// Scores experts as weights u + bias; the highest scores are active.
struct LinearRouter {
  RowMatrix weights;        // [routed, hidden]
  std::vector<float> bias;  // [routed]

  /// Returns the experts that stay inactive for the input `u` [hidden] if the best `active` are active.
  std::vector<int> Off(const float* u, int active) const;
};

/// Fits routers to several cost matrices over the same inputs. Deterministic on a given instruction set.
class RouterFit {
 public:
  /// `inputs` [tokens, hidden]. Fails if they are not finite.
  static StatusOr<RouterFit> Create(const kernels::ExecContext& ctx, const Rows& inputs);

  /// Fits a router. `costs` [tokens, routed] is the share of a token's energy that is lost without an expert;
  /// `importance` [tokens] is the weight of each token. Ridge regression on the logarithms of the costs gives
  /// the start. Then `steps` preconditioned gradient steps lower the mean cost of inactive experts, with each
  /// choice softened into a probability.
  LinearRouter Fit(const RowMatrix& costs, std::span<const float> importance, int active, int steps) const;

 private:
  struct Solution;
  explicit RouterFit(const kernels::ExecContext& ctx) : ctx_(ctx) {}
  Solution Regress(const RowMatrix& costs) const;
  void Descend(const RowMatrix& costs, std::span<const float> importance, int active, int steps,
               Solution* solution) const;
  void Multiply(const kernels::QuantizedActivations& a, const RowMatrix& w, RowMatrix* c) const;

  const kernels::ExecContext& ctx_;
  Eigen::RowVectorXf mean_;             // [hidden]
  RowMatrix centered_;                  // [tokens, hidden], inputs minus their mean
  Eigen::LLT<Eigen::MatrixXf> factor_;  // Cholesky factor of the ridged covariance
};

}  // namespace moesaic::carve
