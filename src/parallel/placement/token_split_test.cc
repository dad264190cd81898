#include "parallel/placement/token_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

LayerPlacement RandomLayer(Random& random, int experts, int ranks) {
  LayerPlacement layer(ranks);
  for (int expert = 0; expert < experts; ++expert) {
    for (int copy = 1 + random.Below(3); copy > 0; --copy) {
      std::vector<int>& rank = layer[random.Below(ranks)];
      if (std::find(rank.begin(), rank.end(), expert) == rank.end()) rank.push_back(expert);
    }
  }
  return layer;
}

// The optimum by duality: the largest load per speed that a set of ranks can't pass on, over all sets.
double Optimum(const LayerPlacement& layer, std::span<const double> loads, std::span<const double> speeds) {
  const int ranks = static_cast<int>(layer.size());
  std::vector<unsigned> holders(loads.size(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int expert : layer[rank]) holders[expert] |= 1U << rank;
  }
  double best = 0;
  for (unsigned set = 1; set < 1U << ranks; ++set) {
    double load = 0, speed = 0;
    for (size_t e = 0; e < loads.size(); ++e) load += (holders[e] & ~set) == 0 ? loads[e] : 0;
    for (int rank = 0; rank < ranks; ++rank) speed += (set >> rank) & 1 ? speeds[rank] : 0;
    best = std::max(best, load / speed);
  }
  return best;
}

TEST(TokenSplit, ReachesTheOptimumOfRandomPlacements) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const int ranks = 1 + random.Below(8), experts = 1 + random.Below(24);
    const LayerPlacement layer = RandomLayer(random, experts, ranks);
    std::vector<double> loads(experts), speeds(ranks, 1);
    for (double& load : loads) load = random.Below(4) == 0 ? 0 : std::exp(2 * random.Normal());
    if (seed % 2 != 0) {
      for (double& speed : speeds) speed = 0.5 + random.Uniform();
    }
    TokenSplit split(layer, experts, speeds);
    EXPECT_NEAR(split.Solve(loads), Optimum(layer, loads, speeds), 1e-9) << seed;
    for (int expert = 0; expert < experts; ++expert) {
      double sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_GE(split.LoadOn(expert, rank), 0);
        sum += split.LoadOn(expert, rank);
      }
      EXPECT_NEAR(sum, loads[expert], 1e-9);
    }
  }
}

TEST(TokenSplit, SplitsWholeTokensWithinTheRoundedOptimum) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const int ranks = 1 + random.Below(8), experts = 1 + random.Below(24);
    const LayerPlacement layer = RandomLayer(random, experts, ranks);
    std::vector<int64_t> tokens(experts);
    for (int64_t& count : tokens) count = random.Below(50);
    const std::vector<double> loads(tokens.begin(), tokens.end()), speeds(ranks, 1);
    TokenSplit split(layer, experts);
    const auto parts = split.SplitTokens(tokens);
    const double limit = std::ceil(Optimum(layer, loads, speeds) - 1e-9);
    std::vector<int64_t> left = tokens;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(std::accumulate(parts[rank].begin(), parts[rank].end(), int64_t{0}), limit) << seed;
      for (size_t slot = 0; slot < parts[rank].size(); ++slot) {
        EXPECT_GE(parts[rank][slot], 0);
        left[layer[rank][slot]] -= parts[rank][slot];
      }
    }
    EXPECT_EQ(left, std::vector<int64_t>(experts, 0)) << seed;
  }
}

TEST(TokenSplit, GivesTheSameSplitTwice) {
  Random random(3);
  const LayerPlacement layer = RandomLayer(random, 64, 16);
  std::vector<int64_t> tokens(64);
  for (int64_t& count : tokens) count = random.Below(1000);
  TokenSplit a(layer, 64), b(layer, 64);
  const auto first = a.SplitTokens(tokens);
  EXPECT_EQ(a.SplitTokens(tokens), first);  // the state of an earlier batch has no effect
  EXPECT_EQ(b.SplitTokens(tokens), first);
}

TEST(TokenSplit, UsesAReplicaThatIsAddedLater) {
  TokenSplit split({{0, 1}, {2}}, 3);
  EXPECT_DOUBLE_EQ(split.Solve(std::vector<double>{4, 4, 0}), 8);
  split.AddReplica(0, 1);
  EXPECT_DOUBLE_EQ(split.Relax(4), 0);
  EXPECT_DOUBLE_EQ(split.rank_loads()[1], 4);
}

}  // namespace
}  // namespace moesaic::parallel
