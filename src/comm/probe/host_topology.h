// Topology of a job whose links were not measured: the ranks of each host are one group.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/topology/topology.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Exchanges a short text of every rank, cut to kRankTextBytes. All ranks call it; it uses `tag`. Errors are
/// those of transfers.
inline constexpr size_t kRankTextBytes = 256;
StatusOr<std::vector<std::string>> TextsOfRanks(Transport& transport, Tag tag, const std::string& own,
                                                double limit_s);

/// Returns the host name of every rank, like TextsOfRanks().
StatusOr<std::vector<std::string>> HostsOfRanks(Transport& transport, Tag tag, double limit_s);

/// TopologyOfNodes() of ranks on these hosts.
Topology TopologyOfHosts(std::span<const std::string> hosts);

}  // namespace moesaic::comm
