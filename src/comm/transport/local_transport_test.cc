#include "comm/transport/local_transport.h"

#include <gtest/gtest.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/test_memory.h"
#include "comm/transport/conformance.h"
#include "comm/transport/limit_clock.h"

namespace moesaic::comm {
namespace {

constexpr double kLimitSeconds = 30;

class LocalConformanceTest : public testing::TestWithParam<size_t> {};

TEST_P(LocalConformanceTest, HoldsFor1To5Ranks) {
  const ConformanceCase& tested = ConformanceCases()[GetParam()];
  for (int ranks = 1; ranks <= 5; ++ranks) {
    RunRanks(ranks, [&](Transport& t) { tested.run(t, ConformanceTag(GetParam())); });
  }
}

TEST_P(LocalConformanceTest, HoldsInVirtualTime) {
  const ConformanceCase& tested = ConformanceCases()[GetParam()];
  const Topology topology = Topology::Flat(3, {.latency_s = 1e-6, .bytes_per_s = 1e9});
  RunRanks(3, [&](Transport& t) { tested.run(t, ConformanceTag(GetParam())); }, {.topology = &topology});
}

INSTANTIATE_TEST_SUITE_P(All, LocalConformanceTest, testing::Range<size_t>(0, ConformanceCases().size()),
                         [](const auto& info) { return ConformanceCases()[info.param].name; });

// Sends `bytes` around the ring and receives as many.
Status ExchangeAround(Transport& t, std::vector<std::byte>& out, std::vector<std::byte>& in) {
  ASSIGN_OR_RETURN(const TransferId receive, t.Receive((t.rank() + t.size() - 1) % t.size(), 1, in));
  const StatusOr<TransferId> send = t.Send((t.rank() + 1) % t.size(), 1, out);
  if (!send.ok()) {
    t.Cancel(receive);
    return send.status();
  }
  const Status received = Wait(t, receive, kLimitSeconds);
  const Status sent = Wait(t, *send, kLimitSeconds);
  return received.ok() ? sent : received;
}

TEST(LocalTransportTest, AllocatesNothingInTheSteadyState) {
  std::atomic<int> warm = 0;
  int64_t before = 0, after = 0;
  RunRanks(2, [&](Transport& t) {
    std::vector<std::byte> out(14336), in(14336);
    const auto run = [&](int exchanges) {
      for (int i = 0; i < exchanges; ++i) ASSERT_TRUE(ExchangeAround(t, out, in).ok());
    };
    run(10);
    if (++warm == 2) before = base::allocations.load();
    while (warm < 2) std::this_thread::yield();
    run(1000);
    if (--warm == 1) after = base::allocations.load();
    while (warm == 2) std::this_thread::yield();
  });
  EXPECT_EQ(after, before);
}

TEST(LocalTransportTest, PeersOfADeadRankGetAnErrorThatNamesIt) {
  LocalJob job(3);
  RunRanks(job, [&](Transport& t) {
    if (t.rank() == 1) return job.Kill(1);
    std::vector<std::byte> buffer(10), other(10);
    Status status;
    // Before or after the death, the receive ends.
    if (const StatusOr<TransferId> receive = t.Receive(1, 7, buffer); receive.ok()) {
      status = Wait(t, *receive, kLimitSeconds);
    } else {
      status = receive.status();
    }
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
    EXPECT_NE(Message(status).find("rank 1"), std::string::npos) << status;
    EXPECT_TRUE(t.failed(1));
    EXPECT_FALSE(t.failed(2 - t.rank()));
    EXPECT_EQ(t.Send(1, 7, buffer).status().code(), StatusCode::kUnavailable);
    // Ranks 0 and 2 still exchange messages.
    const StatusOr<TransferId> receive = t.Receive(2 - t.rank(), 8, other);
    ASSERT_TRUE(receive.ok());
    const StatusOr<TransferId> send = t.Send(2 - t.rank(), 8, buffer);
    ASSERT_TRUE(send.ok());
    EXPECT_TRUE(Wait(t, *receive, kLimitSeconds).ok());
    EXPECT_TRUE(Wait(t, *send, kLimitSeconds).ok());
  });
}

TEST(LocalTransportTest, ARankDiesAtTheGivenSend) {
  for (const int64_t sends : {0, 1, 17}) {
    LocalJob job(3);
    job.KillAtSend(2, sends);
    std::array<int, 3> done{};
    RunRanks(job, [&](Transport& t) {
      std::vector<std::byte> out(5000), in(5000);
      while (ExchangeAround(t, out, in).ok()) ++done[t.rank()];
      job.Kill(t.rank());  // so that its peers end, too
    });
    EXPECT_EQ(done[2], sends);
  }
}

// Transfers are cancelled at random moments of their life while the peer does the same.
TEST(LocalTransportTest, CancelIsSafeAtAnyMoment) {
  for (int round = 0; round < 20; ++round) {
    RunRanks(2, [&](Transport& t) {
      std::mt19937 random(static_cast<uint32_t>(2 * round + t.rank()));
      std::vector<std::byte> out(30000, std::byte{1});
      for (Tag i = 0; i < 300; ++i) {
        std::vector<std::byte> in(30000);
        const StatusOr<TransferId> receive = t.Receive(1 - t.rank(), i, in);
        const StatusOr<TransferId> send = t.Send(1 - t.rank(), i, out);
        ASSERT_TRUE(receive.ok() && send.ok());
        for (uint32_t n = random() % 30; n > 0; --n) t.Progress();
        t.Cancel(*receive);
        t.Cancel(*send);
      }
    });
  }
}

// 1 MB over 1 GB/s after a latency of 1 us takes 1.001 ms, however busy this machine is.
TEST(LocalTransportTest, VirtualTimeIsThatOfTheTopology) {
  const Topology topology = Topology::Flat(2, {.latency_s = 1e-6, .bytes_per_s = 1e9});
  RunRanks(2,
           [](Transport& t) {
             EXPECT_EQ(t.Now(), 0);
             std::vector<std::byte> out(1000000), in(1000000);
             for (int i = 1; i <= 3; ++i) {
               ASSERT_TRUE(ExchangeAround(t, out, in).ok());
               EXPECT_NEAR(t.Now(), i * 1.001e-3, 1e-9);
             }
           },
           {.topology = &topology});
}

// Two messages out of one port take twice the time of one.
TEST(LocalTransportTest, VirtualMessagesShareAPort) {
  const Topology topology = Topology::Flat(3, {.latency_s = 0, .bytes_per_s = 1e6});
  RunRanks(3,
           [](Transport& t) {
             std::vector<std::byte> data(1000);
             if (t.rank() == 0) {
               const StatusOr<TransferId> a = t.Send(1, 0, data), b = t.Send(2, 0, data);
               ASSERT_TRUE(a.ok() && b.ok());
               EXPECT_TRUE(Wait(t, *a, 10).ok() && Wait(t, *b, 10).ok());
             } else {
               const StatusOr<TransferId> id = t.Receive(0, 0, data);
               ASSERT_TRUE(id.ok());
               EXPECT_TRUE(Wait(t, *id, 10).ok());
             }
             EXPECT_NEAR(t.Now(), 2e-3, 1e-9);
           },
           {.topology = &topology});
}

// A message of 1 ms travels while one rank computes for 0.5 ms and the other one for 3 ms.
TEST(LocalTransportTest, ComputationOverlapsMessagesInVirtualTime) {
  const Topology topology = Topology::Flat(2, {.latency_s = 0, .bytes_per_s = 1e9});
  LocalJob job(2, {.topology = &topology});
  RunRanks(job, [&](Transport& t) {
    std::vector<std::byte> data(1000000);
    const StatusOr<TransferId> id = t.rank() == 0 ? t.Send(1, 0, data) : t.Receive(0, 0, data);
    ASSERT_TRUE(id.ok());
    job.Compute(t.rank(), t.rank() == 0 ? 0.5e-3 : 3e-3);
    EXPECT_NEAR(t.Now(), t.rank() == 0 ? 0.5e-3 : 3e-3, 1e-9);
    EXPECT_TRUE(Wait(t, *id, 10).ok());
    EXPECT_NEAR(t.Now(), t.rank() == 0 ? 1e-3 : 3e-3, 1e-9);
  });
}

// All ranks wait for messages that are never sent: the limit of an hour passes without real waiting.
TEST(LocalTransportTest, VirtualTimeLimitsExpireAtOnce) {
  const Topology topology = Topology::Flat(2, {.latency_s = 0, .bytes_per_s = 1e9});
  RunRanks(2,
           [](Transport& t) {
             std::vector<std::byte> data(1);
             const StatusOr<TransferId> id = t.Receive(1 - t.rank(), 0, data);
             ASSERT_TRUE(id.ok());
             EXPECT_EQ(Wait(t, *id, 3600).code(), StatusCode::kDeadlineExceeded);
             EXPECT_GE(t.Now(), 3600);
           },
           {.topology = &topology});
}

// The end time of a random exchange is the same in every run.
TEST(LocalTransportTest, VirtualTimeDoesNotDependOnThreads) {
  constexpr int kRanks = 5;
  const Topology topology = Topology::Flat(kRanks, {.latency_s = 3e-6, .bytes_per_s = 7e8});
  const auto run = [&] {
    std::array<double, kRanks> ends{};
    RunRanks(kRanks,
             [&](Transport& t) {
               std::mt19937 random(1);
               for (int step = 0; step < 30; ++step) {
                 std::vector<std::vector<std::byte>> buffers;
                 std::vector<TransferId> ids;
                 buffers.reserve(100);
                 for (int message = 0; message < 20; ++message) {
                   const int from = static_cast<int>(random() % kRanks),
                             to = static_cast<int>(random() % kRanks);
                   const size_t bytes = random() % 100000;
                   if (from == t.rank()) ids.push_back(*t.Send(to, 0, buffers.emplace_back(bytes)));
                   if (to == t.rank()) ids.push_back(*t.Receive(from, 0, buffers.emplace_back(bytes)));
                 }
                 for (const TransferId id : ids) EXPECT_TRUE(Wait(t, id, kLimitSeconds).ok());
               }
               ends[t.rank()] = t.Now();
             },
             {.topology = &topology});
    return ends;
  };
  const auto first = run();
  EXPECT_GT(first[0], 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(run(), first);
}

TEST(LimitClockTest, CountsShortGapsAndAPartOfLongOnes) {
  LimitClock clock;
  const double start = clock.At(100);
  EXPECT_NEAR(clock.At(100.1) - start, 0.1, 1e-9);
  EXPECT_NEAR(clock.At(100.8) - start, 0.8, 1e-9);
  EXPECT_NEAR(clock.At(160) - start, 0.8 + LimitClock::kMaxGapSeconds, 1e-9);
}

// A job that is stopped as a whole continues: its ranks still wait for each other afterwards.
TEST(LocalTransportTest, ALimitDoesNotExpireWhileTheProcessIsStopped) {
  constexpr double kLimit = 3;
  constexpr auto kStop = std::chrono::milliseconds(4000);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RunRanks(1, [&](Transport& t) {
      using Clock = std::chrono::steady_clock;
      std::array<std::byte, 4> in{};
      const StatusOr<TransferId> id = t.Receive(0, 1, in);
      const Clock::time_point begin = Clock::now();
      signal(SIGALRM, [](int) { kill(getpid(), SIGSTOP); });
      const itimerval soon = {.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = 100'000}};
      setitimer(ITIMER_REAL, &soon, nullptr);
      const bool expired = Wait(t, *id, kLimit).code() == StatusCode::kDeadlineExceeded;
      const std::chrono::duration<double> waited = Clock::now() - begin;
      const std::chrono::duration<double> least = kStop;
      _exit(expired && waited.count() >= least.count() + kLimit - LimitClock::kMaxGapSeconds ? 0 : 1);
    });
  }
  int state = 0;
  waitpid(child, &state, WUNTRACED);
  ASSERT_TRUE(WIFSTOPPED(state)) << state;
  std::this_thread::sleep_for(kStop);
  kill(child, SIGCONT);
  waitpid(child, &state, 0);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
}

}  // namespace
}  // namespace moesaic::comm
