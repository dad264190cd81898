#include "comm/collectives/rank_tree.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace moesaic::comm {
namespace {

RankTree Leaf(int rank) {
  RankTree leaf;
  leaf.ranks = {rank};
  return leaf;
}

RankTree SubtreeOf(const Topology& topology, int number) {
  const Group& group = topology.groups()[number];
  if (group.children.empty()) return Leaf(group.ranks.front());
  RankTree tree;
  for (const int child : group.children) {
    RankTree subtree = SubtreeOf(topology, child);
    const double port = topology.groups()[child].port_bytes_per_s;
    subtree.port_bytes_per_s = group.link.shared ? port : port * static_cast<double>(subtree.ranks.size());
    tree.ranks.insert(tree.ranks.end(), subtree.ranks.begin(), subtree.ranks.end());
    tree.children.push_back(std::move(subtree));
  }
  if (tree.children.size() > 1) return tree;
  RankTree only = std::move(tree.children.front());
  return only;
}

// Fractions of a vector that the children of a tree own. With a fraction s, a port of bandwidth b sends and
// receives V (1 + (m - 2) s) in an AllReduce of V bytes among m children. All ports that own anything get the
// same time T, so s = max(0, (T b - 1) / (m - 2)); T is found by bisection.
std::vector<double> Shares(const RankTree& tree) {
  const size_t m = tree.children.size();
  std::vector<double> shares(m, 1.0 / static_cast<double>(m));
  double low = 0, high = 0;
  for (const RankTree& child : tree.children) {
    if (child.port_bytes_per_s <= 0) return shares;
    high = std::max(high, static_cast<double>(m) / child.port_bytes_per_s);
  }
  if (m < 3) return shares;
  const auto fraction = [&](const RankTree& child, double time) {
    return std::max(0.0, (time * child.port_bytes_per_s - 1) / static_cast<double>(m - 2));
  };
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    double sum = 0;
    for (const RankTree& child : tree.children) sum += fraction(child, middle);
    (sum < 1 ? low : high) = middle;
  }
  double sum = 0;
  for (size_t i = 0; i < m; ++i) sum += shares[i] = fraction(tree.children[i], high);
  for (double& share : shares) share /= sum;
  return shares;
}

// Borders of `count` elements that are divided by `weights`. Large parts are multiples of 32 elements.
std::vector<int64_t> Divide(int64_t count, const std::vector<double>& weights) {
  constexpr int64_t kAlignment = 32;
  const int64_t unit = count >= kAlignment * 8 * static_cast<int64_t>(weights.size()) ? kAlignment : 1;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> borders = {0};
  double sum = 0;
  for (const double weight : weights) {
    sum += weight;
    const auto border =
        static_cast<int64_t>(static_cast<double>(count) * sum / total / static_cast<double>(unit) + 0.5) *
        unit;
    borders.push_back(std::clamp(border, borders.back(), count));
  }
  borders.back() = count;
  return borders;
}

void DivideInto(const RankTree& tree, int64_t offset, int64_t count, Ownership* result) {
  if (tree.children.empty()) {
    if (count > 0) result->push_back({offset, count, tree.ranks.front()});
    return;
  }
  const std::vector<int64_t> borders = Divide(count, Shares(tree));
  for (size_t i = 0; i < tree.children.size(); ++i) {
    DivideInto(tree.children[i], offset + borders[i], borders[i + 1] - borders[i], result);
  }
}

void Append(Ownership* ownership, const Piece& piece) {
  if (piece.count == 0) return;
  if (!ownership->empty()) {
    Piece& last = ownership->back();
    if (last.owner == piece.owner && last.offset + last.count == piece.offset) {
      last.count += piece.count;
      return;
    }
  }
  ownership->push_back(piece);
}

// Index of the child of each rank; -1 for ranks outside.
std::vector<int> ChildOfRank(const RankTree& tree) {
  const int last = *std::max_element(tree.ranks.begin(), tree.ranks.end());
  std::vector<int> child_of(last + 1, -1);
  for (int child = 0; child < static_cast<int>(tree.children.size()); ++child) {
    for (const int rank : tree.children[child].ranks) child_of[rank] = child;
  }
  return child_of;
}

}  // namespace

RankTree FlatTree(const std::vector<int>& order) {
  if (order.size() == 1) return Leaf(order.front());
  RankTree tree;
  tree.ranks = order;
  for (const int rank : order) tree.children.push_back(Leaf(rank));
  return tree;
}

