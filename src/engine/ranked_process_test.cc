// An engine whose ranks are processes that exchange messages by UCX. One of them is killed or stopped while
// the engine runs, and the engine names it, or continues without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "base/test_patience.h"
#include "comm/transport/free_port.h"
#include "comm/transport/ucx_transport.h"
#include "engine/engine.h"
#include "engine/ranked_executor.h"
#include "models/test_session.h"

extern char** environ;

namespace moesaic::engine {
namespace {

using parallel::Degrees;
using parallel::Layout;
using parallel::RankGroups;
using testing::AnyOf;
using testing::EndsWith;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;

struct Role {
  int rank = 0;
  Degrees degrees;
  uint16_t port = 0;
  double limit_s = 30;
};

/// One rank: its transport and its part of the model.
class Process {
 public:
  explicit Process(const Role& role)
      : layout(LayoutOf(role.degrees)), threads(*runtime::ThreadPool::Create({.threads = 1, .pin = false})) {
    auto made = comm::MakeUcxTransport({.host = "127.0.0.1",
                                        .port = role.port,
                                        .rank = role.rank,
                                        .size = layout.ranks(),
                                        .secret = "tiger",
                                        .time_limit_s = 30});
    if (!made.ok()) return;
    job = *std::move(made);
    const auto topology = comm::Topology::Flat(layout.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10});
    std::shared_ptr<RankGroups> groups = *RankGroups::Create(*job, topology, layout, role.limit_s);
    auto loaded = models::Model::Load(models::SourcePath("tests/golden/deepseek-v3-mtp"),
                                      {.dtype = "f32", .progress = nullptr, .groups = groups}, *threads);
    if (loaded.ok()) model = *std::move(loaded);
  }

  // Replicas that divide the experts continue without a rank.
  static Layout LayoutOf(const Degrees& degrees) {
    Layout layout = *Layout::Create(degrees);
    if (degrees.expert > 1) {
      EXPECT_TRUE(layout.TolerateFailures().ok());
    }
    return layout;
  }

  const Layout layout;
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> threads;
  std::unique_ptr<comm::Transport> job;
  std::unique_ptr<models::Model> model;  // null: not started
};

pid_t Spawn(const Role& role) {
  char name[] = "ranked_process_test", flag[] = "--role";
  std::string text = fmt::format("{} {} {} {} {} {}", role.rank, role.degrees.tensor, role.degrees.pipeline,
                                 role.degrees.data, role.port, role.limit_s);
  char* arguments[] = {name, flag, text.data(), nullptr};
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ), 0);
  return pid;
}

// Waits for the end of a rank that need not be killed.
void ExpectEnded(int rank, pid_t pid) {
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(base::Patient(30)));
  int status = 0;
  pid_t ended = 0;
  while ((ended = waitpid(pid, &status, WNOHANG)) == 0 && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (ended == 0) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    FAIL() << "rank " << rank << " did not end";
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
}

void KillRank(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

// The failure of a rank.
struct ProcessFault {
  Degrees degrees;
  int victim = 0;
  int signal = 0;
  double limit_s = 30, others_limit_s = 30;  // time limits of the driver and of other ranks
};

Status RunUntilFailure(Process& process, const Role& role, pid_t victim, const ProcessFault& fault,
                       double* seconds) {
  EngineOptions options;
  options.kv_bytes = 8 << 20;
  options.max_sequences = 2;
  options.max_batch_tokens = 64;
  options.job = process.job.get();
  options.layout = process.layout;
  options.rank_time_limit_s = role.limit_s;
  auto created = Engine::Create(*process.model, process.kernels, *process.threads, options);
  RETURN_IF_ERROR(created.status());
  Engine& engine = **created;
  std::atomic<Clock::rep> hit = 0;
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    hit = Clock::now().time_since_epoch().count();
    kill(victim, fault.signal);
  });
  Status status;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
  while (status.ok() && Clock::now() < end) {
    if (engine.idle()) {
      Request request;
      request.prompt = {5, 6, 7};
      request.sampling.max_tokens = 100;
      EXPECT_TRUE(engine.Add(request).ok());
    }
    std::vector<TokenEvent> events;
    status = engine.Step(&events);
  }
  *seconds =
      std::chrono::duration<double>(Clock::now().time_since_epoch() - Clock::duration(hit.load())).count();
  killer.join();
  std::vector<TokenEvent> events;
  EXPECT_EQ(Message(engine.Step(&events)), Message(status));
  return status;
}

