// Which precision for which weights: losses are measured for every group of weights and option, and the
// choice with the least sum under a budget is found exactly where that is feasible, with a bound where it is
// not.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "quantizer/format/grid.h"
#include "quantizer/gptq/factor.h"

namespace moesaic::quantizer {

/// What one precision does to one group of weights.
struct PrecisionOption {
  std::string name;            // "int8", "int4_g32", "bf16", ...
  double loss = 0;             // >= 0, in a unit that all groups share: losses are added up
  int64_t bytes = 0;           // that are stored
  double bytes_per_token = 0;  // that a token reads: of routed experts, bytes * top_k / experts
};

/// Weights that have one precision together: a layer's, an expert's, or what is fused at run time.
struct PrecisionGroup {
  std::string name;
  std::vector<PrecisionOption> options;
};

enum class BudgetKind : uint8_t { kBytes, kBytesPerToken };

struct PrecisionChoice {
  std::vector<int> options;  // [groups]
  double loss = 0;
  int64_t bytes = 0;
  double bytes_per_token = 0;
  double least_loss = 0;  // that any choice within the budget can have: equal to `loss` when `exact`
  bool exact = false;
};

/// The choice of least loss whose cost is at most `budget`. Exact by dynamic programming over undominated
/// partial choices, pruned by the Lagrangian bound; where more than a million of those are left, greedy along
/// the groups' convex hulls, which is off by one group's step at most. Fails when even the cheapest options
/// cost more than the budget, and says what they cost. Ties go to the cheaper choice, then to earlier
/// options.
StatusOr<PrecisionChoice> ChoosePrecisions(std::span<const PrecisionGroup> groups, BudgetKind kind,
                                           double budget);

/// The share of a layer's output, in the mean square over the factor's tokens, that rounding W [n, k] to a
/// grid costs: sum of e H e^T over sum of w H w^T on up to 64 rows (of FP8 a block of 128). `gptq` rounds
/// them so, else to the nearest.
StatusOr<double> MeasureLoss(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                             int k, const HessianFactor& factor, const ScaleSearch& search, bool gptq);

}  // namespace moesaic::quantizer
