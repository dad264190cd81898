#include "comm/explain/explanation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "comm/collectives/planner.h"
#include "comm/collectives/topology_test_support.h"
#include "comm/explain/tree_svg.h"

namespace moesaic::comm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr Link kInside = {3e-6, 160e9}, kBetween = {8e-6, 25e9};

TEST(ExplanationTest, RoundRobinDealsRanksToTheTopmostGroups) {
  const Topology topology = GroupTopology({1, 3, 2}, kInside, kBetween);
  EXPECT_THAT(OrderedRanks(topology, RankOrder::kBlock), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(OrderedRanks(topology, RankOrder::kRoundRobin), ElementsAre(0, 1, 4, 2, 5, 3));
  // Of a topology whose ranks were dealt, block order restores the order of the tree.
  const Topology dealt = topology.Selected(OrderedRanks(topology, RankOrder::kRoundRobin)).value();
  const Topology restored = dealt.Selected(OrderedRanks(dealt, RankOrder::kBlock)).value();
  for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(restored.leaf(rank), topology.leaf(rank));
}

TEST(ExplanationTest, LargeAllReduceIsNearTheBoundAndBeatsFlatRings) {
  const Explanation row = Explain(NodesOfEight(4), Collective::kAllReduce, 64 << 20).value();
  EXPECT_GT(row.share(), 0.8);
  EXPECT_LE(row.share(), 1);
  EXPECT_THAT(row.algorithm, HasSubstr("hierarchical"));
  EXPECT_THAT(row.bottleneck, HasSubstr("node "));
  EXPECT_GT(row.busy, 0.8);
  EXPECT_GT(row.flat_block_s, row.seconds);
  EXPECT_GT(row.flat_round_robin_s, 2.21 * row.seconds);
}

// The targets of hierarchical AllReduce on shipped files.
TEST(ExplanationTest, AllReduceOf64MegabytesReachesNineTenthsOfTheBound) {
  for (const char* file : {"accelerators-16-dual-chip.json", "accelerators-4x8-200gbit.json",
                           "accelerators-8x8-200gbit.json", "h100-2x8-infiniband.json"}) {
    std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/topologies/" + file);
    std::stringstream text;
    text << in.rdbuf();
    const Topology topology = Topology::Parse(text.str(), file).value();
    for (const int64_t bytes : {int64_t{64'000'000}, int64_t{64} << 20}) {
      const Explanation row = Explain(topology, Collective::kAllReduce, bytes).value();
      EXPECT_GE(row.share(), 0.9) << file << ", " << bytes;
      EXPECT_GE(row.flat_round_robin_s / row.seconds, 2.21) << file << ", " << bytes;
      EXPECT_GT(row.flat_block_s, row.seconds) << file << ", " << bytes;
    }
  }
}

// Four levels, whose latencies are as long as the bytes of a short vector.
TEST(ExplanationTest, ShortAllReduceOnTheDualChipServerNearsTheBound) {
  std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/topologies/accelerators-16-dual-chip.json");
  std::stringstream text;
  text << in.rdbuf();
  const Topology topology = Topology::Parse(text.str(), "server").value();
  const Explanation small = Explain(topology, Collective::kAllReduce, 16 << 10).value();
  EXPECT_GE(small.share(), 0.87);
  EXPECT_THAT(small.algorithm, HasSubstr("single crossing"));
  const Explanation middle = Explain(topology, Collective::kAllReduce, 1 << 20).value();
  EXPECT_GE(middle.share(), 0.9);
  EXPECT_GE(middle.flat_round_robin_s / middle.seconds, 2.21);
  EXPECT_GE(middle.flat_block_s / middle.seconds, 2.21);
}

TEST(ExplanationTest, EveryCollectiveWithASizeIsExplainedInAnyOrderOfRanks) {
  const Topology block = GroupTopology({1, 3, 2}, kInside, kBetween);
  const Topology dealt = block.Selected(OrderedRanks(block, RankOrder::kRoundRobin)).value();
  for (const Topology& topology : {block, dealt, Topology::Flat(1, kInside)}) {
    for (const Collective collective :
         {Collective::kBroadcast, Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
          Collective::kAllToAll, Collective::kBarrier}) {
      for (const int64_t bytes : {0, 2, 100'000}) {
        const auto row = Explain(topology, collective, bytes);
        ASSERT_TRUE(row.ok()) << row.status();
        EXPECT_LE(row->share(), 1 + 1e-9) << Name(collective) << " " << bytes;
        EXPECT_LE(row->bound.seconds, row->flat_block_s * (1 + 1e-9));
      }
    }
  }
}

TEST(ExplanationTest, RoundRobinOfManyUnevenGroupsDealsEachRankOnce) {
  std::vector<int> sizes(20'000, 1);
  sizes[7] = 3;
  const std::vector<int> dealt =
      OrderedRanks(GroupTopology(sizes, kInside, kBetween), RankOrder::kRoundRobin);
  ASSERT_EQ(dealt.size(), 20'002U);
  EXPECT_EQ(dealt[7], 7);
  EXPECT_EQ(dealt[8], 10);
  EXPECT_THAT(std::vector<int>(dealt.end() - 3, dealt.end()), ElementsAre(20'001, 8, 9));
}

// Each of 32 ranks has a block of one element at least.
TEST(ExplanationTest, SizesBelowOneElementPerRankAreRoundedUp) {
  const Topology topology = NodesOfEight(4);
  const Explanation small = Explain(topology, Collective::kAllToAll, 32).value();
  EXPECT_GT(small.seconds, 0);
  EXPECT_EQ(small.seconds, Explain(topology, Collective::kAllToAll, 64).value().seconds);
  EXPECT_GT(Explain(topology, Collective::kAllReduce, 1).value().seconds, 0);
}

TEST(ExplanationTest, MeasuredTimesChooseTheAlgorithm) {
  const Topology topology = NodesOfEight(2);
  const PlanRequest request = {.collective = Collective::kAllReduce,
                               .ranks = 16,
                               .count = 1 << 19,  // 1 MiB of Explain()'s elements
                               .element_bytes = 2};
  const Planner planner(topology);
  const std::vector<Choice> choices = planner.Compare(request, {});
  ASSERT_GT(choices.size(), 3U);
  auto table = std::make_shared<TuningTable>();
  table->Add(Collective::kAllReduce, 16, 1 << 20, Name(choices[3].candidate), 1e-9);
  const Explanation tuned = Explain(topology, Collective::kAllReduce, 1 << 20, table).value();
  EXPECT_EQ(tuned.algorithm, planner.Build(request, choices[3].candidate)->algorithm);
  EXPECT_DOUBLE_EQ(tuned.measured_s, 1e-9);
  EXPECT_GT(tuned.seconds, 1e-6) << "the predicted time stays";
  const Explanation far = Explain(topology, Collective::kAllReduce, 64 << 20, table).value();
  EXPECT_EQ(far.measured_s, 0);
  EXPECT_EQ(far.algorithm, Explain(topology, Collective::kAllReduce, 64 << 20).value().algorithm);
}

TEST(ExplanationTest, FactorsAndSharesOfNoTimeAreDashes) {
  const Explanation nothing = Explain(NodesOfEight(2), Collective::kAllReduce, 0).value();
  EXPECT_EQ(FactorText(nothing.flat_block_s, nothing.seconds), "-");
  EXPECT_EQ(ShareText(nothing.bound.seconds, nothing.seconds), "-");
  EXPECT_EQ(FactorText(3, 2), "1.50x");
  EXPECT_EQ(ShareText(2, 3), "67%");
}

TEST(ExplanationTest, TooManyRanksAndUnknownSizesAreRefused) {
  EXPECT_EQ(CheckExplained(Topology::Flat(512, kInside)), OkStatus());
  EXPECT_EQ(CheckExplained(Topology::Flat(513, kInside)).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(moesaic::Message(Explain(Topology::Flat(513, kInside), Collective::kAllReduce, 8).status()),
              HasSubstr("at most 512"));
  EXPECT_FALSE(Explain(Topology::Flat(2, kInside), Collective::kAllToAllv, 8).ok());
}

TEST(ExplanationTest, TreeTextCountsEqualNeighbours) {
  EXPECT_EQ(TreeText(GroupTopology({2, 2, 1}, kInside, kBetween)),
            "cluster: 25 GB/s per child, 8 us\n"
            "  2 x node: 160 GB/s per child, 3 us\n"
            "    2 x device: memory 1000 GB/s\n"
            "  node: 160 GB/s per child, 3 us\n"
            "    device: memory 1000 GB/s\n");
}

TEST(TreeSvgTest, DrawsEveryDeviceOnceAndEscapesNames) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "a<b", kBetween, 0);
  for (int i = 0; i < 3; ++i) builder.AddDevice(0, 0, 0);
  const std::string svg = TreeSvg(builder.Finish("x & y", "test", {DeviceType{"cpu", {}, 0, 0}})).value();
  EXPECT_THAT(svg, AllOf(HasSubstr("x &amp; y"), HasSubstr("a&lt;b"), Not(HasSubstr("a<b"))));
  for (const char* rank : {">0<", ">1<", ">2<"}) EXPECT_THAT(svg, HasSubstr(rank));
  EXPECT_FALSE(TreeSvg(Topology::Flat(3000, kInside)).ok());
}

}  // namespace
}  // namespace moesaic::comm
