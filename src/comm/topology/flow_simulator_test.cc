#include "comm/topology/flow_simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace moesaic::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr Link kLink = {.latency_s = 1e-3, .bytes_per_s = 1000};

std::vector<double> EndsOf(const Topology& topology, const std::vector<ScheduledFlow>& flows) {
  return SimulateFlows(topology, flows).value();
}

TEST(FlowSimulatorTest, AMessageTakesItsLatencyAndItsBytes) {
  const Topology topology = Topology::Flat(4, kLink);
  EXPECT_DOUBLE_EQ(EndsOf(topology, {{.from = 0, .to = 1, .bytes = 500, .after = {}}})[0], 0.501);
  EXPECT_DOUBLE_EQ(EndsOf(topology, {{.from = 0, .to = 1, .bytes = 0, .after = {}}})[0], 0.001);
  EXPECT_DOUBLE_EQ(EndsOf(topology, {{.from = 2, .to = 2, .bytes = 500, .after = {}}})[0], 0);
}

TEST(FlowSimulatorTest, MessagesOnOnePortShareItEqually) {
  const Topology topology = Topology::Flat(4, kLink);
  const std::vector<double> ends = EndsOf(topology, {{.from = 0, .to = 1, .bytes = 100, .after = {}},
                                                     {.from = 0, .to = 2, .bytes = 300, .after = {}},
                                                     {.from = 3, .to = 1, .bytes = 300, .after = {}}});
  // Ports 0 (out) and 1 (in) have two messages each: 500 bytes/s for all until the first ends.
  EXPECT_NEAR(ends[0], 0.001 + 0.2, 1e-9);
  EXPECT_NEAR(ends[1], 0.001 + 0.4, 1e-9);
  EXPECT_NEAR(ends[2], 0.001 + 0.4, 1e-9);
}

TEST(FlowSimulatorTest, DirectionsShareHalfDuplexPortsOnly) {
  const std::vector<ScheduledFlow> both = {{.from = 0, .to = 1, .bytes = 100, .after = {}},
                                           {.from = 1, .to = 0, .bytes = 100, .after = {}}};
  EXPECT_NEAR(EndsOf(Topology::Flat(2, kLink), both)[0], 0.101, 1e-9);
  Link half = kLink;
  half.full_duplex = false;
  EXPECT_NEAR(EndsOf(Topology::Flat(2, half), both)[0], 0.201, 1e-9);
}

TEST(FlowSimulatorTest, MessagesWaitForTheirPredecessorsAndStartTimes) {
  const Topology topology = Topology::Flat(3, kLink);
  const std::vector<double> ends =
      EndsOf(topology, {{.from = 0, .to = 1, .bytes = 100, .after = {}},
                        {.from = 1, .to = 2, .bytes = 100, .after = {0}},
                        {.from = 0, .to = 2, .bytes = 100, .start_s = 5, .after = {0}}});
  EXPECT_NEAR(ends[1], 2 * 0.101, 1e-9);
  EXPECT_NEAR(ends[2], 5.101, 1e-9);
}

TEST(FlowSimulatorTest, WrongFlowsAreRefused) {
  const Topology topology = Topology::Flat(2, kLink);
  const auto message = [&](const std::vector<ScheduledFlow>& flows) {
    return Message(SimulateFlows(topology, flows).status());
  };
  EXPECT_THAT(message({{.from = 0, .to = 2, .after = {}}}), HasSubstr("ranks are in [0, 2), found 2"));
  EXPECT_THAT(message({{.from = 0, .to = 1, .bytes = -1, .after = {}}}), HasSubstr("not negative, found -1"));
  EXPECT_THAT(message({{.from = 0, .to = 1, .after = {1}}}), HasSubstr("outside [0, 1): 1"));
  EXPECT_THAT(message({{.from = 0, .to = 1, .after = {1}}, {.from = 0, .to = 1, .after = {0}}}),
              HasSubstr("wait for each other"));
}

// No channel carries more than its bandwidth allows, and no message ends before its own bytes could have
// passed.
TEST(FlowSimulatorTest, RandomMessagesKeepWithinTheBandwidthOfEveryChannel) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 8);
    Link link = kLink;
    link.full_duplex = random() % 2 == 0;
    const Topology topology = Topology::Flat(ranks, link);
    FlowSimulator simulator(topology);
    std::vector<double> bytes;
    double total = 0;
    for (int i = 0; i < 40; ++i) {
      const int from = static_cast<int>(random() % ranks), to = static_cast<int>(random() % ranks);
      bytes.push_back(from == to ? 0 : static_cast<double>(random() % 1000));
      total += bytes.back();
      simulator.Start(from, to, bytes.back());
    }
    while (simulator.active() > 0) {
      for (const int flow : simulator.AdvanceToNextCompletion()) {
        EXPECT_GE(simulator.now() + 1e-9, bytes[flow] / link.bytes_per_s);
      }
    }
    double busiest = 0, carried = 0;
    for (const double each : simulator.channel_bytes()) {
      busiest = std::max(busiest, each);
      carried += each;
    }
    EXPECT_NEAR(carried, 2 * total, 1e-6) << "each message passes the port of its sender and of its receiver";
    EXPECT_GE(simulator.now() + 1e-9, busiest / link.bytes_per_s);
  }
}

}  // namespace
}  // namespace moesaic::comm
