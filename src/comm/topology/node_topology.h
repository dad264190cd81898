// Topology of a job whose links were not measured: the ranks of each node are one group.
#pragma once

#include <span>
#include <string>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// `nodes` has the number of each rank's node, from 0 without gaps. Links have assumed values: those of
/// shared memory within a node, and of 10 Gbit/s Ethernet between nodes.
Topology TopologyOfNodes(std::span<const int> nodes, const std::string& name, const std::string& origin);

}  // namespace moesaic::comm
