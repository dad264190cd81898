// Ranks that are processes, of which one is killed or stopped in the middle of random collectives, or of
// large messages. The others report it, mask it and continue to dispatch. `--gtest_random_seed=N` selects
// other faults.
#include <fcntl.h>
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
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/test_patience.h"
#include "comm/collectives/communicator.h"
#include "comm/collectives/topology_test_support.h"
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

// The time at which the victim of random collectives hits itself, or at which a survivor has the error.
struct TimeReport {
  int64_t rank;
  double at_s;
};
constexpr ssize_t kReportBytes = sizeof(TimeReport);

struct Role {
  int rank, size, hosts, victim, seed, signal;
  uint16_t port;
  double patience;  // equal on all ranks
  bool is_cut;      // one sender and one receiver of messages that are cut; otherwise random collectives
  int report;       // descriptor to which ranks of random collectives write a TimeReport
};

// Time of a clock that all processes share.
double NowSeconds() { return Seconds(Clock::now().time_since_epoch()).count(); }

// Ranks are dealt to hosts in order.
int HostOf(const Role& role, int rank) { return rank * role.hosts / role.size; }

RendezvousOptions OptionsOf(const Role& role) {
  return {.host = "127.0.0.1",
          .port = role.port,
          .rank = role.rank,
          .size = role.size,
          .secret = "tiger",
          .time_limit_s = role.patience * kLimitSeconds,
          .test_host = HostOf(role, role.rank)};
}

// One level, or two where the ranks have several hosts.
Topology TopologyOf(const Role& role) {
  constexpr Link kLink = {.latency_s = 1e-5, .bytes_per_s = 1e9};
  if (role.hosts == 1) return Topology::Flat(role.size, kLink);
  std::vector<int> sizes(role.hosts, 0);
  for (int rank = 0; rank < role.size; ++rank) ++sizes[HostOf(role, rank)];
  return GroupTopology(sizes, kLink, {.latency_s = 5e-5, .bytes_per_s = 1e8});
}

double StoppedLimit(double patience) {
  return kStoppedLimitSeconds * std::min(patience, kMaxStoppedPatience);
}

// ---- one rank

/// Exit codes of a rank.
enum Outcome : int {
  kAsExpected,
  kNotStarted,
  kWrongError,
  kNoError,
  kWrongRows,
  kNoFarewell,
  kBadRole,
  kTooLate,
  kTouched,
  kNoReport
};

Outcome Report(const Role& role, Outcome outcome, const std::string& reason) {
  fmt::print(stderr, "rank {} of {}, seed {}: {}\n", role.rank, role.size, role.seed, reason);
  return outcome;
}

// Elements that `from` sends to `to` in an AllToAllv.
int64_t PairCount(int from, int to, int64_t part) { return (from + to) % 2 == 0 ? part : part / 3; }

