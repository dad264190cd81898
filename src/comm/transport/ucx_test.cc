#include "comm/transport/ucx_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/collectives/conformance.h"
#include "comm/exchange/brute_force_test_support.h"
#include "comm/transport/conformance.h"
#include "comm/transport/free_port.h"

namespace moesaic::comm {
namespace {

constexpr double kLimitSeconds = 30;

RendezvousOptions UcxOptions(uint16_t port, int rank, int size) {
  return {
      .host = "127.0.0.1", .port = port, .rank = rank, .size = size, .secret = "tiger", .time_limit_s = 30};
}

// Ranks are threads, each with a worker of its own. They are dealt to `hosts` hosts in turn.
void RunUcxRanksOf(int hosts, int ranks, const std::function<void(Transport&)>& body) {
  const uint16_t port = FreePort();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      RendezvousOptions options = UcxOptions(port, rank, ranks);
      options.test_host = rank % hosts;
      const auto made = MakeUcxTransport(options);
      ASSERT_TRUE(made.ok()) << made.status();
      body(**made);
      // All ranks are alive until the last transfer has ended.
      std::vector<std::byte> token(1), tokens(static_cast<size_t>(ranks));
      std::vector<TransferId> ids;
      for (int peer = 0; peer < ranks; ++peer) {
        ids.push_back(*(*made)->Receive(peer, kTagLimit - 2, std::span(tokens).subspan(peer, 1)));
        ids.push_back(*(*made)->Send(peer, kTagLimit - 2, token));
      }
      for (const TransferId id : ids) EXPECT_TRUE(Wait(**made, id, kLimitSeconds).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RunUcxRanks(int ranks, const std::function<void(Transport&)>& body) { RunUcxRanksOf(1, ranks, body); }

// The transports of UCX that work between processes of every machine.
constexpr std::array<const char*, 3> kUcxTls = {"tcp,self", "posix,self", "sysv,self"};

void SelectTls(const char* tls) {
  setenv("UCX_TLS", tls, 1);
  setenv("UCX_NET_DEVICES", "lo", 1);
}

class UcxConformanceTest : public testing::TestWithParam<const char*> {};

void RunConformanceCases(Transport& t) {
  for (size_t i = 0; i < ConformanceCases().size(); ++i) {
    SCOPED_TRACE(ConformanceCases()[i].name);
    ConformanceCases()[i].run(t, ConformanceTag(i));
  }
}

TEST_P(UcxConformanceTest, HoldsFor1To4Ranks) {
  SelectTls(GetParam());
  for (const int ranks : {1, 2, 4}) RunUcxRanks(ranks, RunConformanceCases);
}

TEST_P(UcxConformanceTest, CollectivesAgreeWithBruteForce) {
  SelectTls(GetParam());
  int64_t runs = 0;
  // Memory of System V differs from POSIX's in its allocation only.
  const int max_ranks = std::string_view(GetParam()).starts_with("sysv") ? 3 : 9;
  const Status status = CheckCollectivesOn(RunUcxRanks, max_ranks, /*large_ranks=*/4, /*samples=*/1, &runs);
  EXPECT_TRUE(status.ok()) << status.message();
  RecordProperty("collectives", std::to_string(runs));
}

TEST_P(UcxConformanceTest, DispatchAndCombineAgreeWithBruteForce) {
  SelectTls(GetParam());
  const int max_ranks = std::string_view(GetParam()).starts_with("sysv") ? 2 : 5;
  for (int ranks = 2; ranks <= max_ranks; ++ranks) RunUcxRanks(ranks, CheckDispatchAndCombine);
}

// The peer never receives the message; the sender may reuse the buffer, and both continue.
TEST_P(UcxConformanceTest, CancelsLargeSends) {
  SelectTls(GetParam());
  RunUcxRanks(2, [](Transport& t) {
    constexpr size_t kBytes = 4 << 20;
    for (Tag tag = 0; tag < 3; ++tag) {
      if (t.rank() == 0) {
        std::vector<std::byte> buffer(kBytes);
        const auto id = t.Send(1, tag, buffer);
        ASSERT_TRUE(id.ok());
        t.Progress();
        t.Cancel(*id);
        std::ranges::fill(buffer, std::byte{0xff});
      }
      std::vector<std::byte> out(kBytes, std::byte{7}), in(kBytes);
      const auto receive = t.Receive(1 - t.rank(), 100 + tag, in);
      const auto send = t.Send(1 - t.rank(), 100 + tag, out);
      ASSERT_TRUE(receive.ok() && send.ok());
      EXPECT_TRUE(Wait(t, *receive, kLimitSeconds).ok());
      EXPECT_TRUE(Wait(t, *send, kLimitSeconds).ok());
      EXPECT_EQ(in, out);
    }
    EXPECT_FALSE(t.failed(1 - t.rank()));
  });
}

// Messages are found in the order of their sends, which is not that of the calls of Cancel().
TEST_P(UcxConformanceTest, CancelsSendsOfOneTagInAnyOrder) {
  SelectTls(GetParam());
  RunUcxRanks(2, [](Transport& t) {
    std::vector<std::byte> token(1);
    if (t.rank() == 0) {
      std::vector<std::vector<std::byte>> buffers;
      std::vector<TransferId> ids;
      for (const size_t bytes : {size_t{300'000}, size_t{20'000}, size_t{100'000}}) {
        buffers.emplace_back(bytes);
        ids.push_back(*t.Send(1, 1, buffers.back()));
      }
      std::ranges::reverse(ids);
      for (const TransferId id : ids) t.Cancel(id);
      EXPECT_TRUE(Wait(t, *t.Send(1, 2, token), kLimitSeconds).ok());
    } else {
      EXPECT_TRUE(Wait(t, *t.Receive(0, 2, token), kLimitSeconds).ok());
    }
    EXPECT_FALSE(t.failed(1 - t.rank()));
  });
}

// A rank may end after an error of its own, while its peer has not received these messages.
TEST_P(UcxConformanceTest, EndsWithSendsInFlight) {
  SelectTls(GetParam());
  const uint16_t port = FreePort();
  std::atomic<bool> has_ended = false;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto made = MakeUcxTransport(UcxOptions(port, rank, 2));
      ASSERT_TRUE(made.ok()) << made.status();
      if (rank == 1) {
        while (!has_ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      std::vector<std::vector<std::byte>> buffers;
      for (const size_t bytes : {size_t{10}, size_t{7000}, size_t{100'000}, size_t{4} << 20}) {
        buffers.emplace_back(bytes);
        EXPECT_TRUE((*made)->Send(1, 1, buffers.back()).ok());
        buffers.emplace_back(bytes);
        EXPECT_TRUE((*made)->SendAhead(1, 2, buffers.back()).ok());
      }
      made->reset();
      has_ended = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Tls, UcxConformanceTest, testing::ValuesIn(kUcxTls),
                         [](const auto& info) { return std::string(info.param, strcspn(info.param, ",")); });

// Receives from other hosts pass through memory of the transport, sends to them do not.
TEST(UcxTransportTest, HoldsForRanksOfSeveralHosts) {
  SelectTls("tcp,self");
  RunUcxRanksOf(/*hosts=*/2, /*ranks=*/4, RunConformanceCases);
  RunUcxRanksOf(/*hosts=*/2, /*ranks=*/4, CheckDispatchAndCombine);
}

TEST(UcxTransportTest, RefusesARankWithoutTheSecret) {
  SelectTls("tcp,self");
  const uint16_t port = FreePort();
  RendezvousOptions stranger = UcxOptions(port, 1, 2);
  stranger.secret = "lion";
  RendezvousOptions host = UcxOptions(port, 0, 2);
  host.time_limit_s = 2;
  std::thread rank0([&] {
    const auto made = MakeUcxTransport(host);
    EXPECT_EQ(made.status().code(), StatusCode::kDeadlineExceeded) << made.status();
  });
  EXPECT_EQ(MakeUcxTransport(stranger).status().code(), StatusCode::kPermissionDenied);
  rank0.join();
}

}  // namespace
}  // namespace moesaic::comm
