#include "comm/exchange/token_routing.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace moesaic::comm {

Status RouteTokens(const TopK& topk, const ExpertMap& map, const ReplicaChooser& chooser,
                   TokenRoutes* routes) {
  routes->begin.clear();
  routes->entries.clear();
  routes->dropped.clear();
  const size_t pairs = static_cast<size_t>(topk.tokens) * static_cast<size_t>(std::max(topk.k, 0));
  if (topk.k < 0 || topk.k > kMaxTopK) {
    return InvalidArgument("exchange: top-k must be in [0, {}], found {}", kMaxTopK, topk.k);
  }
  if (topk.ids.size() != pairs) {
    return InvalidArgument("exchange: {} tokens x top-{} need {} ids, found {}", topk.tokens, topk.k, pairs,
                           topk.ids.size());
  }
  if (!topk.weights.empty() && topk.weights.size() != pairs) {
    return InvalidArgument("exchange: {} ids need as many weights or none, found {}", pairs,
                           topk.weights.size());
  }
  if (!topk.replicas.empty() && topk.replicas.size() != pairs) {
    return InvalidArgument("exchange: {} ids need as many replicas or none, found {}", pairs,
                           topk.replicas.size());
  }
  routes->begin.push_back(0);
  for (int32_t token = 0; token < topk.tokens; ++token) {
    for (int32_t slot = 0; slot < topk.k; ++slot) {
      const size_t at = static_cast<size_t>(token) * topk.k + slot;
      const int32_t expert = topk.ids[at];
      if (expert == -1) continue;
      if (expert < 0 || expert >= map.experts()) {
        return InvalidArgument("exchange: token {}, slot {}: expert id must be -1 or in [0, {}), found {}",
                               token, slot, map.experts(), expert);
      }
      const float weight = topk.weights.empty() ? 1.0F : topk.weights[at];
      if (std::isnan(weight))
        return InvalidArgument("exchange: token {}, slot {}: weight is NaN", token, slot);
      int32_t physical = -1;
      if (!topk.replicas.empty()) {
        const auto replicas = map.ReplicasOf(expert);
        const int32_t replica = topk.replicas[at];
        if (replica < 0 || replica >= static_cast<int32_t>(replicas.size())) {
          return InvalidArgument("exchange: token {}, slot {}: expert {} has {} replicas, found replica {}",
                                 token, slot, expert, replicas.size(), replica);
        }
        physical = replicas[replica];
        if (chooser.dead(map.physical(physical).rank)) physical = -1;
      }
      if (physical < 0) physical = chooser.Choose(expert, token);
      if (physical < 0) {
        routes->dropped.push_back({token, slot, expert});
      } else {
        routes->entries.push_back({physical, slot, weight});
      }
    }
    routes->begin.push_back(static_cast<int32_t>(routes->entries.size()));
  }
  return OkStatus();
}

StatusOr<std::vector<int>> GroupOfRank(const Topology& topology, const std::string& level, int* groups) {
  std::vector<int> group_of_rank(topology.ranks(), -1);
  *groups = 0;
  std::set<std::string> levels;
  for (const Group& group : topology.groups()) {
    levels.insert(group.level);
    if (group.level != level) continue;
    for (const int rank : group.ranks) group_of_rank[rank] = *groups;
    ++*groups;
  }
  if (*groups == 0) {
    std::string known;
    for (const std::string& name : levels) known += (known.empty() ? "" : ", ") + name;
    return NotFound("topology {} has the levels {}, but not \"{}\"", topology.name(), known, level);
  }
  return group_of_rank;
}

ExchangeLayout CountLayout(const TokenRoutes& routes, const ExpertMap& map,
                           std::span<const int> group_of_rank, int groups) {
  ExchangeLayout layout;
  layout.tokens_per_rank.resize(map.ranks());
  layout.tokens_per_group.resize(groups);
  layout.tokens_per_expert.resize(map.experts());
  layout.dropped = routes.dropped;
  std::vector<size_t> last_of_rank(map.ranks(), 0),
      last_of_group(groups, 0);  // token + 1 that was counted last
  for (size_t token = 0; token + 1 < routes.begin.size(); ++token) {
    for (int32_t at = routes.begin[token]; at < routes.begin[token + 1]; ++at) {
      const ExpertReplica& replica = map.physical(routes.entries[at].physical);
      ++layout.tokens_per_expert[replica.expert];
      if (std::exchange(last_of_rank[replica.rank], token + 1) != token + 1)
        ++layout.tokens_per_rank[replica.rank];
      const int group = group_of_rank[replica.rank];
      if (group >= 0 && std::exchange(last_of_group[group], token + 1) != token + 1)
        ++layout.tokens_per_group[group];
    }
  }
  return layout;
}

}  // namespace moesaic::comm
