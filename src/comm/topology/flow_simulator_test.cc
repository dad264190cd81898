#include "comm/topology/flow_simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "comm/topology/topology_builder.h"

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

TEST(FlowSimulatorTest, MessagesThatEndWithinAQuantumEndTogether) {
  const Topology topology = Topology::Flat(64, kLink);
  std::vector<ScheduledFlow> flows;
  for (int from = 1; from < 64; ++from)
    flows.push_back({.from = from, .to = 0, .bytes = 100 + 0.01 * from, .after = {}});
  const double quantum_s = 0.1;
  const std::vector<double> exact = EndsOf(topology, flows);
  const std::vector<double> rounded = SimulateFlows(topology, flows, quantum_s).value();
  EXPECT_LT(exact.front(), exact.back());
  for (size_t i = 0; i < flows.size(); ++i) {
    EXPECT_EQ(rounded[i], rounded.front());
    EXPECT_NEAR(rounded[i], exact[i], quantum_s);
  }
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

// Two nodes of two devices. Inside a node each device has 1000 bytes/s.
Topology TwoNodes(const Link& between, double port_of_node_1) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", between, 0);
  for (const double port : {0.0, port_of_node_1}) {
    const int node = builder.AddGroup(0, "node", {.latency_s = 0, .bytes_per_s = 1000}, port);
    for (int i = 0; i < 2; ++i) builder.AddDevice(node, 0, 0);
  }
  return builder.Finish("two nodes", "test", {DeviceType{"cpu", {}, 0, 0}});
}

TEST(FlowSimulatorTest, AllMessagesThroughOnePortTakeTheTimeOfTheirSum) {
  for (const int messages : {1, 2, 5, 9}) {
    const Topology topology = Topology::Flat(messages + 1, kLink);
    std::vector<ScheduledFlow> flows;
    for (int to = 1; to <= messages; ++to) flows.push_back({.from = 0, .to = to, .bytes = 100, .after = {}});
    for (const double end : EndsOf(topology, flows)) EXPECT_NEAR(end, 0.001 + messages * 0.1, 1e-9);
  }
}

TEST(FlowSimulatorTest, ASlowPortLimitsItsMessagesAndLeavesTheRestToOthers) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "group", {.latency_s = 0, .bytes_per_s = 1000}, 0);
  for (const double port : {0.0, 100.0, 0.0}) builder.AddDevice(0, 0, port);
  const Topology topology = builder.Finish("unequal", "test", {DeviceType{"cpu", {}, 0, 0}});
  const std::vector<double> ends = EndsOf(topology, {{.from = 0, .to = 1, .bytes = 100, .after = {}},
                                                     {.from = 0, .to = 2, .bytes = 900, .after = {}}});
  EXPECT_NEAR(ends[0], 1, 1e-9) << "100 bytes/s";
  EXPECT_NEAR(ends[1], 1, 1e-9) << "1000 - 100 bytes/s";
}

TEST(FlowSimulatorTest, DevicesOfANodeShareItsPortOnlyIfItIsShared) {
  const std::vector<ScheduledFlow> rails = {{.from = 0, .to = 2, .bytes = 100, .after = {}},
                                            {.from = 1, .to = 3, .bytes = 100, .after = {}}};
  Link between = {.latency_s = 0, .bytes_per_s = 100, .shared = true};
  for (const double end : EndsOf(TwoNodes(between, 0), rails)) EXPECT_NEAR(end, 2, 1e-9);
  between.shared = false;
  for (const double end : EndsOf(TwoNodes(between, 0), rails)) EXPECT_NEAR(end, 1, 1e-9);
  // A port that is not shared has its bandwidth per device.
  for (const double end : EndsOf(TwoNodes(between, 50), rails)) EXPECT_NEAR(end, 2, 1e-9);
}

TEST(FlowSimulatorTest, EveryPortOfAPathCarriesTheBytesOfTheMessage) {
  const Topology topology = TwoNodes({.latency_s = 0, .bytes_per_s = 100, .full_duplex = false}, 300);
  FlowSimulator simulator(topology);
  simulator.Start(0, 3, 70);
  simulator.Start(2, 3, 5);
  std::vector<double> expected(topology.channels().size(), 0);
  for (const int channel : topology.Path(0, 3)) expected[channel] += 70;
  for (const int channel : topology.Path(2, 3)) expected[channel] += 5;
  while (simulator.active() > 0) simulator.AdvanceToNextCompletion();
  EXPECT_EQ(simulator.channel_bytes(), expected);
  EXPECT_NEAR(simulator.now(), 0.7, 1e-9) << "the port of node 0";
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
