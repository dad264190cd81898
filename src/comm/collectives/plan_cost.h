// Predicted time of a plan on a topology.
#pragma once

#include <vector>

#include "comm/collectives/plan.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

struct CostOptions {
  /// Bandwidth of local copies and sums if the topology does not state the device's.
  double memory_bytes_per_s = 20e9;
  /// Bytes of a step that fit in a core's cache, and the cache's bandwidth, which applies to them if it is
  /// higher.
  double cache_bytes = 128 << 10, cache_bytes_per_s = 150e9;
  /// Time of a rank's processor per message, in addition to the link's latency.
  double message_s = 0;
};

struct PlanCost {
  double seconds = 0;
  std::vector<double> channel_bytes;  ///< by channel of the topology
  int bottleneck = -1;                ///< channel that is busy longest; -1 without traffic
  double bottleneck_s = 0;            ///< time of all its bytes at its bandwidth
};

/// Returns the bytes of a message on the wire.
double WireBytes(const Message& message, int element_bytes);

/// Estimates the cost quickly: all ranks do each step together, and it takes the largest latency plus the
/// time of the busiest channel.
PlanCost EstimatePlan(const Plan& plan, const Topology& topology, const CostOptions& options = {});
/// Simulates the plan with FlowSimulator: a message starts when both ranks have started its round, messages
/// share channels fairly, and streams of a rank run concurrently. The sum of the last piece of a message
/// follows its arrival. The plan must be valid.
PlanCost SimulatePlan(const Plan& plan, const Topology& topology, const CostOptions& options = {});

/// Returns a lower bound in seconds for any AllReduce of `bytes`, by the bandwidth of ports: if the groups of
/// one depth divide the ranks into n parts, 2 (n - 1) vectors cross their ports in each direction.
double AllReduceBound(const Topology& topology, double bytes);

}  // namespace moesaic::comm
