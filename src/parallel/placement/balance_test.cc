#include "parallel/placement/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "parallel/placement/comparison.h"
#include "parallel/placement/load_generator.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/random.h"
#include "parallel/placement/spill.h"

namespace moesaic::parallel {
namespace {

TEST(Balance, MeasuresTheLargestRankOverTheMean) {
  const LayerPlacement layer = {{0, 1}, {1, 2}};
  const std::vector<double> loads = {3, 2, 1};
  EXPECT_DOUBLE_EQ(Imbalance(layer, loads), 4.0 / 3);
  EXPECT_DOUBLE_EQ(SplitImbalance(layer, loads), 1);
  EXPECT_EQ(ActivatedExperts(layer, loads), 2);
}

// METRO's objective by enumeration: each expert with tokens is computed on one of its ranks, and the busiest
// rank has as few of them as any choice of these ranks allows.
int FewestActivated(const LayerPlacement& layer, std::span<const double> loads) {
  std::vector<std::vector<size_t>> ranks_of;  // of experts with tokens
  for (int expert = 0; expert < static_cast<int>(loads.size()); ++expert) {
    if (loads[expert] <= 0) continue;
    std::vector<size_t>& ranks = ranks_of.emplace_back();
    for (size_t rank = 0; rank < layer.size(); ++rank) {
      if (std::ranges::count(layer[rank], expert) > 0) ranks.push_back(rank);
    }
  }
  int fewest = static_cast<int>(loads.size());
  std::vector<size_t> choice(ranks_of.size(), 0);
  for (bool more = true; more;) {
    std::vector<int> activated(layer.size(), 0);
    for (size_t i = 0; i < choice.size(); ++i) ++activated[ranks_of[i][choice[i]]];
    fewest = std::min(fewest, *std::ranges::max_element(activated));
    more = false;
    for (size_t i = 0; i < choice.size() && !more; ++i) {  // the next choice
      more = ++choice[i] < ranks_of[i].size();
      if (!more) choice[i] = 0;
    }
  }
  return fewest;
}

TEST(Balance, ActivatedExpertsAreTheFewestOfAllAssignments) {
  int fewer_than_all = 0;  // cases in which the choice of ranks matters
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int experts = 1 + random.Below(10), ranks = 1 + random.Below(6);
    LayerPlacement layer(ranks);
    std::vector<double> loads;
    for (int expert = 0; expert < experts; ++expert) {
      loads.push_back(random.Below(4) == 0 ? 0 : 1 + random.Below(100));
      const int replicas = 1 + random.Below(3);  // some repeated on their rank, as in EPLB's plans
      for (int i = 0; i < replicas; ++i) layer[random.Below(ranks)].push_back(expert);
    }
    const int fewest = FewestActivated(layer, loads);
    EXPECT_EQ(ActivatedExperts(layer, loads), fewest) << seed;
    int most = 0;  // if every replica were computed
    for (const std::vector<int>& rank : layer) {
      most = std::max(
          most, static_cast<int>(std::ranges::count_if(rank, [&](int expert) { return loads[expert] > 0; })));
    }
    fewer_than_all += fewest < most;
  }
  EXPECT_GT(fewer_than_all, 100);
}

TEST(Spill, MovesStayWithinTheBudgets) {
  const auto loads = GenerateLoads({.layers = 1, .workloads = 1});
  const std::span<const double> tokens = loads->front().total.layer(0);
  double last = 1e9;
  for (const int budget : {0, 1, 4, 10, 20}) {
    TokenSplit split(InOrder(256, 32), 256);
    const SpillPlan plan = PlanSpill(split, tokens, {.max_moves = budget});
    EXPECT_LE(plan.moves.size(), static_cast<size_t>(budget));
    EXPECT_LE(plan.after, last);
    last = plan.after;
  }
  TokenSplit split(InOrder(256, 32), 256);
  EXPECT_EQ(PlanSpill(split, tokens, {.max_moves = 20, .expert_bytes = 44'000'000, .max_bytes = 100'000'000})
                .moves.size(),
            2U);
}

TEST(Spill, AToleranceNeedsFewerMoves) {
  const auto loads = GenerateLoads({.layers = 1, .workloads = 1});
  const std::span<const double> tokens = loads->front().total.layer(0);
  TokenSplit exact(InOrder(256, 32), 256), loose(InOrder(256, 32), 256);
  const SpillPlan all = PlanSpill(exact, tokens, {.max_moves = 64});
  const SpillPlan some = PlanSpill(loose, tokens, {.max_moves = 64, .tolerance = 0.2});
  EXPECT_LT(some.moves.size(), all.moves.size());
  EXPECT_LT(some.after, some.before);
}

TEST(Comparison, MoesaicsPlanHasTheBestBalanceOfUnknownWorkloads) {
  const auto loads = GenerateLoads({.layers = 3});
  const auto results =
      ComparePolicies(*loads, {.ranks = 32, .slots = 288, .leave_one_out = true, .split = true, .moves = 0});
  ASSERT_TRUE(results.ok()) << results.status();
  double best = 1e9;
  for (const PolicyResult& result : *results) {
    EXPECT_EQ(result.error, "") << result.name;
    EXPECT_GE(result.worst, result.mean);
    if (result.name.rfind("moesaic", 0) != 0) best = std::min(best, result.mean);
  }
  const auto ours = std::find_if(results->begin(), results->end(),
                                 [](const PolicyResult& result) { return result.name == "moesaic"; });
  EXPECT_LT(ours->mean, best);
}

TEST(Comparison, LayersWithoutTokensDoNotChangeTheMean) {
  auto loads = *GenerateLoads({.layers = 2, .workloads = 2});
  const auto plain = ComparePolicies(loads, {.ranks = 8, .slots = 256});
  for (Workload& load : loads) {
    load.total.layers = 3;
    load.total.tokens.insert(load.total.tokens.begin(), 256, 0.0);
  }
  const auto dense = ComparePolicies(loads, {.ranks = 8, .slots = 256});
  for (size_t i = 0; i < plain->size(); ++i) {
    EXPECT_EQ((*dense)[i].mean, (*plain)[i].mean) << (*plain)[i].name;
    EXPECT_EQ((*dense)[i].worst, (*plain)[i].worst) << (*plain)[i].name;
  }
}

TEST(Comparison, RefusesWorkloadsOfDifferentShapes) {
  auto loads = *GenerateLoads({.layers = 2, .workloads = 2});
  loads[1].total = GenerateLoads({.layers = 3, .workloads = 1})->front().total;
  const auto results = ComparePolicies(loads, {.ranks = 8, .slots = 288});
  EXPECT_EQ(results.status().message(),
            "synthetic-1: must have 2 layers of 256 experts as synthetic-0, found 3 of 256");
}

TEST(Comparison, NoBalancerPlansWithFewerSlotsThanTheOthers) {
  const auto loads = *GenerateLoads({.layers = 1, .experts = 32, .workloads = 1});
  const auto results = ComparePolicies(loads, {.ranks = 8, .slots = 36});
  ASSERT_TRUE(results.ok()) << results.status();
  for (const PolicyResult& result : *results) {
    const bool any_slots = result.name == "default" || result.name == "moesaic";
    EXPECT_EQ(result.error.empty(), any_slots) << result.name << ": " << result.error;
  }
}

TEST(Comparison, MovesImplyTheSplitEvenIfNoExpertMayMove) {
  const auto loads = *GenerateLoads({.layers = 2, .experts = 32, .workloads = 2});
  const auto split = ComparePolicies(loads, {.ranks = 2, .slots = 36, .leave_one_out = true, .split = true});
  const auto moves = ComparePolicies(loads, {.ranks = 2, .slots = 36, .leave_one_out = true, .moves = 0.3});
  ASSERT_TRUE(split.ok() && moves.ok());
  EXPECT_EQ(moves->back().name, "moesaic");
  EXPECT_EQ(moves->back().moves, 0);
  EXPECT_EQ(moves->back().mean, split->back().mean);
}

TEST(Comparison, NodesAreTheHostsOfOmniPlacement) {
  const auto loads = *GenerateLoads({.layers = 1, .experts = 32, .workloads = 1});
  const auto results = ComparePolicies(loads, {.ranks = 8, .slots = 40, .nodes = 3});
  ASSERT_TRUE(results.ok()) << results.status();
  for (const PolicyResult& result : *results)
    EXPECT_EQ(result.error, result.name == "omni" ? "nodes (hosts) must divide the 8 ranks, found 3" : "")
        << result.name;
}

TEST(Comparison, AStopKeepsFinishedPoliciesAndNamesTheOthers) {
  const auto loads = *GenerateLoads({.layers = 2, .workloads = 2});
  CompareOptions options{.ranks = 32, .slots = 288, .split = true};
  const auto all = ComparePolicies(loads, options);
  ASSERT_TRUE(all.ok()) << all.status();
  int begun = 0;
  options.progress = [&](int done, int /*total*/) { begun = done; };
  options.stop = [&] { return begun >= 2; };
  const auto some = ComparePolicies(loads, options);
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_GT(some->size(), 4U);
  const std::vector<std::string> finished = {"default", "default+split", "eplb", "eplb+split"};
  for (size_t i = 0; i < some->size(); ++i) {
    const PolicyResult& result = (*some)[i];
    EXPECT_EQ(result.interrupted, i >= finished.size()) << result.name;
    EXPECT_EQ(result.error, result.interrupted ? "interrupted" : "") << result.name;
    if (result.interrupted) continue;
    EXPECT_EQ(result.name, finished[i]);
    EXPECT_EQ(result.mean, (*all)[i].mean) << result.name;
    EXPECT_EQ(result.worst, (*all)[i].worst) << result.name;
  }
  EXPECT_EQ(some->back().name, "moesaic");
}

}  // namespace
}  // namespace moesaic::parallel
