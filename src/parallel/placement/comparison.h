// Compares balancers on workloads that they did or did not plan for.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {

struct CompareOptions {
  int ranks = 0;
  int slots = 0;               ///< slots of all ranks together
  int nodes = 1;               ///< of "eplb-hierarchical", which needs more than one; hosts of "omni"
  int groups = 1;              ///< of "eplb-hierarchical"
  bool leave_one_out = false;  ///< plan for all workloads but the measured one; otherwise for all
  bool split = false;          ///< add "+split" rows, and the exact split to "moesaic"
  double moves = 0;            ///< temporary expert moves per rank and layer of "moesaic"; implies its split
  int threads = 2;
  std::function<void(int done, int total)> progress = {};
  std::function<bool()> stop = {};  ///< true: end; called from several threads
};

struct PolicyResult {
  std::string name;
  /// Mean and worst ratio of the largest rank load to the mean rank load, over measured workloads and layers
  /// with tokens.
  double mean = 0, worst = 0;
  double moves = 0;          ///< mean temporary moves per rank and layer
  std::string error;         ///< reason if the policy can't plan these sizes or is not finished; values are 0
  bool interrupted = false;  ///< not finished when `stop` returned true
};

/// Runs all policies. Every workload has equal weight: policies that plan for one load get the mean of the
/// workloads' shares. Results are in a fixed order. If `stop` returns true, policies that are finished keep
/// their results, and the others are marked as interrupted.
StatusOr<std::vector<PolicyResult>> ComparePolicies(std::span<const Workload> workloads,
                                                    const CompareOptions& options);

}  // namespace moesaic::parallel
