// Ranks that are processes, of which one is killed or stopped in the middle of random collectives. The others
// report it, mask it and continue to dispatch. `--gtest_random_seed=N` selects other faults.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/test_patience.h"
#include "comm/collectives/communicator.h"
#include "comm/exchange/exchange.h"
#include "comm/exchange/exchange_test_support.h"
#include "comm/transport/free_port.h"
#include "comm/transport/ucx_transport.h"

extern char** environ;

namespace moesaic::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using Clock = std::chrono::steady_clock;

constexpr int kCalls = 100;
// Limits on an idle machine; Role::patience scales them.
constexpr double kLimitSeconds = 20;  // of calls where a rank is killed; detection must be faster
constexpr double kExchangeLimitSeconds = 10;
constexpr double kStoppedLimitSeconds = 3;  // of calls where a rank is stopped
// The test waits for this limit, so that it is scaled by less.
constexpr double kMaxStoppedPatience = 4;

struct Role {
  int rank, size, victim, seed, signal;
  uint16_t port;
  double patience;  // equal on all ranks
};

double StoppedLimit(double patience) {
  return kStoppedLimitSeconds * std::min(patience, kMaxStoppedPatience);
}

// ---- one rank

/// Exit codes of a rank.
enum Outcome : int { kAsExpected, kNotStarted, kWrongError, kNoError, kWrongRows, kNoFarewell, kBadRole };

Outcome Report(const Role& role, Outcome outcome, const std::string& reason) {
  fmt::print(stderr, "rank {} of {}, seed {}: {}\n", role.rank, role.size, role.seed, reason);
  return outcome;
}

StatusOr<CollectiveHandle> StartRandom(Communicator& communicator, std::mt19937& random,
                                       std::span<const float> in, std::span<float> out, int64_t part) {
  const std::span<const std::byte> input = std::as_bytes(in);
  const std::span<std::byte> output = std::as_writable_bytes(out);
  const int64_t bytes = part * 4;
  const std::vector<int64_t> counts(communicator.size(), part);
  constexpr tensor::DType kF32 = tensor::DType::kF32;
  switch (random() % 5) {
    case 0:
      return communicator.StartAllReduce(input, output, kF32);
    case 1:
      return communicator.StartReduceScatter(input, output.first(bytes), counts, kF32);
    case 2:
      return communicator.StartAllGather(input.first(bytes), output, counts, kF32);
    case 3:
      return communicator.StartAllToAll(input, output, kF32);
    default:
      return communicator.StartBroadcast(input, output, static_cast<int>(random() % communicator.size()),
                                         kF32);
  }
}

// Runs random collectives until one fails. The victim sends itself the signal in the middle of one.
Status RunCollectives(const Role& role, Communicator& communicator) {
  std::mt19937 random(static_cast<uint32_t>(role.seed));
  const int last = static_cast<int>(random() % kCalls);
  const int polls = static_cast<int>(random() % 50);
  for (int call = 0; call <= kCalls; ++call) {
    const int64_t part = random() % 2 == 0 ? random() % 200 : random() % 60000;
    const std::vector<float> in(part * role.size, 1);
    std::vector<float> out(in.size());
    auto handle = StartRandom(communicator, random, in, out, part);
    if (!handle.ok()) return handle.status();
    if (role.rank == role.victim && call == last) {
      for (int i = 0; i < polls; ++i) communicator.Progress();
      raise(role.signal);
    }
    if (Status status = handle->Wait(); !status.ok()) return status;
  }
  return OkStatus();
}

bool Names(const Status& status, int rank) {
  const std::string text = moesaic::Message(status), name = "rank " + std::to_string(rank);
  // The reporting rank names itself, so another digit must not follow.
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    if (end == text.size() || std::isdigit(static_cast<unsigned char>(text[end])) == 0) return true;
  }
  return false;
}

// One batch: dispatch, experts, combine.
struct Batch {
  std::vector<float> out;  // [tokens, hidden]
  std::vector<DroppedPair> dropped;
};
StatusOr<Batch> RunBatch(ExpertExchange& exchange, int rank, const RankInput& input, const RandomInput& shape,
                         bool low_latency) {
  StatusOr<Dispatched> rows = Cancelled("not run");
  const PayloadRows x = RowsOf(std::span(input.x));
  if (low_latency) {
    ASSIGN_OR_RETURN(PendingDispatch pending, exchange.BeginDispatch(x, input.topk(shape.k)));
    rows = pending.Finish();
  } else {
    rows = exchange.Dispatch(x, input.topk(shape.k));
  }
  RETURN_IF_ERROR(rows.status());
  const std::vector<float> y = RunExperts(exchange.map(), rank, shape.hidden, *rows);
  Batch batch{.out = std::vector<float>(input.x.size()),
              .dropped = {rows->dropped().begin(), rows->dropped().end()}};
  RETURN_IF_ERROR(exchange.Combine(RowsOf(std::span(y)), rows->handle(), OutputOf(std::span(batch.out))));
  return batch;
}

