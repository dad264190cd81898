// Trees, requests and shapes that tests of plans run through.
#pragma once

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "comm/collectives/plan_factory.h"

namespace moesaic::comm {

inline constexpr Collective kAllCollectives[] = {
    Collective::kBroadcast, Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
    Collective::kAllToAll,  Collective::kAllToAllv, Collective::kBarrier};

inline constexpr Algorithm kAllAlgorithms[] = {
    Algorithm::kRing,     Algorithm::kPairwise, Algorithm::kHalving,       Algorithm::kBruck,
    Algorithm::kDoubling, Algorithm::kDirect,   Algorithm::kLinear,        Algorithm::kSingleCrossing,
    Algorithm::kBinomial, Algorithm::kChain,    Algorithm::kScatterGather, Algorithm::kDissemination};

inline RankTree OneLevel(int ranks) {
  std::vector<int> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  return FlatTree(order);
}

/// Tree whose children are the given ones, or the only one.
inline RankTree Join(std::vector<RankTree> children) {
  if (children.size() == 1) return std::move(children.front());
  RankTree tree;
  for (RankTree& child : children) {
    tree.ranks.insert(tree.ranks.end(), child.ranks.begin(), child.ranks.end());
    tree.children.push_back(std::move(child));
  }
  return tree;
}

/// Two levels with groups of the given sizes; ranks are numbered in order.
inline RankTree GroupTree(const std::vector<int>& sizes) {
  std::vector<RankTree> children;
  int next = 0;
  for (const int size : sizes) {
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), next);
    next += size;
    children.push_back(FlatTree(ranks));
  }
  return Join(std::move(children));
}

/// A tree of `ranks` in random order, with random groups, depth and port bandwidths.
inline RankTree RandomTree(std::vector<int> ranks, std::mt19937& random, int depth = 0) {
  if (depth == 0) std::shuffle(ranks.begin(), ranks.end(), random);
  RankTree tree;
  if (ranks.size() == 1 || depth == 4 || random() % 4 == 0) {
    tree = FlatTree(ranks);
  } else {
    std::vector<RankTree> children;
    for (size_t at = 0; at < ranks.size();) {
      const size_t size = std::min<size_t>(ranks.size() - at, 1 + random() % ((ranks.size() + 1) / 2));
      children.push_back(RandomTree(
          {ranks.begin() + static_cast<int64_t>(at), ranks.begin() + static_cast<int64_t>(at + size)}, random,
          depth + 1));
      at += size;
    }
    tree = Join(std::move(children));
  }
  tree.port_bytes_per_s = static_cast<double>(1 + random() % 8);
  return tree;
}

/// Request of about `count` elements in all. `variant` chooses the root and irregular counts; 0 gives even
/// ones.
inline PlanRequest MakeRequest(Collective collective, int ranks, int64_t count, unsigned variant) {
  PlanRequest request = {.collective = collective, .ranks = ranks, .count = count};
  std::mt19937 random(variant);
  const auto part = [&](int64_t even) {
    if (variant == 0) return even;
    return random() % 4 == 0 ? int64_t{0}
                             : static_cast<int64_t>(random() % static_cast<uint64_t>(2 * even + 1));
  };
  request.root = static_cast<int>(variant % static_cast<unsigned>(ranks));
  if (collective == Collective::kAllToAll) request.count = count / ranks;
  if (collective == Collective::kReduceScatter || collective == Collective::kAllGather) {
    for (int rank = 0; rank < ranks; ++rank) request.counts.push_back(part(count / ranks));
  }
  if (collective == Collective::kAllToAllv) {
    for (int pair = 0; pair < ranks * ranks; ++pair) request.matrix.push_back(part(count / ranks / 2 + 1));
  }
  return request;
}

/// Shapes that BuildPlan() takes for the collective and the tree.
inline std::vector<PlanShape> ShapesOf(Collective collective, const RankTree& tree) {
  std::vector<PlanShape> shapes;
  const bool all_to_all = collective == Collective::kAllToAll || collective == Collective::kAllToAllv;
  const bool reduces = collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
  const int depth = Depth(tree);
  for (const Algorithm top : kAllAlgorithms) {
    if (!Supports(collective, top) || (all_to_all && top == Algorithm::kBruck && depth > 1)) continue;
    shapes.push_back({.top = top});
    if (reduces && top == Algorithm::kSingleCrossing) {
      shapes.push_back({.top = top, .fixed_order = true});
      continue;
    }
    if (depth > 1) shapes.push_back({.top = top, .inner = Algorithm::kHalving, .segments = 2});
    if (depth > 1) shapes.push_back({.top = top, .inner = Algorithm::kRing, .segments = 3, .streams = 2});
    if (depth > 1 && (top == Algorithm::kLinear || top == Algorithm::kDirect)) {
      shapes.push_back({.top = top, .inner = Algorithm::kLinear, .segments = 2});
    }
    if (depth == 1) shapes.push_back({.top = top, .segments = 4, .streams = 2});
    if (reduces) shapes.push_back({.top = top, .fixed_order = true});
  }
  if (reduces && depth > 1) {
    shapes.push_back({.top = Algorithm::kPairwise, .segments = 2, .wire = WireFormat::kInt8});
    shapes.push_back({.top = Algorithm::kPairwise, .wire = WireFormat::kBf16});
  }
  return shapes;
}

}  // namespace moesaic::comm
