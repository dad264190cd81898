#include "comm/transport/ucx_transport.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/conformance.h"
#include "comm/transport/conformance.h"
#include "comm/transport/free_port.h"

extern char** environ;

namespace moesaic::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using Clock = std::chrono::steady_clock;

constexpr double kLimitSeconds = 30;

RendezvousOptions UcxOptions(uint16_t port, int rank, int size) {
  return {
      .host = "127.0.0.1", .port = port, .rank = rank, .size = size, .secret = "tiger", .time_limit_s = 30};
}

// Ranks are threads, each with a worker of its own.
void RunUcxRanks(int ranks, const std::function<void(Transport&)>& body) {
  const uint16_t port = FreePort();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto made = MakeUcxTransport(UcxOptions(port, rank, ranks));
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

// The transports of UCX that work between processes of every machine.
constexpr std::array<const char*, 3> kUcxTls = {"tcp,self", "posix,self", "sysv,self"};

void SelectTls(const char* tls) {
  setenv("UCX_TLS", tls, 1);
  setenv("UCX_NET_DEVICES", "lo", 1);
}

class UcxConformanceTest : public testing::TestWithParam<const char*> {};

TEST_P(UcxConformanceTest, HoldsFor1To4Ranks) {
  SelectTls(GetParam());
  for (const int ranks : {1, 2, 4}) {
    RunUcxRanks(ranks, [&](Transport& t) {
      for (size_t i = 0; i < ConformanceCases().size(); ++i) {
        SCOPED_TRACE(ConformanceCases()[i].name);
        ConformanceCases()[i].run(t, ConformanceTag(i));
      }
    });
  }
}

TEST_P(UcxConformanceTest, CollectivesAgreeWithBruteForce) {
  SelectTls(GetParam());
  RunUcxRanks(3, [](Transport& t) {
    const ConformanceReport report = CheckCollectives(t, {.max_count = 3000, .sizes = 1});
    EXPECT_TRUE(report.first_failure.ok()) << report.first_failure;
  });
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

INSTANTIATE_TEST_SUITE_P(Tls, UcxConformanceTest, testing::ValuesIn(kUcxTls),
                         [](const auto& info) { return std::string(info.param, strcspn(info.param, ",")); });

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

// ---- ranks that are processes, of which one is killed

struct Role {
  int rank, size, victim, seed;
  uint16_t port;
};

// Runs random collectives until one fails. The victim kills itself in the middle of one. Returns the exit
// code: 0 for a survivor that got the error that it must get.
int RunRole(const Role& role) {
  const auto made = MakeUcxTransport(UcxOptions(role.port, role.rank, role.size));
  if (!made.ok()) {
    fmt::print(stderr, "rank {}: {}\n", role.rank, made.status().ToString());
    return 2;
  }
  CommunicatorOptions options;
  options.time_limit_s = kLimitSeconds;
  const auto communicator = Communicator::Create(
      **made, Topology::Flat(role.size, {.latency_s = 1e-5, .bytes_per_s = 1e9}), options);
  if (!communicator.ok()) return 3;
  std::mt19937 random(static_cast<uint32_t>(role.seed));
  const int last = static_cast<int>(random() % 100);
  const int polls = static_cast<int>(random() % 50);
  for (int call = 0; call <= 100; ++call) {
    const int64_t part = random() % 2 == 0 ? random() % 200 : random() % 60000;
    const auto count = static_cast<size_t>(part * role.size);
    std::vector<float> in(count, 1), out(count);
    const std::span<const std::byte> input = std::as_bytes(std::span(in));
    const std::span<std::byte> output = std::as_writable_bytes(std::span(out));
    const std::vector<int64_t> counts(role.size, part);
    constexpr tensor::DType kF32 = tensor::DType::kF32;
    Communicator& c = **communicator;
    StatusOr<CollectiveHandle> handle = CollectiveHandle();
    switch (random() % 5) {
      case 0:
        handle = c.StartAllReduce(input, output, kF32);
        break;
      case 1:
        handle = c.StartReduceScatter(input, output.first(part * 4), counts, kF32);
        break;
      case 2:
        handle = c.StartAllGather(input.first(part * 4), output, counts, kF32);
        break;
      case 3:
        handle = c.StartAllToAll(input, output, kF32);
        break;
      default:
        handle = c.StartBroadcast(input, output, static_cast<int>(random() % role.size), kF32);
    }
    Status status = handle.status();
    if (status.ok() && role.rank == role.victim && call == last) {
      for (int i = 0; i < polls; ++i) c.Progress();
      raise(SIGKILL);
    }
    if (status.ok()) status = handle->Wait();
    if (status.ok()) continue;
    const bool right =
        status.code() == StatusCode::kUnavailable &&
        moesaic::Message(status).find("rank " + std::to_string(role.victim)) != std::string::npos &&
        (*made)->failed(role.victim);
    if (!right) fmt::print(stderr, "rank {}, call {} of {}: {}\n", role.rank, call, last, status.ToString());
    return right ? 0 : 4;
  }
  fmt::print(stderr, "rank {}: no error although rank {} was killed\n", role.rank, role.victim);
  return 5;
}

pid_t Spawn(const Role& role) {
  const std::string text =
      fmt::format("{} {} {} {} {}", role.rank, role.size, role.victim, role.seed, role.port);
  std::string program = "/proc/self/exe", flag = "--role";
  std::vector<char> argument(text.begin(), text.end());
  argument.push_back(0);
  std::array<char*, 4> arguments = {program.data(), flag.data(), argument.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ), 0);
  return child;
}

class UcxDeathTest : public testing::TestWithParam<const char*> {};

TEST_P(UcxDeathTest, SurvivorsNameTheKilledRankInTime) {
  SelectTls(GetParam());
  for (int seed = 0; seed < 4; ++seed) {
    const int size = 2 + seed % 3;
    const int victim = (seed * 7 + 1) % size;
    const uint16_t port = FreePort();
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(Spawn({rank, size, victim, seed, port}));
    int state = 0;
    ASSERT_EQ(waitpid(ranks[victim], &state, 0), ranks[victim]);
    ASSERT_TRUE(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL) << "victim ended with " << state;
    const auto killed = Clock::now();
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      ASSERT_EQ(waitpid(ranks[rank], &state, 0), ranks[rank]);
      EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0)
          << "seed " << seed << ", rank " << rank << ": " << state;
    }
    const double seconds = Seconds(Clock::now() - killed).count();
    // The end of the process takes up to another 2 s.
    EXPECT_LT(seconds, kUcxDeathLimitSeconds + 2) << "seed " << seed;
    fmt::print("{} ranks over {}: survivors ended after {:.2f} s\n", size, GetParam(), seconds);
  }
}

INSTANTIATE_TEST_SUITE_P(Tls, UcxDeathTest, testing::ValuesIn(kUcxTls),
                         [](const auto& info) { return std::string(info.param, strcspn(info.param, ",")); });

}  // namespace

int RunRoleOf(const char* text) {
  Role role{};
  if (std::sscanf(text, "%d %d %d %d %hu", &role.rank, &role.size, &role.victim, &role.seed, &role.port) != 5)
    return 9;
  return RunRole(role);
}

}  // namespace moesaic::comm

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--role") == 0) return moesaic::comm::RunRoleOf(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
