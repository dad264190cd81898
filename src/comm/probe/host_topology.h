// Topology of a job whose links were not measured: the ranks of each host are one group.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/topology/topology.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Returns the host name of every rank. All ranks call it; it uses `tag`. Errors are those of transfers.
StatusOr<std::vector<std::string>> HostsOfRanks(Transport& transport, Tag tag, double limit_s);

/// Topology of ranks on these hosts. Links have assumed values: those of shared memory within a host, and of
/// 10 Gbit/s Ethernet between hosts.
Topology TopologyOfHosts(std::span<const std::string> hosts);

}  // namespace moesaic::comm