RankTree TreeOf(const Topology& topology) { return SubtreeOf(topology, 0); }

RankTree Cut(const RankTree& tree, int levels) {
  if (tree.children.empty()) return tree;
  RankTree cut = levels <= 1 ? FlatTree(tree.ranks) : RankTree{};
  cut.port_bytes_per_s = tree.port_bytes_per_s;
  if (levels <= 1) return cut;
  cut.ranks = tree.ranks;
  for (const RankTree& child : tree.children) cut.children.push_back(Cut(child, levels - 1));
  return cut;
}

RankTree Without(const RankTree& tree, int depth) {
  RankTree result;
  result.ranks = tree.ranks;
  result.port_bytes_per_s = tree.port_bytes_per_s;
  for (const RankTree& child : tree.children) {
    if (depth > 1) {
      result.children.push_back(Without(child, depth - 1));
    } else if (child.children.empty()) {
      result.children.push_back(child);
    } else {
      result.children.insert(result.children.end(), child.children.begin(), child.children.end());
    }
  }
  return result;
}

std::vector<const RankTree*> GroupsAt(const RankTree& tree, int depth) {
  if (depth == 0 || tree.children.empty()) return {&tree};
  std::vector<const RankTree*> groups;
  for (const RankTree& child : tree.children) {
    const std::vector<const RankTree*> below = GroupsAt(child, depth - 1);
    groups.insert(groups.end(), below.begin(), below.end());
  }
  return groups;
}

int Depth(const RankTree& tree) {
  int depth = 0;
  for (const RankTree& child : tree.children) depth = std::max(depth, 1 + Depth(child));
  return depth;
}

Ownership DivideForAllReduce(const RankTree& tree, int64_t offset, int64_t count) {
  Ownership result;
  DivideInto(tree, offset, count, &result);
  return result;
}

Ownership Delegate(const RankTree& tree, int child, const Ownership& owner) {
  const std::vector<int> child_of = ChildOfRank(tree);
  const std::vector<int>& ranks = tree.children[child].ranks;
  std::vector<int64_t> totals(tree.children.size(), 0), seen(tree.children.size(), 0);
  for (const Piece& piece : owner) totals[child_of[piece.owner]] += piece.count;
  Ownership result;
  for (const Piece& piece : owner) {
    const int other = child_of[piece.owner];
    if (other == child) {
      Append(&result, piece);
      continue;
    }
    const std::vector<int64_t> borders = Divide(totals[other], std::vector<double>(ranks.size(), 1.0));
    for (int64_t at = 0; at < piece.count;) {
      const auto next = std::upper_bound(borders.begin(), borders.end(), seen[other]);
      const int64_t count = std::min(piece.count - at, *next - seen[other]);
      const auto index = static_cast<size_t>(next - borders.begin()) - 1;
      Append(&result, {piece.offset + at, count, ranks[index]});
      at += count;
      seen[other] += count;
    }
  }
  return result;
}

Ownership Segment(const Ownership& whole, int index, int parts, int largest) {
  Ownership result;
  std::vector<double> weights;
  for (int part = 1; part <= parts; ++part) weights.push_back(std::min(part, largest));
  for (const Piece& piece : whole) {
    const std::vector<int64_t> borders = Divide(piece.count, weights);
    if (borders[index + 1] == borders[index]) continue;
    result.push_back({piece.offset + borders[index], borders[index + 1] - borders[index], piece.owner});
  }
  return result;
}

std::vector<LevelPiece> Refine(const RankTree& tree, const Ownership& owner,
                               const std::vector<Ownership>& of_children) {
  const std::vector<int> child_of = ChildOfRank(tree);
  std::vector<size_t> at(of_children.size(), 0);
  std::vector<LevelPiece> pieces;
  for (const Piece& piece : owner) {
    for (int64_t offset = piece.offset; offset < piece.offset + piece.count;) {
      LevelPiece part{offset, piece.offset + piece.count - offset, {}, child_of[piece.owner]};
      for (size_t child = 0; child < of_children.size(); ++child) {
        const Ownership& own = of_children[child];
        while (own[at[child]].offset + own[at[child]].count <= offset) ++at[child];
        MOESAIC_CHECK_LE(own[at[child]].offset, offset);
        part.count = std::min(part.count, own[at[child]].offset + own[at[child]].count - offset);
        part.handlers.push_back(own[at[child]].owner);
      }
      offset += part.count;
      pieces.push_back(std::move(part));
    }
  }
  return pieces;
}

}  // namespace moesaic::comm
