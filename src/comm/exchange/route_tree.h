// Tree along which rows are forwarded: the topology without dead ranks and without levels of a single child.
// In phase p a rank exchanges messages inside its group at depth p of this tree, with ranks of other
// children.
#pragma once

#include <string>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Immutable; safe to read from any thread.
class RouteTree {
 public:
  struct Node {
    int depth = 0;
    std::vector<int> ranks;  ///< live ranks below, ascending
  };

  /// Rows are forwarded at groups of the named levels (Group::level); all levels when `levels` is empty. A
  /// level that is not named is merged with its parent.
  static RouteTree Hierarchical(const Topology& topology, const std::vector<bool>& dead,
                                const std::vector<std::string>& levels);
  /// Every live rank sends to every other one.
  static RouteTree Direct(const std::vector<bool>& dead);

  int ranks() const { return static_cast<int>(path_.size()); }
  int phases() const { return phases_; }
  /// Returns the depth of the smallest node with both ranks. A row moves between them in this phase.
  int MeetingPhase(int a, int b) const;
  /// Returns the live ranks that may receive a message of `rank` in `phase`, ascending. Sources() returns
  /// those that may send one to it.
  std::vector<int> Targets(int rank, int phase) const;
  std::vector<int> Sources(int rank, int phase) const;
  /// Returns the rank that receives a row of token `token` from `holder` on its way to `destination`: the
  /// peer of equal index in the destination's child group. If that group is larger than the holder's, several
  /// peers have this index modulo the size of the holder's group, and take turns by hash.
  int Entry(int holder, int destination, int source, int token) const;

 private:
  RouteTree() = default;
  void AddChildren(const Topology& topology, int group, int node, const std::vector<bool>& dead,
                   const std::vector<std::string>& levels);
  int AddNode(int depth, std::vector<int> ranks);
  const Node& NodeAt(int rank, int depth) const { return nodes_[path_[rank][depth]]; }

  std::vector<Node> nodes_;
  std::vector<std::vector<int>>
      path_;  // [ranks]: nodes from the root to the rank's leaf; empty for dead ranks
  int phases_ = 0;
};

}  // namespace moesaic::comm
