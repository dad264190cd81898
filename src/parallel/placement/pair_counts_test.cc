#include "parallel/placement/pair_counts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/placement/balance.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

// Largest sum of the best pairing, found in another way: both ends of the sorted replicas.
float WorstPair(const std::vector<float>& loads, const std::vector<int>& copies) {
  std::vector<float> sizes;
  for (size_t e = 0; e < loads.size(); ++e)
    sizes.insert(sizes.end(), copies[e], loads[e] / static_cast<float>(copies[e]));
  std::sort(sizes.begin(), sizes.end());
  float worst = 0;
  for (size_t i = 0; i < sizes.size(); ++i) worst = std::max(worst, sizes[i] + sizes[sizes.size() - 1 - i]);
  return worst;
}

// The smallest largest pair over all counts that fill the slots.
float Least(const std::vector<float>& loads, std::vector<int>& copies, size_t expert, int spare, int ranks) {
  if (expert == loads.size()) return spare == 0 ? WorstPair(loads, copies) : 1e30F;
  float least = 1e30F;
  for (int more = 0; more <= spare && more < ranks; ++more) {
    copies[expert] = 1 + more;
    least = std::min(least, Least(loads, copies, expert + 1, spare - more, ranks));
  }
  return least;
}

std::vector<float> SkewedLoads(int experts, uint64_t seed) {
  Random random(seed);
  std::vector<float> loads(experts);
  for (float& load : loads) load = static_cast<float>(std::exp(random.Normal()));
  return loads;
}

TEST(PairCounts, SmallProblemsReachTheBestOfAllCounts) {
  constexpr int kExperts = 7, kRanks = 6;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> loads = SkewedLoads(kExperts, seed);
    const ReplicaSize size = [&](int expert, int copies) {
      return loads[expert] / static_cast<float>(copies);
    };
    std::vector<int> start(kExperts, 1);
    start[0] = 2 * kRanks - kExperts + 1;
    const std::vector<int> counts = SearchPairCounts(start, kRanks, size, 20000, {});
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0), 2 * kRanks);
    EXPECT_GE(*std::min_element(counts.begin(), counts.end()), 1);
    EXPECT_LE(*std::max_element(counts.begin(), counts.end()), kRanks);
    std::vector<int> copies(kExperts, 1);
    EXPECT_FLOAT_EQ(WorstPair(loads, counts), Least(loads, copies, 0, 2 * kRanks - kExperts, kRanks)) << seed;
  }
}

TEST(PairCounts, APlanForTwoSlotsOfARankHasTheSumsOfItsCounts) {
  const std::vector<float> loads = SkewedLoads(64, 9);
  LoadMatrix load{1, 64, {loads.begin(), loads.end()}};
  const auto plan = PlanPlacement(std::vector<LoadMatrix>{load}, {.slots = EqualSlots(72, 36)});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const float mean = std::accumulate(loads.begin(), loads.end(), 0.0F) / 36;
  EXPECT_NEAR(Imbalance(plan->placement.layers[0], load.layer(0)),
              WorstPair(loads, CopiesOf(plan->placement.layers[0], 64)) / mean, 1e-5);
}

TEST(PairCounts, NothingIsSearchedWithoutTokensOrSpareReplicas) {
  const ReplicaSize none = [](int, int) { return 0.0F; };
  EXPECT_EQ(SearchPairCounts({2, 1, 1}, 2, none, 100, {}), (std::vector<int>{2, 1, 1}));
  const ReplicaSize one = [](int, int copies) { return 1.0F / static_cast<float>(copies); };
  EXPECT_EQ(SearchPairCounts({1, 1, 1, 1}, 2, one, 100, {}), (std::vector<int>{1, 1, 1, 1}));
}

}  // namespace
}  // namespace moesaic::parallel