// Rows of tokens that lost no expert have equal bits in both batches, and the dropped pairs are those of the
// victim's experts.
bool OthersAreUnchanged(const Batch& before, const Batch& after, const RankInput& input,
                        const RandomInput& shape, const ExpertMap& map, int victim) {
  std::vector<DroppedPair> lost;
  std::vector<bool> touched(input.tokens, false);
  for (int32_t at = 0; at < static_cast<int32_t>(input.ids.size()); ++at) {
    if (input.ids[at] < 0 || map.physical(input.ids[at]).rank != victim) continue;
    lost.push_back({at / shape.k, at % shape.k, input.ids[at]});
    touched[at / shape.k] = true;
  }
  if (after.dropped != lost || !before.dropped.empty()) return false;
  for (int64_t token = 0; token < input.tokens; ++token) {
    const auto row = [&](const Batch& batch) {
      return std::span(batch.out).subspan(token * shape.hidden, shape.hidden);
    };
    if (!touched[token] && !std::ranges::equal(row(before), row(after))) return false;
  }
  return true;
}

// Survivors wait for each other, because a rank that leaves is dead for its peers.
Status SayFarewell(const Role& role, Transport& transport) {
  std::array<std::byte, 1> out{};
  std::vector<std::byte> in(role.size);
  std::vector<TransferId> ids;
  for (int peer = 0; peer < role.size; ++peer) {
    if (peer == role.victim || peer == role.rank) continue;
    ASSIGN_OR_RETURN(ids.emplace_back(),
                     transport.Receive(peer, kTagLimit - 1, std::span(in).subspan(peer, 1)));
    ASSIGN_OR_RETURN(ids.emplace_back(), transport.Send(peer, kTagLimit - 1, out));
  }
  for (const TransferId id : ids) RETURN_IF_ERROR(Wait(transport, id, role.patience * kLimitSeconds));
  return OkStatus();
}

Outcome RunRole(const Role& role) {
  const auto transport = MakeUcxTransport({.host = "127.0.0.1",
                                           .port = role.port,
                                           .rank = role.rank,
                                           .size = role.size,
                                           .secret = "tiger",
                                           .time_limit_s = role.patience * kLimitSeconds});
  if (!transport.ok()) return Report(role, kNotStarted, transport.status().ToString());
  const Topology topology = Topology::Flat(role.size, {.latency_s = 1e-5, .bytes_per_s = 1e9});
  const bool is_killed = role.signal == SIGKILL;
  CommunicatorOptions options;
  options.time_limit_s = is_killed ? role.patience * kLimitSeconds : StoppedLimit(role.patience);
  const auto communicator = Communicator::Create(**transport, topology, options);
  const RandomInput shape{.hidden = 40, .experts = 12, .k = 3, .max_tokens = 40};
  const ExpertMap map = ExpertMap::Even(shape.experts, role.size);
  const auto exchange = ExpertExchange::Create(**transport, topology, map, shape.hidden,
                                               {.dispatch_payload = Payload::kF32,
                                                .combine_payload = Payload::kF32,
                                                .reduction = Reduction::kBySlot,
                                                .time_limit_s = role.patience * kExchangeLimitSeconds});
  if (!communicator.ok() || !exchange.ok()) return Report(role, kNotStarted, "it has no communicator");
  const RankInput input = MakeInput(shape, static_cast<uint32_t>(role.seed), role.rank);
  const auto before = RunBatch(**exchange, role.rank, input, shape, false);
  if (!before.ok()) return Report(role, kNotStarted, before.status().ToString());

  const Status status = RunCollectives(role, **communicator);
  if (status.ok()) return Report(role, kNoError, "no collective failed");
  const StatusCode expected = is_killed ? StatusCode::kUnavailable : StatusCode::kDeadlineExceeded;
  if (status.code() != expected || !Names(status, role.victim) ||
      (is_killed && !(*transport)->failed(role.victim))) {
    return Report(role, kWrongError, status.ToString());
  }
  const std::array dead = {role.victim};
  if (const Status masked = (*exchange)->SetDead(dead); !masked.ok()) {
    return Report(role, kWrongRows, masked.ToString());
  }
  for (const bool low_latency : {false, true, false}) {
    const auto after = RunBatch(**exchange, role.rank, input, shape, low_latency);
    if (!after.ok()) return Report(role, kWrongRows, after.status().ToString());
    if (!OthersAreUnchanged(*before, *after, input, shape, map, role.victim)) {
      return Report(role, kWrongRows, "rows of experts that are alive have changed");
    }
  }
  if (const Status ended = SayFarewell(role, **transport); !ended.ok()) {
    return Report(role, kNoFarewell, ended.ToString());
  }
  return kAsExpected;
}

