#include "comm/probe/host_topology.h"

#include <gtest/gtest.h>

#include <thread>

#include "comm/transport/local_transport.h"

namespace moesaic::comm {
namespace {

TEST(HostTopology, RanksOfOneHostAreOneGroup) {
  const std::vector<std::string> hosts = {"a", "b", "a", "b", "a"};
  const Topology topology = TopologyOfHosts(hosts);
  ASSERT_EQ(topology.ranks(), 5);
  EXPECT_EQ(topology.groups()[0].level, "cluster");
  ASSERT_EQ(topology.groups()[0].children.size(), 2);
  EXPECT_EQ(topology.groups()[topology.groups()[0].children[0]].ranks, (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(topology.groups()[topology.groups()[0].children[1]].ranks, (std::vector<int>{1, 3}));
}

TEST(HostTopology, OneHostIsOneNode) {
  const std::vector<std::string> hosts = {"a", "a"};
  EXPECT_EQ(TopologyOfHosts(hosts).groups()[0].level, "node");
}

TEST(HostTopology, EveryRankLearnsAllHosts) {
  LocalJob job(3);
  std::vector<std::vector<std::string>> found(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] { found[rank] = HostsOfRanks(job.end(rank), 7, 10).value(); });
  }
  for (std::thread& rank : ranks) rank.join();
  ASSERT_EQ(found[0].size(), 3);
  EXPECT_FALSE(found[0][0].empty());
  EXPECT_EQ(found[0], std::vector<std::string>(3, found[0][0]));
  EXPECT_EQ(found[1], found[0]);
  EXPECT_EQ(found[2], found[0]);
}

}  // namespace
}  // namespace moesaic::comm
