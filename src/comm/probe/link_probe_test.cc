#include "comm/probe/link_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/probe/rank_place.h"
#include "comm/topology/topology_builder.h"
#include "comm/transport/local_transport.h"

namespace moesaic::comm {
namespace {

using testing::HasSubstr;

StatusOr<Topology> Probe(int ranks, const ProbeOptions& options, const LocalOptions& local = {}) {
  StatusOr<Topology> result = absl::InternalError("rank 0 did not return");
  RunRanks(
      ranks,
      [&](Transport& transport) {
        const auto probed = ProbeLinks(transport, options);
        if (transport.rank() != 0) return;
        if (!probed.ok()) {
          result = probed.status();
        } else if (probed->has_value()) {
          result = **probed;
        }
      },
      local);
  return result;
}

// Two groups of two groups of two, whose values are the arguments.
Topology Tree(const Link& top, const Link& middle, const Link& low) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", top, 0);
  for (int i = 0; i < 2; ++i) {
    const int node = builder.AddGroup(0, "node", middle, 0);
    for (int j = 0; j < 2; ++j) {
      const int socket = builder.AddGroup(node, "socket", low, 0);
      for (int k = 0; k < 2; ++k) builder.AddDevice(socket, 0, 0);
    }
  }
  return builder.Finish("truth", "test", {DeviceType{"cpu", {}, 0, 0}});
}

// On virtual time, the measured topology is the one that delivers the messages.
TEST(LinkProbeTest, ASimulatedMachineIsMeasuredExactly) {
  Link top = {30e-6, 1e9}, middle = {3e-6, 10e9}, low = {1e-6, 40e9};
  for (const bool shared : {true, false}) {
    for (const bool full_duplex : {true, false}) {
      top.shared = shared;
      top.full_duplex = full_duplex;
      const Topology truth = Tree(top, middle, low);
      const auto probed = Probe(8, {.pair_s = 0}, {.topology = &truth});
      ASSERT_TRUE(probed.ok()) << probed.status();
      ASSERT_EQ(probed->groups().size(), truth.groups().size()) << probed->ToJson();
      for (size_t g = 0; g < truth.groups().size(); ++g) {
        const Group &expected = truth.groups()[g], &found = probed->groups()[g];
        EXPECT_EQ(found.ranks, expected.ranks);
        if (expected.device_type >= 0) continue;
        EXPECT_NEAR(found.link.latency_s / expected.link.latency_s, 1, 0.02);
        EXPECT_NEAR(found.link.bytes_per_s / expected.link.bytes_per_s, 1, 0.05);
      }
      EXPECT_EQ(probed->groups()[0].link.shared, shared);
      EXPECT_EQ(probed->groups()[0].link.full_duplex, full_duplex);
    }
  }
}

TEST(LinkProbeTest, ThreadsOfThisMachineGiveAReadableFile) {
  const auto probed = Probe(3, {.large_bytes = 1 << 16, .pair_s = 1e-3});
  ASSERT_TRUE(probed.ok()) << probed.status();
  EXPECT_EQ(probed->ranks(), 3);
  EXPECT_TRUE(Topology::Parse(probed->ToJson(), "probed").ok());
  EXPECT_THAT(probed->origin(), HasSubstr("measured between 3 ranks by local"));
}

TEST(LinkProbeTest, BoundThreadsAreProbedAndMoreThanTheMachineHasAreRefused) {
  const auto probed = ProbeThreads(1, {});
  ASSERT_TRUE(probed.ok()) << probed.status();
  EXPECT_EQ(probed->groups()[0].level, "node");
  EXPECT_GT(probed->device_type(0).memory_bytes, 0);
  EXPECT_EQ(ProbeThreads(100'000, {}).status().code(), StatusCode::kInvalidArgument);
}

TEST(LinkProbeTest, OneRankNeedsNoMeasurement) { EXPECT_TRUE(Probe(1, {}).ok()); }

TEST(LinkProbeTest, AnInterruptedProbeEndsOnAllRanks) {
  const auto probed = Probe(4, {.progress = [](int done, int) { return done < 2; }});
  EXPECT_EQ(probed.status().code(), StatusCode::kCancelled);
}

// Rank 0 takes the reports of the places, and sends no commands.
Status ProbeWithASilentDirector(const ProbeOptions& options) {
  Status result;
  RunRanks(2, [&](Transport& transport) {
    if (transport.rank() == 1) {
      result = ProbeLinks(transport, options).status();
      return;
    }
    std::vector<std::byte> report(1024);
    const StatusOr<TransferId> id = transport.Receive(1, 2, report);
    EXPECT_EQ(Wait(transport, *id, 10).code(), StatusCode::kInvalidArgument) << "the report is shorter";
  });
  return result;
}

TEST(LinkProbeTest, AnInterruptEndsTheWaitForRank0) {
  int calls = 0;
  const Status status = ProbeWithASilentDirector({.interrupted = [&] { return ++calls > 1000; }});
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status;
}

TEST(LinkProbeTest, TheWaitForRank0IsAsLongAsAllMeasurementsMayTake) {
  // 4 measurements of one pair, 3 per rank, and one further limit.
  const Status status = ProbeWithASilentDirector({.time_limit_s = 0.05});
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(moesaic::Message(status), HasSubstr("rank 1 waited 0.95 s for rank 0"));
}

TEST(LinkProbeTest, RanksThatLeftShareOneTimeLimit) {
  constexpr double kLimit = 100;  // of virtual time, in which each wait takes a second more
  const Topology topology = Topology::Flat(6, {.latency_s = 1e-6, .bytes_per_s = 1e9});
  Status result;
  double seconds = 0;
  RunRanks(6,
           [&](Transport& transport) {
             const auto probed = ProbeLinks(transport, {.time_limit_s = kLimit,
                                                        .progress = [](int, int) { return false; },
                                                        .interrupted = [&] { return true; }});
             if (transport.rank() != 0) return;
             result = probed.status();
             seconds = transport.Now();
           },
           {.topology = &topology});
  EXPECT_FALSE(result.ok());
  // One limit for the report of rank 1, and one for the stop of all five ranks.
  EXPECT_LT(seconds, 2.2 * kLimit);
}

TEST(LinkProbeTest, ADeadRankEndsTheProbe) {
  LocalJob job(3);
  job.KillAtSend(2, 4);
  Status result;
  std::mutex mutex;
  RunRanks(job, [&](Transport& transport) {
    const auto probed = ProbeLinks(transport, {.time_limit_s = 5});
    if (transport.rank() != 0) return;
    const std::lock_guard lock(mutex);
    result = probed.status();
  });
  EXPECT_EQ(result.code(), StatusCode::kUnavailable) << result;
  EXPECT_THAT(std::string(result.message()), HasSubstr("2"));
}

TEST(RankPlaceTest, BoundThreadsKnowTheirPlace) {
  const RankPlace place = PlaceOfThread();
  EXPECT_FALSE(place.host.empty());
  EXPECT_GT(place.memory_bytes, 0);
  EXPECT_FALSE(MachineFacts().empty());
}

}  // namespace
}  // namespace moesaic::comm
