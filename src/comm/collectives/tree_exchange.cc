#include "comm/collectives/tree_exchange.h"

#include <algorithm>

namespace moesaic::comm {
namespace {

std::vector<Ownership> DelegateAll(const RankTree& tree, const Ownership& owner) {
  std::vector<Ownership> of_children;
  for (int child = 0; child < static_cast<int>(tree.children.size()); ++child) {
    of_children.push_back(Delegate(tree, child, owner));
  }
  return of_children;
}

// Inner levels have one algorithm and no lossy encoding.
PlanShape Inner(const PlanShape& shape) {
  PlanShape inner = shape;
  inner.top = shape.inner;
  inner.wire = WireFormat::kExact;
  return inner;
}

Algorithm OfReduction(Algorithm algorithm) {
  const bool reduces =
      algorithm == Algorithm::kRing || algorithm == Algorithm::kHalving || algorithm == Algorithm::kLinear;
  return reduces ? algorithm : Algorithm::kPairwise;
}

Algorithm OfGather(Algorithm algorithm) {
  return algorithm == Algorithm::kBruck ? algorithm : OfReduction(algorithm);
}

int Children(const RankTree& tree) { return static_cast<int>(tree.children.size()); }

int ChildOf(const RankTree& tree, int rank) {
  for (int child = 0; child < Children(tree); ++child) {
    const std::vector<int>& ranks = tree.children[child].ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return child;
  }
  return -1;
}

// All ranks of the tree send to its first rank over the levels, or receive from it.
int GatherEmpty(PlanBuilder& builder, int step, const RankTree& tree) {
  int next = step;
  for (const RankTree& child : tree.children) next = std::max(next, GatherEmpty(builder, step, child));
  for (size_t i = 1; i < tree.children.size(); ++i) {
    builder.SendEmpty(next, tree.children[i].ranks.front(), tree.ranks.front());
  }
  return tree.children.empty() ? next : next + 1;
}

int ReleaseEmpty(PlanBuilder& builder, int step, const RankTree& tree) {
  if (tree.children.empty()) return step;
  for (size_t i = 1; i < tree.children.size(); ++i) {
    builder.SendEmpty(step, tree.ranks.front(), tree.children[i].ranks.front());
  }
  int end = step + 1;
  for (const RankTree& child : tree.children) end = std::max(end, ReleaseEmpty(builder, step + 1, child));
  return end;
}

}  // namespace

int TreeReduceScatter(PlanBuilder& builder, int step, const RankTree& tree, const Ownership& owner,
                      const WorkBuffer& work, const PlanShape& shape) {
  if (tree.children.empty()) return step;
  const std::vector<Ownership> of_children = DelegateAll(tree, owner);
  int next = step;
  for (int child = 0; child < Children(tree); ++child) {
    next = std::max(
        next, TreeReduceScatter(builder, step, tree.children[child], of_children[child], work, Inner(shape)));
  }
  return LevelReduceScatter(builder, next, OfReduction(shape.top), Children(tree),
                            Refine(tree, owner, of_children), work, shape.wire);
}

int TreeAllGather(PlanBuilder& builder, int step, const RankTree& tree, const Ownership& owner,
                  const WorkBuffer& work, const PlanShape& shape) {
  if (tree.children.empty()) return step;
  const std::vector<Ownership> of_children = DelegateAll(tree, owner);
  const int next = LevelAllGather(builder, step, OfGather(shape.top), Children(tree),
                                  Refine(tree, owner, of_children), work, shape.wire);
  int end = next;
  for (int child = 0; child < Children(tree); ++child) {
    end = std::max(
        end, TreeAllGather(builder, next, tree.children[child], of_children[child], work, Inner(shape)));
  }
  return end;
}

int TreeAllReduce(PlanBuilder& builder, int step, const RankTree& tree, int64_t offset, int64_t count,
                  const WorkBuffer& work, const PlanShape& shape) {
  if (tree.children.empty()) return step;
  const Ownership owner = DivideForAllReduce(tree, offset, count);
  if (shape.top != Algorithm::kDoubling && shape.top != Algorithm::kDirect) {
    step = TreeReduceScatter(builder, step, tree, owner, work, shape);
    return TreeAllGather(builder, step, tree, owner, work, shape);
  }
  const std::vector<Ownership> of_children = DelegateAll(tree, owner);
  int next = step;
  for (int child = 0; child < Children(tree); ++child) {
    next = std::max(
        next, TreeReduceScatter(builder, step, tree.children[child], of_children[child], work, Inner(shape)));
  }
  const std::vector<LevelPiece> pieces = Refine(tree, owner, of_children);
  next = shape.top == Algorithm::kDirect ? LevelDirect(builder, next, Children(tree), pieces, work)
                                         : LevelDoubling(builder, next, Children(tree), pieces, work);
  int end = next;
  for (int child = 0; child < Children(tree); ++child) {
    // The last sums are local steps of `next` or of the step before, which precede the messages of `next`.
    end = std::max(
        end, TreeAllGather(builder, next, tree.children[child], of_children[child], work, Inner(shape)));
  }
  return end;
}

int TreeBroadcast(PlanBuilder& builder, int step, const RankTree& tree, int root, int64_t offset,
                  int64_t count, const WorkBuffer& work, const PlanShape& shape) {
  if (tree.children.empty() || count == 0) return step;
  const int child_of_root = ChildOf(tree, root);
  // The root's child divides the vector among its ranks, which are the rails to the other children.
  std::vector<Ownership> of_children;
  for (const RankTree& child : tree.children) of_children.push_back(DivideForAllReduce(child, offset, count));
  const Ownership& rails = of_children[child_of_root];
  if (shape.top == Algorithm::kScatterGather) {
    const Ownership owner = DivideForAllReduce(tree, offset, count);
    for (const Piece& piece : owner) {
      if (piece.owner == root) continue;
      builder.Send(step, root, work.At(root, piece.offset, piece.count), piece.owner,
                   work.At(piece.owner, piece.offset, piece.count));
    }
    PlanShape gather = shape;
    gather.top = Algorithm::kRing;
    return TreeAllGather(builder, step + 1, tree, owner, work, gather);
  }
  int next = step;
  if (rails.size() > 1) {
    for (const Piece& piece : rails) {
      if (piece.owner == root) continue;
      builder.Send(step, root, work.At(root, piece.offset, piece.count), piece.owner,
                   work.At(piece.owner, piece.offset, piece.count));
    }
    ++next;
  } else if (rails.front().owner != root) {
    builder.Send(next++, root, work.At(root, offset, count), rails.front().owner,
                 work.At(rails.front().owner, offset, count));
  }
  next = LevelBroadcast(builder, next, shape.top, Children(tree), Refine(tree, rails, of_children), work);
  int end = next;
  for (int child = 0; child < Children(tree); ++child) {
    end = std::max(
        end, TreeAllGather(builder, next, tree.children[child], of_children[child], work, Inner(shape)));
  }
  return end;
}

int TreeBarrier(PlanBuilder& builder, int step, const RankTree& tree) {
  int next = step;
  for (const RankTree& child : tree.children) next = std::max(next, GatherEmpty(builder, step, child));
  for (int distance = 1; distance < Children(tree); distance *= 2, ++next) {
    for (int child = 0; child < Children(tree); ++child) {
      builder.SendEmpty(next, tree.children[child].ranks.front(),
                        tree.children[(child + distance) % Children(tree)].ranks.front());
    }
  }
  int end = next;
  for (const RankTree& child : tree.children) end = std::max(end, ReleaseEmpty(builder, next, child));
  return end;
}

}  // namespace moesaic::comm
