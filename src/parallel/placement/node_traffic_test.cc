#include "parallel/placement/node_traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

// Expected remote nodes by enumeration: all sets of chosen groups, all sets of their experts, all replicas.
class Enumeration {
 public:
  Enumeration(const LayerPlacement& layer, int nodes, std::vector<double> group, std::vector<double> expert)
      : layer_(layer), nodes_(nodes), group_(std::move(group)), expert_(std::move(expert)) {}

  double RemoteNodes() {
    sum_ = 0;
    for (source_ = 0; source_ < nodes_; ++source_) Visit(0, {}, {}, 1.0 / nodes_);
    return sum_;
  }

 private:
  int NodeOf(size_t rank) const { return static_cast<int>(rank * nodes_ / layer_.size()); }

  void Visit(size_t expert, const std::set<size_t>& groups, const std::set<int>& used, double probability) {
    const size_t size = expert_.size() / group_.size();
    if (expert == expert_.size()) {
      sum_ += probability * static_cast<double>(used.size());
      return;
    }
    const size_t group = expert / size;
    if (expert % size == 0) {  // whether the group is chosen
      auto with = groups;
      with.insert(group);
      Branch(expert, with, used, probability * group_[group]);
      Branch(expert, groups, used, probability * (1 - group_[group]));
      return;
    }
    Branch(expert, groups, used, probability);
  }

  void Branch(size_t expert, const std::set<size_t>& groups, const std::set<int>& used, double probability) {
    if (probability == 0) return;
    const bool possible = groups.contains(expert / (expert_.size() / group_.size()));
    const double chosen = possible ? expert_[expert] : 0;
    if (chosen < 1) Visit(expert + 1, groups, used, probability * (1 - chosen));
    if (chosen == 0) return;
    std::vector<int> holders;
    bool local = false;
    for (size_t rank = 0; rank < layer_.size(); ++rank) {
      for (const int held : layer_[rank]) {
        if (held != static_cast<int>(expert)) continue;
        holders.push_back(NodeOf(rank));
        local |= NodeOf(rank) == source_;
      }
    }
    if (local) holders = {source_};
    for (const int node : holders) {
      auto more = used;
      if (node != source_) more.insert(node);
      Visit(expert + 1, groups, more, probability * chosen / static_cast<double>(holders.size()));
    }
  }

  const LayerPlacement& layer_;
  const int nodes_;
  const std::vector<double> group_, expert_;
  int source_ = 0;
  double sum_ = 0;
};

TEST(NodeTraffic, EqualsTheEnumerationOfAllChoices) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const int nodes = 1 + random.Below(3), ranks = nodes * (1 + random.Below(2));
    const Routing routing{.top_k = 2, .groups = 3, .top_groups = 2};
    LayerPlacement layer(ranks);
    std::vector<double> loads;
    for (int expert = 0; expert < 6; ++expert) {
      loads.push_back(1 + random.Below(2));
      layer[expert % ranks].push_back(expert);
      if (random.Below(3) == 0 && ranks > 1) layer[(expert + 1) % ranks].push_back(expert);
    }
    // Loads from 1 to 2 clamp no probability: a group of two experts has at most 4 of 8 tokens, and is chosen
    // at least as often as each of its experts.
    double total = 0;
    for (const double load : loads) total += load;
    std::vector<double> group, expert;
    for (int g = 0; g < 3; ++g) group.push_back((loads[2 * g] + loads[2 * g + 1]) / total * 2);
    for (int e = 0; e < 6; ++e) expert.push_back(2 * loads[e] / total / group[e / 2]);
    EXPECT_NEAR(RemoteNodes(layer, loads, nodes, routing),
                Enumeration(layer, nodes, group, expert).RemoteNodes(), 1e-12)
        << seed;
  }
}

TEST(NodeTraffic, OneNodeAndFullReplicationNeedNoTraffic) {
  const std::vector<double> loads = {3, 1};
  EXPECT_EQ(RemoteNodes({{0}, {1}}, loads, 1, {.top_k = 1}), 0);
  EXPECT_EQ(RemoteNodes({{0, 1}, {1, 0}}, loads, 2, {.top_k = 1}), 0);
  // Tokens of expert 0 start on its node half of the time.
  EXPECT_DOUBLE_EQ(RemoteNodes({{0}, {1}}, loads, 2, {.top_k = 1}), 0.5);
  EXPECT_EQ(RemoteNodes({{0}, {1}}, std::vector<double>{0, 0}, 2, {.top_k = 1}), 0);
}

TEST(NodeTraffic, RefusesRoutingThatDoesNotFit) {
  EXPECT_EQ(CheckRouting({.groups = 3}, 256).message(), "groups must divide the 256 experts, found 3");
  EXPECT_EQ(CheckRouting({.groups = 4, .top_groups = 5}, 256).message(),
            "groups of a token must be from 1 to 4, found 5");
  EXPECT_EQ(CheckRouting({.top_k = 9, .groups = 4, .top_groups = 2}, 16).message(),
            "experts of a token must be from 1 to 8, found 9");
}

TEST(OrderRanks, PutsTheExpertsOfAGroupOnOneNode) {
  const Routing routing = {.top_k = 2, .groups = 2, .top_groups = 1};
  const std::vector<double> loads = {5, 1, 2, 3, 4, 1, 2, 1};
  const LayerPlacement mixed = {{0, 1}, {4, 5}, {2, 3}, {6, 7}};
  const LayerPlacement ordered = OrderRanks(mixed, loads, {}, 2, routing);
  EXPECT_GT(RemoteNodes(mixed, loads, 2, routing), 0.6);
  EXPECT_LT(RemoteNodes(ordered, loads, 2, routing), 0.5)
      << "half of the tokens start on the node of their group";
  for (const int node : {0, 1}) EXPECT_EQ(ordered[2 * node][0] / 4, ordered[2 * node + 1][0] / 4);
  const std::vector<double> speeds = {1, 1, 0.5, 0.5};
  EXPECT_EQ(OrderRanks(mixed, loads, speeds, 2, routing), mixed) << "ranks of a node have one speed";
}

TEST(OrderRanks, NeverSendsMoreTokensAndKeepsTheRanks) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    const int nodes = 2 + random.Below(3), ranks = nodes * (1 + random.Below(3));
    LayerPlacement layer(ranks);
    std::vector<double> loads;
    for (int expert = 0; expert < 24; ++expert) {
      loads.push_back(random.Below(50));
      for (int copy = 0; copy <= random.Below(3); ++copy) {
        std::vector<int>& rank = layer[random.Below(ranks)];
        if (rank.empty() || rank.back() != expert) rank.push_back(expert);
      }
    }
    const Routing routing = {.top_k = 4, .groups = 4, .top_groups = 2};
    LayerPlacement ordered = OrderRanks(layer, loads, {}, nodes, routing);
    EXPECT_LE(RemoteNodes(ordered, loads, nodes, routing), RemoteNodes(layer, loads, nodes, routing) + 1e-12);
    EXPECT_TRUE(std::is_permutation(ordered.begin(), ordered.end(), layer.begin(), layer.end()));
  }
}

}  // namespace
}  // namespace moesaic::parallel
