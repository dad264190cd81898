// Plans between balance and traffic.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "parallel/placement/load_matrix.h"
#include "parallel/placement/node_traffic.h"

namespace moesaic::parallel {

struct FrontOptions {
  int ranks = 0;
  int slots = 0;  ///< of all ranks
  int nodes = 2;
  Routing routing = {};
  int threads = 2;
  std::function<void(int done, int total)> progress = {};  ///< called after each plan
  std::function<bool()> stop = {};                         ///< true: cancel; called from several threads
};

struct FrontPoint {
  std::string name;         ///< "moesaic", "eplb" or "eplb-hierarchical"
  double weight = 0;        ///< PlannerOptions::traffic_weight
  double mean = 0;          ///< of the largest rank load over the mean, over workloads and layers with tokens
  double worst = 0;         ///< the same, of one layer and workload
  double remote_nodes = 0;  ///< RemoteNodes(), mean over workloads and layers with tokens
  bool dominated = false;   ///< another point has no larger mean and no larger remote_nodes
};

/// Plans with weights of traffic from 0 on, and EPLB's plans. Points of equal values appear once, in the
/// order of remote_nodes of ours, then EPLB's. InvalidArgument for sizes that the planner refuses, and
/// Cancelled if `stop` returned true.
StatusOr<std::vector<FrontPoint>> PlanFront(std::span<const Workload> workloads, const FrontOptions& options);

}  // namespace moesaic::parallel
