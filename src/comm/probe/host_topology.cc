#include "comm/probe/host_topology.h"

#include <algorithm>

#include "comm/probe/rank_place.h"
#include "comm/topology/node_topology.h"

namespace moesaic::comm {
namespace {

Status SendBytes(Transport& transport, int peer, Tag tag, std::span<const char> bytes, double limit_s) {
  ASSIGN_OR_RETURN(const TransferId id, transport.Send(peer, tag, std::as_bytes(bytes)));
  return Wait(transport, id, limit_s);
}

Status ReceiveBytes(Transport& transport, int peer, Tag tag, std::span<char> bytes, double limit_s) {
  ASSIGN_OR_RETURN(const TransferId id, transport.Receive(peer, tag, std::as_writable_bytes(bytes)));
  return Wait(transport, id, limit_s);
}

}  // namespace

StatusOr<std::vector<std::string>> TextsOfRanks(Transport& transport, Tag tag, const std::string& own,
                                                double limit_s) {
  const int ranks = transport.size();
  std::string texts(ranks * kRankTextBytes, '\0');  // [ranks, kRankTextBytes]
  const auto text = [&texts](int rank) {
    return std::span(texts).subspan(rank * kRankTextBytes, kRankTextBytes);
  };
  std::ranges::copy(own.substr(0, kRankTextBytes), text(transport.rank()).begin());
  if (transport.rank() == 0) {
    for (int rank = 1; rank < ranks; ++rank) {
      RETURN_IF_ERROR(ReceiveBytes(transport, rank, tag, text(rank), limit_s));
    }
    for (int rank = 1; rank < ranks; ++rank) {
      RETURN_IF_ERROR(SendBytes(transport, rank, tag, texts, limit_s));
    }
  } else {
    RETURN_IF_ERROR(SendBytes(transport, 0, tag, text(transport.rank()), limit_s));
    RETURN_IF_ERROR(ReceiveBytes(transport, 0, tag, texts, limit_s));
  }
  std::vector<std::string> all(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::span<const char> padded = text(rank);
    all[rank].assign(padded.begin(), std::ranges::find(padded, '\0'));
  }
  return all;
}

StatusOr<std::vector<std::string>> HostsOfRanks(Transport& transport, Tag tag, double limit_s) {
  return TextsOfRanks(transport, tag, HostName(), limit_s);
}

Topology TopologyOfHosts(std::span<const std::string> hosts) {
  std::vector<std::string> names;  // distinct, in the order of their first ranks
  std::vector<int> nodes;
  for (const std::string& host : hosts) {
    const auto known = std::ranges::find(names, host);
    nodes.push_back(static_cast<int>(known - names.begin()));
    if (known == names.end()) names.push_back(host);
  }
  return TopologyOfNodes(nodes, "job", "hosts of the job; links are assumed");
}

}  // namespace moesaic::comm
