#include "comm/explain/lower_bound.h"

#include <gtest/gtest.h>

#include <random>

#include "comm/collectives/plan_test_support.h"
#include "comm/collectives/planner.h"
#include "comm/collectives/topology_test_support.h"

namespace moesaic::comm {
namespace {

PlanRequest Vector(Collective collective, const Topology& topology, int64_t bytes) {
  PlanRequest request = {.collective = collective, .ranks = topology.ranks()};
  if (collective == Collective::kReduceScatter || collective == Collective::kAllGather) {
    request.counts.assign(topology.ranks(), bytes / 4 / topology.ranks());
  } else {
    request.count = bytes / 4;
  }
  return request;
}

constexpr int64_t kBytes = 64 << 20;

TEST(LowerBoundTest, EqualNodesShareTheTrafficOfAnAllReduce) {
  const Topology topology = NodesOfEight(4);
  const LowerBound bound = BoundOf(Vector(Collective::kAllReduce, topology, kBytes), topology);
  EXPECT_NEAR(bound.transfer_s, 2 * 3 / 4.0 * kBytes / 25e9, 1e-12);
  // A message between nodes, after sums of 8 devices and before their results.
  const double inside = topology.groups()[topology.groups()[0].children[0]].link.latency_s;
  EXPECT_DOUBLE_EQ(bound.latency_s, 8e-6 + 2 * inside * 7 / 8);
  EXPECT_EQ(bound.bottleneck, "ports of 4 x node");
  EXPECT_TRUE(bound.together);
  const auto wait = [&](Collective collective) {
    return BoundOf(Vector(collective, topology, kBytes), topology).latency_s;
  };
  EXPECT_DOUBLE_EQ(wait(Collective::kReduceScatter), 8e-6 + inside * 7 / 8);
  EXPECT_DOUBLE_EQ(wait(Collective::kAllGather), 8e-6 + inside * 7 / 8);
}

TEST(LowerBoundTest, ShortVectorsCrossOnceOrTwice) {
  const Topology topology = GroupTopology({2, 2, 2, 2}, {2e-6, 1e12}, {10e-6, 1e9});
  const auto bound = [&](int64_t bytes) {
    return BoundOf(Vector(Collective::kAllReduce, topology, bytes), topology).seconds;
  };
  EXPECT_NEAR(bound(2000), 10e-6 + 2e-6 + 3 * 2e-6, 1e-12) << "each node receives three terms";
  // 60 us of pairs per byte: what enters a node serves 2 of them from 10 us on, 4 from 12 us, 12 from 20 us,
  // and half as many in the last 2 us.
  EXPECT_NEAR(bound(5000), 23e-6, 1e-12) << "two messages one after the other, and bytes of the second";
  EXPECT_NEAR(bound(20000), 10e-6 + 2e-6 + 1.5 * 20e-6, 1e-12);
}

TEST(LowerBoundTest, LatenciesLimitTheUseOfBytesThatCross) {
  const Topology topology = GroupTopology({4, 4}, {5e-6, 1e12}, {6e-6, 1e9});
  for (const int64_t bytes : {1000, 2000}) {
    const LowerBound bound = BoundOf(Vector(Collective::kAllReduce, topology, bytes), topology);
    // Each byte of the vector serves 4 x 4 pairs of ranks. Bytes that enter a node at time u in [6 us, T] are
    // a sum of 4 terms if u >= 11 us, and otherwise one term. They reach 4 ranks if u <= T - 5 us, and
    // otherwise one. In T = 11 us + d, 4 pairs are thus served for 2 d, and one pair for 5 us - d.
    EXPECT_NEAR(bound.seconds, 11e-6 + (16 * static_cast<double>(bytes) / 1e9 - 5e-6) / 7, 1e-12);
    EXPECT_EQ(bound.bottleneck, "port of node 0");
  }
}

TEST(LowerBoundTest, TheSlowestPortBindsUnevenNodes) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", {1e-6, 4e9}, 0);
  for (const double port : {4e9, 1e9, 4e9}) {
    const int node = builder.AddGroup(0, "node", {1e-6, 100e9}, port);
    for (int i = 0; i < 2; ++i) builder.AddDevice(node, 0, 0);
  }
  const Topology topology = builder.Finish("uneven", "test", {DeviceType{"cpu", {}, 0, 0}});
  const LowerBound bound = BoundOf(Vector(Collective::kAllReduce, topology, kBytes), topology);
  EXPECT_NEAR(bound.transfer_s, kBytes / 1e9, 1e-12) << "one vector in each direction";
  EXPECT_EQ(bound.bottleneck, "port of node 1");
}

TEST(LowerBoundTest, APortIsWorthNoMoreThanTheOthersTogether) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "group", {0, 1e9}, 0);
  builder.AddDevice(0, 0, 100e9);
  builder.AddDevice(0, 0, 1e9);
  builder.AddDevice(0, 0, 1e9);
  const Topology topology = builder.Finish("star", "test", {DeviceType{"cpu", {}, 0, 0}});
  // Four vectors cross 2 + 1 + 1 GB/s.
  EXPECT_NEAR(BoundOf(Vector(Collective::kAllReduce, topology, kBytes), topology).transfer_s, kBytes / 1e9,
              1e-12);
}

