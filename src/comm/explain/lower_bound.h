// Time below which no algorithm can complete a collective on a topology.
#pragma once

#include <string>

#include "comm/collectives/plan.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Let groups divide the ranks into n parts, and V be the size of the vector. Counting the messages that
/// carry one element from part to part gives the bytes that cross the ports of all parts together:
///   AllReduce       2 (n - 1) V: n - 1 messages until the first part has the result, n - 1 that bring it to
///   the others ReduceScatter, AllGather, Broadcast  (n - 1) V
/// and the bytes of the port of one part, with C bytes owned by its ranks (out, in):
///   AllReduce       V, V                Broadcast  V out of the root's part, V into each other one
///   ReduceScatter   V - C, C            AllGather  C, V - C
///   AllToAll(v)     the blocks for other parts, those from other parts
/// n equal parts with ports of bandwidth B thus need 2 (n - 1) / n * V / B for an AllReduce; a flat ring in
/// block order over P ranks loads a port with 2 (P - 1) / P * V and is at most (P - 1) n / (P (n - 1)) times
/// slower. Messages occupy a port after its smallest latency only. Local memory traffic and compressed
/// encodings are not considered.
struct LowerBound {
  double seconds = 0;  ///< latency_s + transfer_s
  double latency_s = 0;
  double transfer_s = 0;  ///< bytes of the bottleneck over its bandwidth
  int group = -1;  ///< group whose port is the bottleneck, or whose children's ports are; -1 without traffic
  bool together = false;   ///< The ports of several parts together are the bottleneck.
  std::string bottleneck;  ///< "port of node 0, out" or "ports of 4 x node"
};

/// The largest bound over the ports of all groups, the children of each group with its surroundings, and the
/// groups of each depth. The request must be valid and have as many ranks as the topology.
LowerBound BoundOf(const PlanRequest& request, const Topology& topology);

}  // namespace moesaic::comm
