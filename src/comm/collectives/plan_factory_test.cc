#include "comm/collectives/plan_factory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "comm/collectives/plan_checker.h"
#include "comm/collectives/plan_test_support.h"

namespace moesaic::comm {
namespace {

void ExpectProof(const PlanRequest& request, const RankTree& tree, const PlanShape& shape,
                 const std::string& name) {
  const StatusOr<Plan> plan = BuildPlan(request, tree, shape);
  ASSERT_TRUE(plan.ok()) << name << ": " << plan.status().message();
  const Status proof = CheckPlan(*plan);
  ASSERT_TRUE(proof.ok()) << name << ": " << Name(request.collective) << " of " << request.count << ", "
                          << proof.message();
}

std::map<std::string, RankTree> Trees() {
  std::map<std::string, RankTree> trees;
  for (int ranks = 1; ranks <= 9; ++ranks) trees["flat " + std::to_string(ranks)] = OneLevel(ranks);
  trees["1+3"] = GroupTree({1, 3});
  trees["2+2+1"] = GroupTree({2, 2, 1});
  trees["4x4"] = GroupTree({4, 4, 4, 4});
  trees["2x7"] = GroupTree({7, 7});
  trees["8+7+1"] = GroupTree({8, 7, 1});
  RankTree round_robin = Join({FlatTree({0, 2, 4}), FlatTree({1, 3, 5})});
  trees["round robin 2x3"] = round_robin;
  trees["3 levels"] =
      Join({Join({FlatTree({0, 1}), FlatTree({2, 3})}), Join({FlatTree({4, 5}), FlatTree({6, 7})})});
  trees["3 uneven levels"] =
      Join({Join({FlatTree({0, 1}), FlatTree({2, 3, 4})}), FlatTree({5, 6}), FlatTree({7})});
  return trees;
}

TEST(PlanFactoryTest, EveryAlgorithmComputesItsCollectiveOnEveryTree) {
  for (const auto& [name, tree] : Trees()) {
    for (const Collective collective : kAllCollectives) {
      for (const PlanShape& shape : ShapesOf(collective, tree)) {
        for (const int64_t count : {0, 1, 7, 1000, 1 << 20}) {
          for (const unsigned variant : {0U, 1U, 6U}) {
            const auto ranks = static_cast<int>(tree.ranks.size());
            ExpectProof(MakeRequest(collective, ranks, count, variant), tree, shape, name);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(PlanFactoryTest, PlansOfRandomTreesAreProved) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 1000; ++trial) {
    std::vector<int> ranks(1 + random() % 20);
    std::iota(ranks.begin(), ranks.end(), 0);
    const RankTree tree = RandomTree(ranks, random);
    const Collective collective = kAllCollectives[random() % std::size(kAllCollectives)];
    const std::vector<PlanShape> shapes = ShapesOf(collective, tree);
    const auto count = static_cast<int64_t>(random() % (1U << (random() % 21)));
    ExpectProof(MakeRequest(collective, static_cast<int>(ranks.size()), count, random() % 5), tree,
                shapes[random() % shapes.size()], "random tree " + std::to_string(trial));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Elements that each rank sends to other children of the tree than its own.
std::vector<int64_t> SentOutByRank(const Plan& plan, const RankTree& tree) {
  std::vector<int> child_of(plan.request.ranks);
  for (size_t child = 0; child < tree.children.size(); ++child) {
    for (const int rank : tree.children[child].ranks) child_of[rank] = static_cast<int>(child);
  }
  std::vector<int64_t> sent(plan.request.ranks, 0);
  for (int rank = 0; rank < plan.request.ranks; ++rank) {
    for (const Stream& stream : plan.ranks[rank].streams) {
      for (const Round& round : stream.rounds) {
        for (const Message& message : round.sends) {
          if (child_of[message.peer] != child_of[rank]) sent[rank] += message.slice.count;
        }
      }
    }
  }
  return sent;
}

// Elements that each child of the tree sends to the other children.
std::vector<int64_t> SentOutByChild(const Plan& plan, const RankTree& tree) {
  const std::vector<int64_t> sent = SentOutByRank(plan, tree);
  std::vector<int64_t> sums(tree.children.size(), 0);
  for (size_t child = 0; child < tree.children.size(); ++child) {
    for (const int rank : tree.children[child].ranks) sums[child] += sent[rank];
  }
  return sums;
}

TEST(PlanFactoryTest, HierarchicalAllReduceSendsTheLowerBoundBetweenGroups) {
  const RankTree tree = GroupTree({8, 8, 8, 8});
  const PlanRequest request = {.ranks = 32, .count = 1 << 20};
  const StatusOr<Plan> plan = BuildPlan(request, tree, {.top = Algorithm::kRing});
  ASSERT_TRUE(plan.ok());
  for (const int64_t sent : SentOutByChild(*plan, tree)) EXPECT_EQ(sent, 2 * 3 * request.count / 4);
}

// Every rank of a group sends an equal part to its peers in the other groups, so that devices with network
// cards of their own use all of them.
TEST(PlanFactoryTest, AllRanksOfAGroupSendEqualPartsToOtherGroups) {
  const RankTree tree = GroupTree({8, 8, 8, 8});
  const PlanRequest request = {.ranks = 32, .count = 1 << 20};
  for (const Algorithm top :
       {Algorithm::kRing, Algorithm::kPairwise, Algorithm::kHalving, Algorithm::kLinear}) {
    for (const int segments : {1, 4}) {
      const StatusOr<Plan> plan = BuildPlan(request, tree, {.top = top, .segments = segments});
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (const int64_t sent : SentOutByRank(*plan, tree)) {
        EXPECT_EQ(sent, 2 * 3 * request.count / 4 / 8) << Name(top) << ", " << segments << " segments";
      }
    }
  }
}

TEST(PlanFactoryTest, SendingAtOnceTakesOneRoundPerPhaseAndLevel) {
  const RankTree tree = GroupTree({4, 4, 4, 4});
  const PlanRequest request = {.ranks = 16, .count = 1 << 12};
  for (const auto& [top, rounds] : {std::pair(Algorithm::kDirect, 3U), std::pair(Algorithm::kLinear, 4U)}) {
    const Plan plan = *BuildPlan(request, tree, {.top = top, .inner = Algorithm::kLinear});
    for (const RankPlan& rank : plan.ranks) {
      const std::vector<Round>& all = rank.streams[0].rounds;
      EXPECT_EQ(std::ranges::count_if(all, [](const Round& round) { return !round.sends.empty(); }), rounds);
    }
    const int64_t expected = top == Algorithm::kDirect ? 3 * request.count : 2 * 3 * request.count / 4;
    for (const int64_t sent : SentOutByChild(plan, tree)) EXPECT_EQ(sent, expected) << Name(top);
  }
}

// Chips of cards of sockets: 2 x 2 x 2.
RankTree ThreeLevels() {
  return Join({Join({FlatTree({0, 1}), FlatTree({2, 3})}), Join({FlatTree({4, 5}), FlatTree({6, 7})})});
}

TEST(PlanFactoryTest, NoSumOfASingleCrossingPassesTheRootTwice) {
  const RankTree tree = ThreeLevels();
  const PlanRequest request = {.ranks = 8, .count = 3 << 10};
  const Plan plan = *BuildPlan(request, tree, {.top = Algorithm::kSingleCrossing});
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(rank.streams.size(), 3U) << "one for each level";
    for (const Stream& stream : rank.streams) {
      EXPECT_LE(std::ranges::count_if(stream.rounds,
                                      [&](const Round& round) {
                                        return std::ranges::any_of(round.sends, [&](const Message& message) {
                                          const int own = static_cast<int>(&rank - plan.ranks.data());
                                          return message.peer / 4 != own / 4;
                                        });
                                      }),
                1);
    }
  }
  // Part d has 2^(d - 1) sums per child of the root, each of which goes to 2^(3 - d) ranks of the other one.
  for (const int64_t sent : SentOutByChild(plan, tree)) EXPECT_EQ(sent, 4 * request.count);
}

TEST(PlanFactoryTest, GroupsOfOneDepthCanBeLeftOut) {
  const RankTree cards = Without(ThreeLevels(), 1);
  EXPECT_EQ(cards.children.size(), 4U);
  EXPECT_EQ(Depth(cards), 2);
  const RankTree sockets = Without(ThreeLevels(), 2);
  EXPECT_EQ(sockets.children.size(), 2U);
  EXPECT_EQ(sockets.children[1].children.size(), 4U);
  EXPECT_EQ(sockets.ranks, ThreeLevels().ranks);
  const RankTree uneven = Join({Join({FlatTree({0, 1}), FlatTree({2})}), FlatTree({3})});
  EXPECT_EQ(GroupsAt(uneven, 1).size(), 2U);
  EXPECT_EQ(GroupsAt(uneven, 2).size(), 3U) << "the single rank stays";
  EXPECT_EQ(GroupsAt(uneven, 3).size(), 4U);
}

TEST(PlanFactoryTest, UnevenGroupsSendTheLowerBound) {
  const RankTree tree = GroupTree({1, 3});
  const PlanRequest request = {.ranks = 4, .count = 3 << 16};
  const StatusOr<Plan> plan = BuildPlan(request, tree, {.top = Algorithm::kPairwise});
  ASSERT_TRUE(plan.ok());
  for (const int64_t sent : SentOutByChild(*plan, tree)) EXPECT_EQ(sent, request.count);
}

// Elements that local steps copy from inputs.
int64_t Copied(const Plan& plan) {
  int64_t copied = 0;
  for (const RankPlan& rank : plan.ranks) {
    for (const Stream& stream : rank.streams) {
      for (const Round& round : stream.rounds) {
        for (const LocalStep& step : round.local) {
          if (step.from.buffer == PlanBuffer::kInput) copied += step.from.count;
        }
      }
    }
  }
  return copied;
}

TEST(PlanFactoryTest, ReductionsByLevelsDoNotCopyTheInput) {
  for (const RankTree& tree : {OneLevel(8), GroupTree({4, 4}), GroupTree({2, 2, 2, 2})}) {
    for (const Algorithm top : {Algorithm::kRing, Algorithm::kPairwise, Algorithm::kHalving}) {
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter}) {
        const PlanRequest request = MakeRequest(collective, 8, 1 << 16, 0);
        EXPECT_EQ(Copied(*BuildPlan(request, tree, {.top = top, .segments = 4})), 0) << Name(top);
      }
    }
  }
}

TEST(PlanFactoryTest, ASlowPortOwnsLessOfTheVector) {
  RankTree tree = GroupTree({2, 2, 2});
  for (RankTree& child : tree.children) child.port_bytes_per_s = 100;
  tree.children[1].port_bytes_per_s = 75;
  const PlanRequest request = {.ranks = 6, .count = 1 << 20};
  const StatusOr<Plan> plan = BuildPlan(request, tree, {.top = Algorithm::kPairwise});
  ASSERT_TRUE(plan.ok());
  const std::vector<int64_t> bytes = SentOutByChild(*plan, tree);
  EXPECT_NEAR(static_cast<double>(bytes[1]) / static_cast<double>(bytes[0]), 0.75, 0.01);
}

TEST(PlanFactoryTest, AllToAllSendsOneMessagePerRankAndGroup) {
  const RankTree tree = GroupTree({4, 4, 4});
  const PlanRequest request = {.collective = Collective::kAllToAll, .ranks = 12, .count = 16};
  const StatusOr<Plan> plan = BuildPlan(request, tree, {.top = Algorithm::kPairwise});
  ASSERT_TRUE(plan.ok());
  for (const RankPlan& rank : plan->ranks) {
    size_t messages = 0;
    for (const Round& round : rank.streams[0].rounds) messages += round.sends.size();
    EXPECT_EQ(messages, 2 + 3) << "one to each other group, one to each peer of its own";
  }
}

TEST(PlanFactoryTest, RejectsFaultyArguments) {
  const RankTree tree = OneLevel(4);
  EXPECT_THAT(BuildPlan({.ranks = 3}, tree, {}).status().message(), testing::HasSubstr("found 4"));
  EXPECT_THAT(BuildPlan({.ranks = 4, .count = -2}, tree, {}).status().message(),
              testing::HasSubstr("found -2"));
  EXPECT_THAT(BuildPlan({.ranks = 4}, tree, {.top = Algorithm::kChain}).status().message(),
              testing::HasSubstr("chain"));
  EXPECT_THAT(
      BuildPlan({.ranks = 4}, tree, {.top = Algorithm::kRing, .wire = WireFormat::kInt8}).status().message(),
      testing::HasSubstr("pairwise"));
  EXPECT_FALSE(BuildPlan({.ranks = 4}, FlatTree({0, 1, 1, 2}), {}).ok());
  EXPECT_THAT(
      BuildPlan({.ranks = 4}, tree, {.top = Algorithm::kSingleCrossing, .segments = 2}).status().message(),
      testing::HasSubstr("found 2 segments"));
}

}  // namespace
}  // namespace moesaic::comm