TEST(LowerBoundTest, PortsOfDevicesAddUpAndHalfDuplexPortsCarryBothDirections) {
  const Topology rails =
      GroupTopology({4, 4}, {1e-6, 1e12}, {.latency_s = 1e-6, .bytes_per_s = 1e9, .shared = false});
  EXPECT_NEAR(BoundOf(Vector(Collective::kAllReduce, rails, kBytes), rails).transfer_s, kBytes / 4e9, 1e-12);
  const Topology half =
      GroupTopology({4, 4}, {1e-6, 1e12}, {.latency_s = 1e-6, .bytes_per_s = 1e9, .full_duplex = false});
  EXPECT_NEAR(BoundOf(Vector(Collective::kAllReduce, half, kBytes), half).transfer_s, 2 * kBytes / 1e9,
              1e-12);
}

TEST(LowerBoundTest, OtherCollectivesMoveTheBytesOfTheirBlocks) {
  const Topology topology = NodesOfEight(4);
  const auto transfer = [&](Collective collective) {
    return BoundOf(Vector(collective, topology, kBytes), topology).transfer_s;
  };
  EXPECT_NEAR(transfer(Collective::kReduceScatter), 3 / 4.0 * kBytes / 25e9, 1e-12);
  EXPECT_NEAR(transfer(Collective::kAllGather), 3 / 4.0 * kBytes / 25e9, 1e-12);
  EXPECT_NEAR(transfer(Collective::kBroadcast), kBytes / 25e9, 1e-12);
  // Each rank sends a vector to each of the 24 ranks of other nodes.
  EXPECT_NEAR(transfer(Collective::kAllToAll), 8 * 24.0 * kBytes / 25e9, 1e-9);
  const LowerBound barrier = BoundOf(Vector(Collective::kBarrier, topology, 0), topology);
  EXPECT_EQ(barrier.seconds, 8e-6);
  EXPECT_EQ(BoundOf(Vector(Collective::kAllReduce, topology, 0), topology).seconds, 0);
}

TEST(LowerBoundTest, AllToAllvCountsThePairsThatCross) {
  const Topology topology = GroupTopology({2, 1}, {1e-6, 1e12}, {1e-6, 1e9});
  PlanRequest request = {.collective = Collective::kAllToAllv, .ranks = 3};
  request.matrix = {0, 1000, 10, 1000, 0, 20, 5, 5, 0};
  const LowerBound bound = BoundOf(request, topology);
  EXPECT_NEAR(bound.transfer_s, 30 * 4 / 1e9, 1e-15);
  EXPECT_EQ(bound.bottleneck, "port of node 0, out");
}

// Flat rings in block order load the port of a node with 2 (P - 1) / P vectors.
TEST(LowerBoundTest, ABlockRingExceedsTheBoundByTheKnownFactor) {
  for (const auto& [nodes, devices] :
       std::vector<std::pair<int, int>>{{2, 2}, {2, 4}, {4, 4}, {4, 8}, {8, 8}}) {
    const Topology topology = GroupTopology(std::vector<int>(nodes, devices), {1e-9, 1e12}, {1e-9, 1e9});
    const int ranks = nodes * devices;
    const PlanRequest request = Vector(Collective::kAllReduce, topology, int64_t{ranks} << 16);
    const Plan ring = BuildPlan(request, OneLevel(ranks), {.top = Algorithm::kRing}).value();
    const double factor = SimulatePlan(ring, topology).bottleneck_s / BoundOf(request, topology).transfer_s;
    EXPECT_NEAR(factor, (ranks - 1.0) * nodes / (ranks * (nodes - 1.0)), 1e-9) << nodes << "x" << devices;
  }
}

TEST(LowerBoundTest, NoPlanIsSimulatedFasterThanTheBound) {
  std::mt19937 random(27);
  int plans = 0;
  for (int round = 0; round < 150; ++round) {
    const Topology topology = RandomTopology(2 + static_cast<int>(random() % 11), random);
    const Planner planner(topology);
    const int64_t count = std::vector<int64_t>{1, 1000, 300'000}[random() % 3];
    for (const Collective collective : kAllCollectives) {
      const PlanRequest request = MakeRequest(collective, topology.ranks(), count, random() % 3);
      const LowerBound bound = BoundOf(request, topology);
      for (int levels = 0; levels <= topology.depth(); ++levels) {
        for (const Algorithm algorithm : kAllAlgorithms) {
          if (!Supports(collective, algorithm)) continue;
          const int segments = 1 + static_cast<int>(random() % 3);
          const int streams = 1 + static_cast<int>(random() % segments);
          const auto plan =
              planner.Build(request, {levels, {.top = algorithm, .segments = segments, .streams = streams}});
          if (!plan.ok()) continue;
          ++plans;
          EXPECT_GE(SimulatePlan(*plan, topology, {.cache_bytes = 0}).seconds, bound.seconds * (1 - 1e-9))
              << Name(collective) << " by " << plan->algorithm << ", " << bound.bottleneck << ", count "
              << count << "\n"
              << topology.ToJson();
        }
      }
    }
  }
  EXPECT_GT(plans, 5000);
}

TEST(LowerBoundTest, IsNotBelowTheBoundThatThePlannerTestsUse) {
  for (const Topology& topology :
       {DualChipServer(), NodesOfEight(2), NodesOfEight(8), Topology::Flat(5, {1e-6, 1e9})}) {
    const PlanRequest request = Vector(Collective::kAllReduce, topology, kBytes);
    EXPECT_GE(BoundOf(request, topology).transfer_s, AllReduceBound(topology, kBytes) * (1 - 1e-12))
        << topology.name();
  }
}

}  // namespace
}  // namespace moesaic::comm
