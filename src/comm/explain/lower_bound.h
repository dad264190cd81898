// Time below which no algorithm can complete a collective on a topology.
#pragma once

#include <string>

#include "comm/collectives/plan.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Let groups divide the ranks into n parts, and V be the size of the vector. Each element needs a number of
/// messages between parts, so the ports of all parts together carry at least:
///   AllReduce: 2 (n - 1) V. The first part with the result needs n - 1 messages, and the others n - 1 more.
///   ReduceScatter, AllGather, Broadcast: (n - 1) V.
/// The port of one part, whose ranks own C bytes, carries at least (out, in):
///   AllReduce: V, V.
///   ReduceScatter: V - C, C.
///   AllGather: C, V - C.
///   Broadcast: V, 0 for the part of the root, and 0, V for the others.
///   AllToAll, AllToAllv: the blocks for other parts, the blocks from other parts.
/// Thus n equal parts with ports of bandwidth B need 2 (n - 1) / n * V / B for an AllReduce. A flat ring in
/// block order over P ranks loads a port with 2 (P - 1) / P * V, so it is at most (P - 1) n / (P (n - 1))
/// times slower. A message occupies a port only after the smallest latency of that port. If every part has m
/// children or more, whose messages to each other take l, the ports of all parts together also wait
/// l (1 - 1 / m) for sums of parts (AllReduce, ReduceScatter) and for the distribution of the last bytes
/// inside parts (AllReduce, AllGather, Broadcast), unless m times the bytes take less time. An AllReduce that
/// is faster than two messages one after the other moves n (n - 1) V, since parts send their terms to each
/// other directly. Bytes that pass a port early are sums of few ranks, and those that pass it late reach few
/// ranks, which CrossingBound counts for each port of an AllReduce. Local memory traffic and compressed
/// encodings are not considered.
struct LowerBound {
  double seconds = 0;  ///< latency_s + transfer_s
  double latency_s = 0;
  double transfer_s = 0;  ///< bytes of the bottleneck over its bandwidth
  int group = -1;  ///< group whose port is the bottleneck, or whose children's ports are; -1 without traffic
  bool together = false;   ///< The ports of several parts together are the bottleneck.
  std::string bottleneck;  ///< "port of node 0, out" or "ports of 4 x node"
};

/// Returns the largest bound over the ports of all groups, the children of each group with its surroundings,
/// and the groups of each depth. The request must be valid and have as many ranks as the topology.
LowerBound BoundOf(const PlanRequest& request, const Topology& topology);

}  // namespace moesaic::comm
