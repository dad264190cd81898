// Hierarchy of ranks that an algorithm follows, and the ownership of a vector in it.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// A group of ranks. Leaves have one rank; other nodes have at least two children.
struct RankTree {
  std::vector<RankTree> children;
  std::vector<int> ranks;       // in the order of the children
  double port_bytes_per_s = 0;  // sum of the bandwidths of its ports; 0: unknown
};

/// Returns a tree with one level whose children are `order`.
RankTree FlatTree(const std::vector<int>& order);
/// Returns the tree of a topology. Groups of one child are skipped.
RankTree TreeOf(const Topology& topology);
/// Returns the tree with only its topmost `levels` levels. Ranks below become children of the last level.
RankTree Cut(const RankTree& tree, int levels);
/// Returns the tree without the groups of one depth, 1 for the children of the root. Their children become
/// children of the groups above.
RankTree Without(const RankTree& tree, int depth);
/// Returns the groups of a depth. Leaves that are less deep stay, so all ranks are in exactly one of them.
std::vector<const RankTree*> GroupsAt(const RankTree& tree, int depth);
/// Returns the number of levels: 1 for a flat tree, 0 for a single rank.
int Depth(const RankTree& tree);

/// A range of a vector and the rank that owns it.
struct Piece {
  int64_t offset = 0, count = 0;
  int owner = 0;
};
using Ownership = std::vector<Piece>;  // sorted by offset, disjoint

/// Divides a range among the ranks so that an AllReduce loads the ports of each group in proportion to their
/// bandwidth: a child with a slow port owns less.
Ownership DivideForAllReduce(const RankTree& tree, int64_t offset, int64_t count);
/// Returns the ownership within `child` when `owner` holds for its parent `tree`: pieces of its own ranks
/// stay with them, pieces of every other child are spread over all ranks of `child`, in order. Equal children
/// thereby get aligned peers.
Ownership Delegate(const RankTree& tree, int child, const Ownership& owner);
/// Returns part `index` of `parts` parts of each piece. The first ones grow as 1, 2, ..., `largest`, and all
/// others are as large as the last of these.
Ownership Segment(const Ownership& whole, int index, int parts, int largest = 1);

/// A range with the rank that handles it in each child of a tree.
struct LevelPiece {
  int64_t offset = 0, count = 0;
  std::vector<int> handlers;  // [children]
  int owner = 0;              // child of the final owner
};
/// Returns the common refinement of the ownership of a tree and those of its children.
std::vector<LevelPiece> Refine(const RankTree& tree, const Ownership& owner,
                               const std::vector<Ownership>& of_children);

}  // namespace moesaic::comm
