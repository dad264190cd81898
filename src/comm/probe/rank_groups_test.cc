#include "comm/probe/rank_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "comm/topology/topology_builder.h"

namespace moesaic::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Links of a topology; each value is multiplied by a random factor of log-normal spread `noise`.
LinkMatrix LinksOf(const Topology& topology, double noise, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, noise);
  LinkMatrix links(topology.ranks());
  for (int a = 0; a < links.ranks; ++a) {
    for (int b = a + 1; b < links.ranks; ++b) {
      links.Set(a, b, topology.Latency(a, b) * std::exp(normal(random)),
                topology.Bandwidth(a, b) * std::exp(normal(random)));
    }
  }
  return links;
}

std::vector<RankPlace> OneHost(int ranks) { return std::vector<RankPlace>(ranks, {.host = "a"}); }

// Sizes of the groups: "(2 2)" for two groups of two.
std::string Shape(const RankGroup& group) {
  if (group.children.empty()) return "1";
  bool flat = true;
  std::string text;
  for (const RankGroup& child : group.children) {
    flat = flat && child.children.empty();
    text += (text.empty() ? "" : " ") + Shape(child);
  }
  return flat ? fmt::format("{}", group.children.size()) : "(" + text + ")";
}

Topology Levels(const std::vector<int>& counts, const std::vector<Link>& links) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "root", links[0], 0);
  std::vector<int> parents = {0};
  for (size_t level = 0; level < counts.size(); ++level) {
    std::vector<int> next;
    for (const int parent : parents) {
      for (int i = 0; i < counts[level]; ++i) {
        if (level + 1 == counts.size()) {
          builder.AddDevice(parent, 0, 0);
        } else {
          next.push_back(builder.AddGroup(parent, "group", links[level + 1], 0));
        }
      }
    }
    parents = next;
  }
  return builder.Finish("levels", "test", {DeviceType{"cpu", {}, 0, 0}});
}

TEST(RankGroupsTest, FindsLevelsInNoisyMatrices) {
  const Topology cluster = Levels({3, 4}, {{30e-6, 1e9}, {1e-6, 10e9}});
  const Topology server = Levels({2, 2, 2}, {{6e-6, 10e9}, {3e-6, 20e9}, {1e-6, 50e9}});
  const Topology flat = Levels({8}, {{2e-6, 10e9}});
  for (unsigned seed = 0; seed < 200; ++seed) {
    EXPECT_EQ(Shape(GroupRanks(LinksOf(cluster, 0.08, seed), OneHost(12))), "(4 4 4)") << seed;
    EXPECT_EQ(Shape(GroupRanks(LinksOf(server, 0.08, seed), OneHost(8))), "((2 2) (2 2))") << seed;
    EXPECT_EQ(Shape(GroupRanks(LinksOf(flat, 0.08, seed), OneHost(8))), "8") << seed;
  }
}

TEST(RankGroupsTest, ADifferenceOfOnlyLatencyOrBandwidthIsALevel) {
  const Topology latency = Levels({2, 3}, {{4e-6, 10e9}, {1e-6, 10e9}});
  const Topology bandwidth = Levels({2, 3}, {{2e-6, 5e9}, {2e-6, 10e9}});
  for (unsigned seed = 0; seed < 50; ++seed) {
    EXPECT_EQ(Shape(GroupRanks(LinksOf(latency, 0.05, seed), OneHost(6))), "(3 3)") << seed;
    EXPECT_EQ(Shape(GroupRanks(LinksOf(bandwidth, 0.05, seed), OneHost(6))), "(3 3)") << seed;
  }
}

TEST(RankGroupsTest, HostsAreGroupsEvenIfTheNetworkIsAsFast) {
  const Topology flat = Levels({6}, {{2e-6, 10e9}});
  std::vector<RankPlace> places = OneHost(6);
  for (const int rank : {1, 3, 5}) places[rank].host = "b";
  places[5].host = "c";
  const RankGroup root = GroupRanks(LinksOf(flat, 0.3, 1), places);
  ASSERT_EQ(root.children.size(), 3U);
  EXPECT_THAT(root.children[0].ranks, ElementsAre(0, 2, 4));
  EXPECT_THAT(root.children[1].ranks, ElementsAre(1, 3));
  EXPECT_THAT(root.children[2].ranks, ElementsAre(5));
}

