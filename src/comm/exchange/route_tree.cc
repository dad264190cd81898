#include "comm/exchange/route_tree.h"

#include <algorithm>

#include "comm/exchange/route_hash.h"

namespace moesaic::comm {
namespace {

std::vector<int> LiveRanks(const Topology& topology, int group, const std::vector<bool>& dead) {
  std::vector<int> live;
  for (const int rank : topology.groups()[group].ranks) {
    if (!dead[rank]) live.push_back(rank);
  }
  return live;
}

int IndexOf(const std::vector<int>& sorted, int rank) {
  return static_cast<int>(std::lower_bound(sorted.begin(), sorted.end(), rank) - sorted.begin());
}

// Indices of the receivers in a group of `to` ranks, for index `index` of a group of `from` ranks: index,
// index + from, ... when the receiving group is larger; otherwise the index modulo its size.
int Receivers(int index, int from, int to) { return from >= to ? 1 : (to - index + from - 1) / from; }
int Receiver(int index, int from, int to, int turn) { return from >= to ? index % to : index + from * turn; }
bool Receives(int index, int from, int to, int receiver) {
  return from >= to ? index % to == receiver : receiver % from == index;
}

}  // namespace

int RouteTree::AddNode(int depth, std::vector<int> ranks) {
  const int node = static_cast<int>(nodes_.size());
  for (const int rank : ranks) path_[rank].push_back(node);
  if (ranks.size() > 1) phases_ = std::max(phases_, depth + 1);
  nodes_.push_back({depth, std::move(ranks)});
  return node;
}

// Adds the children of `node`, which has the live ranks of `group`.
void RouteTree::AddChildren(const Topology& topology, int group, int node, const std::vector<bool>& dead,
                            const std::vector<std::string>& levels) {
  // Children with live ranks; those of levels that are not named, and only children, are replaced by their
  // own.
  std::vector<int> children = {group};
  for (bool changed = true; changed;) {
    changed = false;
    std::vector<int> next;
    for (const int child : children) {
      const Group& at = topology.groups()[child];
      const bool forwards =
          child != group && children.size() > 1 &&
          (levels.empty() || std::find(levels.begin(), levels.end(), at.level) != levels.end());
      if (at.children.empty() || forwards) {
        next.push_back(child);
        continue;
      }
      for (const int below : at.children) {
        if (!LiveRanks(topology, below, dead).empty()) next.push_back(below);
      }
      changed = true;
    }
    children = std::move(next);
  }
  const int depth = nodes_[node].depth + 1;
  for (const int child : children) {
    const int added = AddNode(depth, LiveRanks(topology, child, dead));
    if (nodes_[added].ranks.size() > 1) AddChildren(topology, child, added, dead, levels);
  }
}

RouteTree RouteTree::Hierarchical(const Topology& topology, const std::vector<bool>& dead,
                                  const std::vector<std::string>& levels) {
  RouteTree tree;
  tree.path_.resize(topology.ranks());
  const int root = tree.AddNode(0, LiveRanks(topology, 0, dead));
  if (tree.nodes_[root].ranks.size() > 1) tree.AddChildren(topology, 0, root, dead, levels);
  return tree;
}

RouteTree RouteTree::Direct(const std::vector<bool>& dead) {
  RouteTree tree;
  tree.path_.resize(dead.size());
  std::vector<int> live;
  for (size_t rank = 0; rank < dead.size(); ++rank) {
    if (!dead[rank]) live.push_back(static_cast<int>(rank));
  }
  tree.AddNode(0, live);
  if (live.size() > 1) {
    for (const int rank : live) tree.AddNode(1, {rank});
  }
  return tree;
}

int RouteTree::MeetingPhase(int a, int b) const {
  size_t depth = 0;
  while (depth + 1 < path_[a].size() && depth + 1 < path_[b].size() &&
         path_[a][depth + 1] == path_[b][depth + 1]) {
    ++depth;
  }
  return static_cast<int>(depth);
}

std::vector<int> RouteTree::Targets(int rank, int phase) const {
  std::vector<int> targets;
  if (path_[rank].size() < static_cast<size_t>(phase) + 2) return targets;
  const std::vector<int>& own = NodeAt(rank, phase + 1).ranks;
  const int index = IndexOf(own, rank), from = static_cast<int>(own.size());
  for (const int peer : NodeAt(rank, phase).ranks) {
    if (path_[peer][phase + 1] == path_[rank][phase + 1]) continue;
    const std::vector<int>& other = NodeAt(peer, phase + 1).ranks;
    if (Receives(index, from, static_cast<int>(other.size()), IndexOf(other, peer))) targets.push_back(peer);
  }
  return targets;
}

std::vector<int> RouteTree::Sources(int rank, int phase) const {
  std::vector<int> sources;
  if (path_[rank].size() < static_cast<size_t>(phase) + 2) return sources;
  const std::vector<int>& own = NodeAt(rank, phase + 1).ranks;
  const int index = IndexOf(own, rank), to = static_cast<int>(own.size());
  for (const int peer : NodeAt(rank, phase).ranks) {
    if (path_[peer][phase + 1] == path_[rank][phase + 1]) continue;
    const std::vector<int>& other = NodeAt(peer, phase + 1).ranks;
    if (Receives(IndexOf(other, peer), static_cast<int>(other.size()), to, index)) sources.push_back(peer);
  }
  return sources;
}

int RouteTree::Entry(int holder, int destination, int source, int token) const {
  const int phase = MeetingPhase(holder, destination);
  const std::vector<int>& own = NodeAt(holder, phase + 1).ranks;
  const std::vector<int>& other = NodeAt(destination, phase + 1).ranks;
  const int from = static_cast<int>(own.size()), to = static_cast<int>(other.size());
  const int index = IndexOf(own, holder);
  const int receivers = Receivers(index, from, to);
  const int turn = receivers == 1 ? 0 : static_cast<int>(RouteHash(source, token, phase) % receivers);
  return other[Receiver(index, from, to, turn)];
}

}  // namespace moesaic::comm
