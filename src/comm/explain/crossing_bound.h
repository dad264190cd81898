// Lower bound of the time of an AllReduce: the bytes that must pass the port of a group, in the time that
// latencies leave for them.
#pragma once

#include <utility>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// *Terms* are the input vectors of ranks. Each rank inside a group needs the terms of all ranks outside. If
/// an AllReduce takes T, a byte that enters the group at time u is part of a message that started at u - l or
/// before, where l is its latency. The sender has at most the terms of ranks whose messages arrive until
/// then, and inside the group only ranks that a message reaches within T - u use the byte. So u and T limit
/// the pairs (term, result) that the byte serves. The bytes that pass the port until T must serve all pairs
/// of all elements. The same holds for bytes that leave the group.
class CrossingBound {
 public:
  /// Borrows the topology.
  explicit CrossingBound(const Topology& topology);

  /// Returns a lower bound, in seconds, of the time of an AllReduce of `bytes` if the port of `group` carries
  /// `bytes_per_s` in each direction. `group` is not the root. `at_least` is another known bound: the result
  /// is never below it.
  double Seconds(int group, double bytes, double bytes_per_s, double at_least) const;

 private:
  // Numbers of ranks that can share their data within a time: (seconds, ranks), both ascending.
  using Reach = std::vector<std::pair<double, double>>;
  // Messages whose smallest common group is one ancestor of the group.
  struct Outside {
    double latency = 0;
    Reach reach;  // of ranks outside the group, from a rank outside that such a message involves
  };
  struct Port {
    Reach inside;
    std::vector<Outside> outside;
  };

  bool Contains(int group, int other) const;
  Port PortOf(int group) const;
  static double Served(const Port& port, double total, bool enters);

  const Topology& topology_;
  // By group: least latency of a message between children of the group or of one that contains it.
  std::vector<double> exchange_s_;
};

}  // namespace moesaic::comm