// ---- all ranks

pid_t Spawn(const Role& role) {
  const std::string text = fmt::format("{} {} {} {} {} {} {}", role.rank, role.size, role.victim, role.seed,
                                       role.signal, role.port, role.patience);
  std::string program = "/proc/self/exe", flag = "--role";
  std::vector<char> argument(text.begin(), text.end());
  argument.push_back(0);
  std::array<char*, 4> arguments = {program.data(), flag.data(), argument.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ), 0);
  return child;
}

// Waits for a process to end, or to stop if `options` has WUNTRACED; kills it when it takes too long.
int StateOf(pid_t process, int options = 0) {
  const auto end = Clock::now() + Seconds(base::Patient(2 * kLimitSeconds));
  int state = 0;
  while (waitpid(process, &state, options | WNOHANG) == 0) {
    if (Clock::now() > end) kill(process, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return state;
}

// Runs a job whose victim gets the signal; returns the seconds until the last survivor has ended.
double RunJob(int signal, int size, int seed, double patience) {
  const int victim = (seed * 7 + 1) % size;
  const uint16_t port = FreePort();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(Spawn({rank, size, victim, seed, signal, port, patience}));
  const int victim_state = StateOf(ranks[victim], WUNTRACED);
  const auto start = Clock::now();
  const bool is_hit = signal == SIGKILL ? WIFSIGNALED(victim_state) && WTERMSIG(victim_state) == SIGKILL
                                        : WIFSTOPPED(victim_state);
  EXPECT_TRUE(is_hit) << "seed " << seed << ": victim " << victim << " ended with " << victim_state;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    const int state = StateOf(ranks[rank]);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == kAsExpected)
        << "seed " << seed << ", rank " << rank << ": " << state;
  }
  const double seconds = Seconds(Clock::now() - start).count();
  if (signal == SIGSTOP && is_hit) {
    kill(ranks[victim], SIGKILL);
    StateOf(ranks[victim]);
  }
  return seconds;
}

class UcxFaultTest : public testing::TestWithParam<const char*> {
 protected:
  static int FirstSeed() {
#ifdef GTEST_FLAG_GET
    return 10 * GTEST_FLAG_GET(random_seed);
#else  // before GoogleTest 1.12
    return 10 * testing::FLAGS_gtest_random_seed;
#endif
  }

 private:
  void SetUp() override {
    setenv("UCX_TLS", GetParam(), 1);
    setenv("UCX_NET_DEVICES", "lo", 1);
  }
};

// Seconds of the masked batches and of the ends of processes on an idle machine. Sanitizers make ranks leave
// late.
constexpr double kEndSeconds = 12.5;

TEST_P(UcxFaultTest, SurvivorsNameTheKilledRankInTimeAndDispatchWithoutIt) {
  for (int i = 0; i < 3; ++i) {
    const double seconds = RunJob(SIGKILL, 2 + i, FirstSeed() + i, base::Patient(1));
    EXPECT_LT(seconds, base::Patient(kUcxDeathLimitSeconds + kEndSeconds));
    fmt::print("{} ranks over {}: survivors ended after {:.2f} s\n", 2 + i, GetParam(), seconds);
  }
}

TEST_P(UcxFaultTest, SurvivorsNameTheStoppedRankAfterTheTimeLimitAndDispatchWithoutIt) {
  const double patience = base::Patient(1);
  const double seconds = RunJob(SIGSTOP, 4, FirstSeed() + 5, patience);
  EXPECT_GT(seconds, StoppedLimit(patience) - 1);
  // Sends to the stopped rank are withdrawn for 1 s, and its endpoint is closed for 1 s.
  EXPECT_LT(seconds, StoppedLimit(patience) + base::Patient(2 + kEndSeconds));
  fmt::print("4 ranks over {}: survivors ended after {:.2f} s\n", GetParam(), seconds);
}

// The transports of UCX that work between processes of every machine.
INSTANTIATE_TEST_SUITE_P(Tls, UcxFaultTest, testing::Values("tcp,self", "posix,self", "sysv,self"),
                         [](const auto& info) { return std::string(info.param, strcspn(info.param, ",")); });

}  // namespace

int RunRoleOf(const char* text) {
  Role role{};
  if (std::sscanf(text, "%d %d %d %d %d %hu %lf", &role.rank, &role.size, &role.victim, &role.seed,
                  &role.signal, &role.port, &role.patience) != 7) {
    return kBadRole;
  }
  return RunRole(role);
}

}  // namespace moesaic::comm

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--role") == 0) return moesaic::comm::RunRoleOf(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