// Runs steps until one fails by the fault, and returns the error. Sets the time from the signal to the
// error. Ranks other than the victim must end without an error: the driver tells them to.
Status FailBy(const ProcessFault& fault, double* seconds) {
  Role role = {.degrees = fault.degrees, .port = comm::FreePort(), .limit_s = fault.limit_s};
  std::vector<pid_t> pids = {0};
  for (int rank = 1; rank < fault.degrees.ranks(); ++rank) {
    pids.push_back(
        Spawn({.rank = rank, .degrees = role.degrees, .port = role.port, .limit_s = fault.others_limit_s}));
  }
  Status failed = absl::InternalError("rank 0 did not start");
  {
    Process process(role);
    if (process.model != nullptr) failed = RunUntilFailure(process, role, pids[fault.victim], fault, seconds);
  }
  for (int rank = 1; rank < fault.degrees.ranks(); ++rank) {
    rank == fault.victim ? KillRank(pids[rank]) : ExpectEnded(rank, pids[rank]);
  }
  fmt::print("{}: after {:.2f} s: {}\n", Name(fault.degrees), *seconds, Message(failed));
  return failed;
}

class RankedProcessTest : public testing::TestWithParam<Degrees> {};

// Time limits are for an idle machine; tests share theirs with others.
constexpr double kPatience = 5;

// Seconds on an idle machine until the engine names a rank that was killed.
constexpr double kNamedSeconds = 2;

// The transport looks for ended processes after 0.5 s. Ranks that share cores with other processes take
// longer than 0.6 s.
TEST_P(RankedProcessTest, AKilledRankIsNamedSoon) {
  for (const int victim : std::set<int>{1, GetParam().ranks() - 1}) {
    double seconds = 0;
    const Status failed = FailBy({.degrees = GetParam(), .victim = victim, .signal = SIGKILL}, &seconds);
    EXPECT_THAT(Message(failed), StartsWith(fmt::format("rank {} died", victim)));
    EXPECT_LT(seconds, base::Patient(kNamedSeconds));
  }
}

TEST_P(RankedProcessTest, AStoppedRankIsNamedAfterTheTimeLimit) {
  constexpr double kLimit = 2;
  double seconds = 0;
  const int victim = GetParam().ranks() - 1;
  const Status failed = FailBy({.degrees = GetParam(),
                                .victim = victim,
                                .signal = SIGSTOP,
                                .limit_s = kLimit,
                                .others_limit_s = 3 * kLimit},
                               &seconds);
  EXPECT_THAT(Message(failed), StartsWith(fmt::format("rank {} did not answer for ", victim)));
  // Cancelling transfers with a stopped rank and closing its endpoint take time, too.
  EXPECT_LT(seconds, kLimit + kPatience * comm::kUcxDeathLimitSeconds);
}

// A rank of its stage notices it before the driver does, reports it, and ends when the driver tells it to. If
// the rank is stopped between its last message to them in a step and its answer, only the driver waits for
// it.
TEST(RankedProcess, ARankThatWaitsForAStoppedOneIsNotNamed) {
  constexpr int kAttempts = 5;
  std::string failed;
  for (int attempt = 0; attempt < kAttempts && failed.find("reported by") == std::string::npos; ++attempt) {
    double seconds = 0;
    failed = Message(FailBy({.degrees = {.tensor = 2, .pipeline = 2},
                             .victim = 3,
                             .signal = SIGSTOP,
                             .limit_s = 10,
                             .others_limit_s = 2},
                            &seconds));
    EXPECT_THAT(failed, StartsWith("rank 3 did not answer for "));
  }
  EXPECT_THAT(failed, AnyOf(EndsWith("reported by rank 1"), EndsWith("reported by rank 2")));
}

