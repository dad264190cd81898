#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/exchange/exchange_cost.h"

namespace moesaic::comm {
namespace {

// Rows that cross the border of a group.
struct Crossing {
  int64_t tokens_out = 0, tokens_in = 0;    // a token once, for all of its experts on the other side
  int64_t entries_out = 0, entries_in = 0;  // once per expert
};

std::vector<Crossing> Crossings(const Topology& topology, const ExpertMap& map,
                                std::span<const TokenRoutes> tokens) {
  const size_t groups = topology.groups().size();
  std::vector<std::vector<bool>> has(groups, std::vector<bool>(topology.ranks(), false));
  for (size_t group = 0; group < groups; ++group) {
    for (const int rank : topology.groups()[group].ranks) has[group][rank] = true;
  }
  std::vector<Crossing> crossings(groups);
  for (size_t source = 0; source < tokens.size(); ++source) {
    const TokenRoutes& routes = tokens[source];
    for (size_t group = 1; group < groups; ++group) {
      Crossing& crossing = crossings[group];
      const bool inside = has[group][source];
      for (size_t token = 0; token + 1 < routes.begin.size(); ++token) {
        int64_t crossed = 0;
        for (int32_t i = routes.begin[token]; i < routes.begin[token + 1]; ++i) {
          crossed += has[group][map.physical(routes.entries[i].physical).rank] != inside;
        }
        (inside ? crossing.entries_out : crossing.entries_in) += crossed;
        (inside ? crossing.tokens_out : crossing.tokens_in) += crossed > 0;
      }
    }
  }
  return crossings;
}

// Seconds in which the port of a group carries rows out and in.
double PortSeconds(const Topology& topology, int group, double bytes_out, double bytes_in) {
  double bytes_per_s[2] = {0, 0};
  std::set<int> channels[2];
  for (const int rank : topology.groups()[group].ranks) {
    for (const bool up : {false, true}) {
      const int channel = topology.ChannelOf(group, rank, up);
      if (channels[up].insert(channel).second) bytes_per_s[up] += topology.channels()[channel].bytes_per_s;
    }
  }
  if (channels[0] == channels[1]) return (bytes_out + bytes_in) / bytes_per_s[0];  // half-duplex
  return std::max(bytes_in / bytes_per_s[0], bytes_out / bytes_per_s[1]);
}

}  // namespace

StatusOr<ExchangeBound> BoundExchange(const Topology& topology, const ExpertMap& map,
                                      const ExchangeWorkload& workload, const ExchangeOptions& options) {
  std::vector<TokenRoutes> tokens(topology.ranks());
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    ASSIGN_OR_RETURN(tokens[rank], UniformTokens(topology, map, workload, options.replica_choice, rank));
  }
  const std::vector<Crossing> crossings = Crossings(topology, map, tokens);
  const auto dispatched = static_cast<double>(WireRowBytes(options.dispatch_payload, workload.hidden));
  const auto combined = static_cast<double>(WireRowBytes(options.combine_payload, workload.hidden));
  const bool by_slot = options.reduction == Reduction::kBySlot;
  ExchangeBound bound;
  const auto raise = [&](double seconds, int group, double* to, std::string* bottleneck) {
    seconds += topology.PortLatency(group);
    if (seconds <= *to) return;
    *to = seconds;
    *bottleneck = topology.groups()[group].name;
  };
  for (size_t i = 1; i < crossings.size(); ++i) {
    const Crossing& at = crossings[i];
    if (at.tokens_out + at.tokens_in == 0) continue;
    const int group = static_cast<int>(i);
    raise(PortSeconds(topology, group, dispatched * static_cast<double>(at.tokens_out),
                      dispatched * static_cast<double>(at.tokens_in)),
          group, &bound.dispatch_s, &bound.dispatch_port);
    // Outputs return where rows came from.
    const auto out = static_cast<double>(by_slot ? at.entries_in : at.tokens_in);
    const auto in = static_cast<double>(by_slot ? at.entries_out : at.tokens_out);
    raise(PortSeconds(topology, group, combined * out, combined * in), group, &bound.combine_s,
          &bound.combine_port);
  }
  return bound;
}

}  // namespace moesaic::comm
