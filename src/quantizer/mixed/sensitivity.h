// Chooses a precision for each group of weights under a budget, given the loss of every option. The choice is
// exactly optimal where that is feasible; otherwise its distance to the optimum is bounded.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/format/grid.h"
#include "quantizer/gptq/factor.h"

namespace moesaic::quantizer {

/// Cost of one precision for one group of weights.
struct KnapsackOption {
  std::string name;   // "int8", "int4_g32", "bf16", ...
  double loss = 0;    // >= 0, in a unit common to all groups, because losses are added
  int64_t bytes = 0;  // stored bytes
};

/// Weights that share a precision: a layer's, an expert's, or fused linears.
struct KnapsackGroup {
  std::string name;
  std::vector<KnapsackOption> options;
};

struct KnapsackChoice {
  std::vector<int> options;  // [groups]
  double loss = 0;
  int64_t bytes = 0;
  double least_loss = 0;  // lower bound of the loss within the budget; equals `loss` if `exact`
  bool exact = false;
};

/// Returns the choice of least loss of at most `budget` bytes. It is exact: dynamic programming over
/// undominated partial choices, pruned by the Lagrangian bound. If more than a million partial choices
/// remain, it is greedy along the groups' convex hulls, and off by one group's step at most. Fails if even
/// the cheapest options exceed the budget, and states their cost. Ties go to the cheaper choice, then to
/// earlier options.
StatusOr<KnapsackChoice> SolveKnapsack(std::span<const KnapsackGroup> groups, double budget);

/// Returns the relative squared error of a layer's output over the factor's tokens after rounding W [n, k] to
/// a grid: sum of e H e^T over sum of w H w^T, on up to 64 rows (FP8: a block of 128). `gptq` rounds by GPTQ,
/// else to the nearest.
StatusOr<double> MeasureLoss(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                             int k, const HessianFactor& factor, const ScaleSearch& search, bool gptq);

}  // namespace moesaic::quantizer