TEST(RankGroupsTest, TopologiesHaveMediansLevelsAndReadableFiles) {
  const Topology truth = Levels({2, 2, 2}, {{30e-6, 1e9}, {3e-6, 20e9}, {1e-6, 50e9}});
  std::vector<RankPlace> places = OneHost(8);
  for (int rank = 0; rank < 8; ++rank) {
    places[rank].host = rank < 4 ? "a" : "b";
    places[rank].socket = rank / 2 % 2;
    places[rank].memory_bytes = int64_t{64} << 30;
  }
  const LinkMatrix links = LinksOf(truth, 0.05, 3);
  RankGroup root = GroupRanks(links, places);
  root.shared_ratio = 1.1;
  root.duplex_ratio = 1.0;
  root.children[0].shared_ratio = 1.9;
  root.children[0].duplex_ratio = 1.9;
  const Topology measured = TopologyOf(root, links, places, "lab", "test");
  ASSERT_EQ(measured.ranks(), 8);
  EXPECT_EQ(measured.groups()[0].level, "cluster");
  EXPECT_EQ(measured.groups()[1].level, "node");
  EXPECT_EQ(measured.groups()[2].level, "socket");
  EXPECT_FALSE(measured.groups()[0].link.full_duplex);
  EXPECT_TRUE(measured.groups()[0].link.shared);
  EXPECT_TRUE(measured.groups()[1].link.full_duplex);
  EXPECT_FALSE(measured.groups()[1].link.shared);
  EXPECT_NEAR(measured.Latency(0, 7) / 30e-6, 1, 0.1);
  EXPECT_NEAR(measured.Bandwidth(0, 1) / 50e9, 1, 0.15);
  EXPECT_EQ(measured.device_types().size(), 1U);
  const auto read = Topology::Parse(measured.ToJson(), "lab.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->ToJson(), measured.ToJson());
}

TEST(RankGroupsTest, SlowPortsGetTheirOwnBandwidth) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", {20e-6, 10e9}, 0);
  for (const double port : {0.0, 0.0, 2e9}) {
    const int node = builder.AddGroup(0, "node", {1e-6, 50e9}, port);
    for (int i = 0; i < 2; ++i) builder.AddDevice(node, 0, 0);
  }
  const Topology truth = builder.Finish("uneven", "test", {DeviceType{"cpu", {}, 0, 0}});
  const LinkMatrix links = LinksOf(truth, 0.03, 5);
  const Topology measured = TopologyOf(GroupRanks(links, OneHost(6)), links, OneHost(6), "lab", "test");
  EXPECT_NEAR(measured.Bandwidth(0, 2) / 10e9, 1, 0.15);
  EXPECT_NEAR(measured.Bandwidth(0, 4) / 2e9, 1, 0.15);
}

TEST(RankGroupsTest, SourceStatesTheOrderOfDevices) {
  const Topology truth = Levels({2, 2}, {{30e-6, 1e9}, {1e-6, 10e9}});
  const Topology dealt = truth.Selected(std::vector<int>{0, 2, 1, 3}).value();
  const LinkMatrix links = LinksOf(dealt, 0, 1);
  const Topology measured = TopologyOf(GroupRanks(links, OneHost(4)), links, OneHost(4), "lab", "measured");
  EXPECT_THAT(measured.origin(), HasSubstr("devices are the probed ranks 0 2 1 3"));
}

TEST(RankGroupsTest, OneRankIsATopology) {
  const LinkMatrix links(1);
  const Topology measured = TopologyOf(GroupRanks(links, OneHost(1)), links, OneHost(1), "one", "test");
  EXPECT_EQ(measured.ranks(), 1);
  EXPECT_TRUE(Topology::Parse(measured.ToJson(), "").ok());
}

}  // namespace
}  // namespace moesaic::comm