INSTANTIATE_TEST_SUITE_P(Layouts, RankedProcessTest,
                         testing::Values(Degrees{.tensor = 2}, Degrees{.pipeline = 2},
                                         Degrees{.tensor = 2, .pipeline = 2}),
                         [](const auto& info) {
                           return fmt::format("tp{}pp{}", info.param.tensor, info.param.pipeline);
                         });

// The signal, and the rank that gets it.
class SurvivingProcessTest : public testing::TestWithParam<std::pair<int, int>> {};

// The other ranks' requests end as they should, and so do later ones.
TEST_P(SurvivingProcessTest, TheJobContinuesWithoutTheRank) {
  const auto [signal, victim] = GetParam();
  const Role role = {.degrees = {.data = 3, .expert = 3},
                     .port = comm::FreePort(),
                     .limit_s = signal == SIGSTOP ? 3.0 : 30.0};
  std::vector<pid_t> pids(3, 0);
  for (int rank = 1; rank < 3; ++rank) {
    Role other = role;
    other.rank = rank;
    pids[rank] = Spawn(other);
  }
  {
    Process process(role);
    ASSERT_NE(process.model, nullptr);
    EngineOptions options{.kv_bytes = 8 << 20, .max_sequences = 2, .max_batch_tokens = 64};
    options.job = process.job.get();
    options.layout = process.layout;
    options.rank_time_limit_s = role.limit_s;
    std::vector<int> excluded;
    options.on_excluded_rank = [&](int rank) {
      excluded.push_back(rank);
      kill(pids[rank], SIGKILL);
    };
    auto engine = Engine::Create(*process.model, process.kernels, *process.threads, options);
    ASSERT_TRUE(engine.ok()) << Message(engine.status());
    for (int wave = 0; wave < 3; ++wave) {
      for (int i = 0; i < 3; ++i) {
        Request request;
        request.prompt = {5, 6, 7 + i};
        request.sampling.max_tokens = 20;
        ASSERT_TRUE((*engine)->Add(request).ok());
      }
      int errors = 0, ends = 0;
      for (int step = 0; !(*engine)->idle(); ++step) {
        if (wave == 1 && step == 5) kill(pids[victim], signal);
        std::vector<TokenEvent> events;
        const Status status = (*engine)->Step(&events);
        ASSERT_TRUE(status.ok()) << Message(status);
        for (const TokenEvent& event : events) {
          ends += event.finish != FinishReason::kNone ? 1 : 0;
          errors += event.finish == FinishReason::kError ? 1 : 0;
        }
      }
      EXPECT_EQ(ends, 3);
      EXPECT_LE(errors, wave == 1 ? 1 : 0);
    }
    const EngineStats stats = (*engine)->stats();
    ASSERT_NE(stats.survival, nullptr);
    EXPECT_EQ(stats.survival->alive, 2);
    EXPECT_GT(stats.survival->left_out_experts, 0);
    EXPECT_EQ(excluded, std::vector<int>{victim});
  }
  for (int rank = 1; rank < 3; ++rank) {
    rank == victim ? KillRank(pids[rank]) : ExpectEnded(rank, pids[rank]);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SurvivingProcessTest,
                         testing::Values(std::pair(SIGKILL, 1), std::pair(SIGKILL, 2), std::pair(SIGSTOP, 1),
                                         std::pair(SIGSTOP, 2)),
                         [](const auto& info) {
                           return fmt::format("signal{}rank{}", info.param.first, info.param.second);
                         });

}  // namespace

int RunRole(const char* text) {
  Role role;
  if (std::sscanf(text, "%d %d %d %d %hu %lf", &role.rank, &role.degrees.tensor, &role.degrees.pipeline,
                  &role.degrees.data, &role.port, &role.limit_s) != 6) {
    return 1;
  }
  role.degrees.expert = role.degrees.data;  // replicas divide the experts
  Process process(role);
  if (process.model == nullptr) return 1;
  const Status ended =
      RunRank(*process.model, process.kernels, *process.threads, *process.job, process.layout, role.limit_s);
  return ended.ok() ? 0 : 1;
}

}  // namespace moesaic::engine

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--role") == 0) return moesaic::engine::RunRole(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  setenv("UCX_TLS", "posix,tcp,self", 0);
  return RUN_ALL_TESTS();
}