// `in` and `out` have `part` elements per rank, and `received` has one element per rank.
StatusOr<CollectiveHandle> StartRandom(Communicator& communicator, std::mt19937& random,
                                       std::span<const float> in, std::span<float> out,
                                       std::span<int64_t> received, int64_t part) {
  const std::span<const std::byte> input = std::as_bytes(in);
  const std::span<std::byte> output = std::as_writable_bytes(out);
  const int64_t bytes = part * 4;
  const std::vector<int64_t> counts(communicator.size(), part);
  constexpr tensor::DType kF32 = tensor::DType::kF32;
  switch (random() % 7) {
    case 0:
      return communicator.StartAllReduce(input, output, kF32);
    case 1:
      return communicator.StartReduceScatter(input, output.first(bytes), counts, kF32);
    case 2:
      return communicator.StartAllGather(input.first(bytes), output, counts, kF32);
    case 3:
      return communicator.StartAllToAll(input, output, kF32);
    case 4: {
      std::vector<int64_t> sent(communicator.size());
      for (int to = 0; to < communicator.size(); ++to) sent[to] = PairCount(communicator.rank(), to, part);
      const int64_t sum = std::accumulate(sent.begin(), sent.end(), int64_t{0});
      return communicator.StartAllToAllv(input.first(4 * sum), sent, output, received, kF32);
    }
    case 5:
      return communicator.StartBarrier();
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
    // Equally often, parts have less than 800 bytes, less than 8000, which is one fragment, or up to 240,000.
    constexpr std::array<int64_t, 3> kParts = {200, 2000, 60000};
    const int64_t most = kParts[random() % kParts.size()];
    const auto part = static_cast<int64_t>(random() % most);
    const std::vector<float> in(part * role.size, 1);
    std::vector<float> out(in.size());
    std::vector<int64_t> received(role.size);
    auto handle = StartRandom(communicator, random, in, out, received, part);
    if (!handle.ok()) return handle.status();
    if (role.rank == role.victim && call == last) {
      for (int i = 0; i < polls; ++i) communicator.Progress();
      const TimeReport hit = {role.rank, NowSeconds()};
      if (write(role.report, &hit, sizeof(hit)) != kReportBytes) return Cancelled("the test does not read");
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
  const auto transport = MakeUcxTransport(OptionsOf(role));
  if (!transport.ok()) return Report(role, kNotStarted, transport.status().ToString());
  const Topology topology = TopologyOf(role);
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
  const TimeReport failed = {role.rank, NowSeconds()};
  if (status.ok()) return Report(role, kNoError, "no collective failed");
  const StatusCode expected = is_killed ? StatusCode::kUnavailable : StatusCode::kDeadlineExceeded;
  if (status.code() != expected || !Names(status, role.victim) ||
      (is_killed && !(*transport)->failed(role.victim))) {
    return Report(role, kWrongError, status.ToString());
  }
  if (write(role.report, &failed, sizeof(failed)) != kReportBytes) {
    return Report(role, kNoReport, "the test does not read");
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

// ---- messages that are cut

constexpr Tag kPidTag = 1, kStartTag = 2, kCutTag = 3;
// Together more than the buffers of a connection. All but the last are eager messages of many fragments.
constexpr std::array<size_t, 4> kCutBytes = {20'000, 15 << 20, 15 << 20, 32 << 20};
constexpr double kCutLimitSeconds = 2;  // of messages of a stopped sender, which is silent after 1.5 s
constexpr std::byte kReused{0x5a};

// Sends its process number, waits until the receiver is ready, and hits itself while its messages travel.
Outcome RunCutSender(const Role& role, Transport& transport) {
  const auto pid = static_cast<int64_t>(getpid());
  std::byte start{};
  const double limit_s = role.patience * kLimitSeconds;
  const auto sent = transport.Send(0, kPidTag, std::as_bytes(std::span(&pid, 1)));
  if (!sent.ok() || !Wait(transport, *sent, limit_s).ok()) return Report(role, kNotStarted, "no receiver");
  const auto ready = transport.Receive(0, kStartTag, std::span(&start, 1));
  if (!ready.ok() || !Wait(transport, *ready, limit_s).ok()) return Report(role, kNotStarted, "no receiver");
  std::vector<std::vector<std::byte>> buffers;
  std::vector<TransferId> ids;
  for (const size_t bytes : kCutBytes) {
    buffers.emplace_back(bytes, std::byte{1});
    const auto id = bytes == kCutBytes.back() ? transport.Send(0, kCutTag, buffers.back())
                                              : transport.SendAhead(0, kCutTag, buffers.back());
    if (id.ok()) ids.push_back(*id);
  }
  raise(role.signal);
  // It continues after a stop: what UCX still holds is sent.
  const auto end = Clock::now() + Seconds(1);
  while (Clock::now() < end) transport.Progress();
  for (const TransferId id : ids) transport.Cancel(id);
  return kAsExpected;
}

// Cancels the messages after their limits, reuses their buffers, and lets the sender continue.
Outcome RunCutReceiver(const Role& role, Transport& transport) {
  int64_t pid = 0;
  const std::byte start{};
  const double limit_s = role.patience * kLimitSeconds;
  const auto named = transport.Receive(1, kPidTag, std::as_writable_bytes(std::span(&pid, 1)));
  if (!named.ok() || !Wait(transport, *named, limit_s).ok()) return Report(role, kNotStarted, "no sender");
  std::vector<std::vector<std::byte>> buffers;
  std::vector<TransferId> ids;
  for (const size_t bytes : kCutBytes) {
    buffers.emplace_back(bytes);
    const auto id = transport.Receive(1, kCutTag, buffers.back());
    if (!id.ok()) return Report(role, kNotStarted, id.status().ToString());
    ids.push_back(*id);
  }
  const auto ready = transport.Send(1, kStartTag, std::span(&start, 1));
  if (!ready.ok() || !Wait(transport, *ready, limit_s).ok()) return Report(role, kNotStarted, "no sender");
  // The sender fills the buffers of the connection, and is hit in the middle of a message.
  std::this_thread::sleep_for(Seconds(0.3));
  const bool is_killed = role.signal == SIGKILL;
  const auto begin = Clock::now();
  Status first = OkStatus();
  for (const TransferId id : ids) {
    const Status status = Wait(transport, id, is_killed ? limit_s : kCutLimitSeconds);
    if (first.ok()) first = status;
  }
  const double seconds = Seconds(Clock::now() - begin).count();
  if (first.ok()) return Report(role, kNoError, "all messages arrived");
  if (!Names(first, 1) ||
      first.code() != (is_killed ? StatusCode::kUnavailable : StatusCode::kDeadlineExceeded)) {
    return Report(role, kWrongError, first.ToString());
  }
  // A killed sender is detected, and a stopped one given up, before its transfers are abandoned.
  const double most_s = kCutLimitSeconds + role.patience * kUcxDeathLimitSeconds;
  if (seconds > most_s)
    return Report(role, kTooLate, fmt::format("{:.1f} s, limit {:.1f} s", seconds, most_s));
  for (std::vector<std::byte>& buffer : buffers) std::ranges::fill(buffer, kReused);
  if (!is_killed) kill(static_cast<pid_t>(pid), SIGCONT);
  const auto end = Clock::now() + Seconds(0.5);
  while (Clock::now() < end) transport.Progress();
  for (const std::vector<std::byte>& buffer : buffers) {
    if (std::ranges::count(buffer, kReused) != std::ssize(buffer))
      return Report(role, kTouched, fmt::format("buffer of {} bytes", buffer.size()));
  }
  return kAsExpected;
}

Outcome RunCutRole(const Role& role) {
  const auto transport = MakeUcxTransport(OptionsOf(role));
  if (!transport.ok()) return Report(role, kNotStarted, transport.status().ToString());
  return role.rank == role.victim ? RunCutSender(role, **transport) : RunCutReceiver(role, **transport);
}

// ---- all ranks

pid_t Spawn(const Role& role) {
  const std::string text =
      fmt::format("{} {} {} {} {} {} {} {} {} {}", role.rank, role.size, role.hosts, role.victim, role.seed,
                  role.signal, role.port, role.patience, static_cast<int>(role.is_cut), role.report);
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

// How the ranks of a job are connected.
struct Network {
  const char* name;
  const char* tls;
  int max_hosts;  // 1: all ranks are on one host
};

void PrintTo(const Network& network, std::ostream* out) { *out << network.name; }

// Returns true for the state of a process that the signal has ended or stopped.
bool IsHit(int state, int signal) {
  return signal == SIGKILL ? WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL : WIFSTOPPED(state);
}

// Seconds since the victim was hit.
struct JobTimes {
  double named_s;  // until the last survivor has the error that names it
  double ended_s;  // until the last survivor has ended
};

// Runs a job whose victim gets the signal.
JobTimes RunJob(int signal, int size, int hosts, int seed, double patience) {
  const int victim = (seed * 7 + 1) % size;
  const uint16_t port = FreePort();
  std::array<int, 2> pipe_ends = {-1, -1};
  EXPECT_EQ(pipe2(pipe_ends.data(), O_NONBLOCK), 0);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(Spawn({rank, size, hosts, victim, seed, signal, port, patience, false, pipe_ends[1]}));
  const int victim_state = StateOf(ranks[victim], WUNTRACED);
  const bool is_hit = IsHit(victim_state, signal);
  EXPECT_TRUE(is_hit) << "seed " << seed << ": victim " << victim << " ended with " << victim_state;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    const int state = StateOf(ranks[rank]);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == kAsExpected)
        << "seed " << seed << ", rank " << rank << ": " << state;
  }
  const double ended_at_s = NowSeconds();
  if (signal == SIGSTOP && is_hit) {
    kill(ranks[victim], SIGKILL);
    StateOf(ranks[victim]);
  }
  int reports = 0;
  double hit_at_s = ended_at_s, named_at_s = 0;
  for (TimeReport report{}; read(pipe_ends[0], &report, sizeof(report)) == kReportBytes; ++reports) {
    if (report.rank == victim) {
      hit_at_s = report.at_s;
    } else {
      named_at_s = std::max(named_at_s, report.at_s);
    }
  }
  EXPECT_EQ(reports, size) << "seed " << seed;
  for (const int end : pipe_ends) close(end);
  return {named_at_s - hit_at_s, ended_at_s - hit_at_s};
}

// Runs a sender and a receiver on different hosts. The sender is hit in the middle of its messages.
void RunCutJob(int signal, double patience) {
  const uint16_t port = FreePort();
  const pid_t receiver = Spawn({0, 2, 2, 1, 0, signal, port, patience, true, -1});
  const pid_t sender = Spawn({1, 2, 2, 1, 0, signal, port, patience, true, -1});
  const int hit = StateOf(sender, WUNTRACED);
  const bool is_hit = IsHit(hit, signal);
  EXPECT_TRUE(is_hit) << "the sender ended with " << hit;
  const int received = StateOf(receiver);
  EXPECT_TRUE(WIFEXITED(received) && WEXITSTATUS(received) == kAsExpected) << received;
  if (signal == SIGKILL || !is_hit) return;
  kill(sender, SIGCONT);  // also if the receiver failed
  const int sent = StateOf(sender);
  EXPECT_TRUE(WIFEXITED(sent) && WEXITSTATUS(sent) == kAsExpected) << sent;
}

void SelectNetwork(const char* tls) {
  setenv("UCX_TLS", tls, 1);
  setenv("UCX_NET_DEVICES", "lo", 1);
}

class UcxFaultTest : public testing::TestWithParam<Network> {
 protected:
  static int FirstSeed() {
#ifdef GTEST_FLAG_GET
    return 10 * GTEST_FLAG_GET(random_seed);
#else  // before GoogleTest 1.12
    return 10 * testing::FLAGS_gtest_random_seed;
#endif
  }

 private:
  void SetUp() override { SelectNetwork(GetParam().tls); }
};

// Seconds of the masked batches and of the ends of processes on an idle machine. Sanitizers make ranks leave
// late.
constexpr double kEndSeconds = 12.5;

TEST_P(UcxFaultTest, SurvivorsNameTheKilledRankInTimeAndDispatchWithoutIt) {
  for (int i = 0; i < 3; ++i) {
    const int hosts = std::min(2 + i, GetParam().max_hosts);
    const JobTimes times = RunJob(SIGKILL, 2 + i, hosts, FirstSeed() + i, base::Patient(1));
    EXPECT_LT(times.named_s, base::Patient(kUcxDeathLimitSeconds));
    EXPECT_LT(times.ended_s, base::Patient(kUcxDeathLimitSeconds + kEndSeconds));
    fmt::print("{} ranks over {}: survivors named the rank after {:.2f} s, ended after {:.2f} s\n", 2 + i,
               GetParam().name, times.named_s, times.ended_s);
  }
}

TEST_P(UcxFaultTest, SurvivorsNameTheStoppedRankAfterTheTimeLimitAndDispatchWithoutIt) {
  const double patience = base::Patient(1);
  const JobTimes times = RunJob(SIGSTOP, 4, GetParam().max_hosts, FirstSeed() + 5, patience);
  EXPECT_GT(times.named_s, StoppedLimit(patience) - 1);
  // Sends to the stopped rank are withdrawn for 1 s, and its endpoint is closed for 1 s.
  EXPECT_LT(times.named_s, StoppedLimit(patience) + base::Patient(2));
  EXPECT_LT(times.ended_s, StoppedLimit(patience) + base::Patient(2 + kEndSeconds));
  fmt::print("4 ranks over {}: survivors named the rank after {:.2f} s, ended after {:.2f} s\n",
             GetParam().name, times.named_s, times.ended_s);
}

// The transports of UCX that work between processes of every machine. Only the ranks of "hosts" take each
// other for ranks of different hosts.
constexpr std::array<Network, 4> kNetworks = {
    {{"tcp", "tcp,self", 1}, {"hosts", "tcp,self", 2}, {"posix", "posix,self", 1}, {"sysv", "sysv,self", 1}}};

INSTANTIATE_TEST_SUITE_P(Tls, UcxFaultTest, testing::ValuesIn(kNetworks),
                         [](const auto& info) { return std::string(info.param.name); });

// UCX never ends the receive of an eager message that is cut, and writes to its buffer when a stopped sender
// continues.
TEST(UcxCutMessageTest, ReceivesFromAKilledRankOfAnotherHostEndInTime) {
  SelectNetwork("tcp,self");
  RunCutJob(SIGKILL, base::Patient(1));
}

TEST(UcxCutMessageTest, BuffersOfCancelledReceivesAreNotWrittenWhenAStoppedRankOfAnotherHostContinues) {
  SelectNetwork("tcp,self");
  RunCutJob(SIGSTOP, base::Patient(1));
}

}  // namespace

int RunRoleOf(const char* text) {
  Role role{};
  int is_cut = 0;
  if (std::sscanf(text, "%d %d %d %d %d %d %hu %lf %d %d", &role.rank, &role.size, &role.hosts, &role.victim,
                  &role.seed, &role.signal, &role.port, &role.patience, &is_cut, &role.report) != 10) {
    return kBadRole;
  }
  role.is_cut = is_cut != 0;
  return role.is_cut ? RunCutRole(role) : RunRole(role);
}

}  // namespace moesaic::comm

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--role") == 0) return moesaic::comm::RunRoleOf(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
