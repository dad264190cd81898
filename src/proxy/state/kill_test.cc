// Workers are killed at random points of their work; the state must be whole afterwards.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "proxy/index/keys.h"
#include "proxy/schedule/scheduler.h"
#include "proxy/state/layout.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

Nanos MonotonicNow() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

void Sleep(Nanos time) {
  const timespec wait = {time / kSecond, time % kSecond};
  nanosleep(&wait, nullptr);
}

// A worker process: takes requests through all stages, aborts some at each stage, and schedules when it is
// the master.
[[noreturn]] void Work(const Zone& zone, unsigned seed) {
  State state(zone);
  BlockIndex index(zone);
  const KeyMaker keys(zone);
  PolicyOptions policy;
  policy.slo_ttft = kSecond;
  Scheduler scheduler(state, index, *MakePolicy("moesaic", policy), {});
  const auto worker = state.RegisterWorker(getpid());
  if (!worker.ok()) _exit(3);
  std::mt19937 random(seed);
  std::vector<RequestId> live, scheduled;
  std::vector<uint64_t> block_keys;
  for (;;) {
    const Nanos now = MonotonicNow();
    if (live.size() < 12) {
      const auto id = state.Begin(*worker, now);
      if (id.ok()) {
        live.push_back(*id);
        std::vector<int32_t> tokens(16 * (1 + random() % 40), static_cast<int32_t>(random() % 4));
        block_keys.clear();
        keys.Append(tokens, {}, 16, block_keys);
        const auto mode = static_cast<Mode>(random() % 2);
        state.SetPrompt(*id,
                        {.prompt_tokens = static_cast<uint32_t>(tokens.size()),
                         .session = random() % 3,
                         .mode = mode,
                         .block_size = 16},
                        block_keys);
        state.Enter(*id, Stage::kTokenized, now);
        state.Enter(*id, Stage::kPrefixMatched, now);
        scheduler.Submit(*id, now);
      }
    }
    if (const auto token = state.lease().Acquire(getpid(), now)) {
      state.ReclaimDeadWorkers(now);
      scheduler.Run(*token, now);
    }
    scheduled.clear();
    state.TakeScheduled(*worker, scheduled);
    for (size_t i = 0; i < live.size(); ++i) {
      const RequestId id = live[i];
      bool ended = random() % 16 == 0 && state.Finish(id, Outcome::kAborted, now);
      const auto record = state.Request(id);
      if (!record) {
        ended = true;
      } else if (record->stage == Stage::kPrefillScheduled) {
        state.Enter(id, Stage::kPrefillRunning, now);
      } else if (record->stage == Stage::kPrefillRunning) {
        random() % 8 == 0 ? scheduler.Requeue(id, record->prefill_instance, random() % 2 == 0, now)
                          : scheduler.PrefillDone(id, now);
      } else if (record->stage == Stage::kDecodeScheduled) {
        state.Enter(id, Stage::kDecodeRunning, now);
      } else if (record->stage == Stage::kDecodeRunning) {
        state.AddOutput(id, 1 + random() % 3, now);
        if (random() % 4 == 0) ended = state.Finish(id, Outcome::kCompleted, now);
      }
      if (ended) {
        live[i] = live.back();
        live.pop_back();
        --i;
      }
    }
  }
}

class Workers {
 public:
  explicit Workers(Zone zone) : zone_(zone) {}
  ~Workers() { KillAll(); }

  void Start(unsigned seed) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) Work(zone_, seed);
    pids_.push_back(pid);
  }
  void Kill(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    std::erase(pids_, pid);
  }
  void KillAll() {
    while (!pids_.empty()) Kill(pids_.back());
  }
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  Zone zone_;
  std::vector<pid_t> pids_;
};

std::vector<InstanceConfig> FourInstances() {
  std::vector<InstanceConfig> configs;
  for (int i = 0; i < 4; ++i) {
    configs.push_back({.url = fmt::format("http://{}", i),
                       .role = i < 2 ? Role::kBoth : (i == 2 ? Role::kPrefill : Role::kDecode),
                       .caps = {.prefill_requests = 4, .decode_requests = 16}});
  }
  return configs;
}

TEST(Kill, TheStateSurvivesFiftyKilledWorkers) {
  TestZone memory;
  const Zone zone = memory.zone();
  State state(zone);
  ASSERT_TRUE(state.Configure(FourInstances(), 1).ok());
  Workers workers(zone);
  for (unsigned i = 0; i < 3; ++i) workers.Start(i);
  std::mt19937 random(7);
  std::vector<Nanos> take_overs;
  for (unsigned round = 0; round < 50; ++round) {
    Sleep(kMillisecond + static_cast<Nanos>(random() % 8000) * kMicrosecond);
    const int32_t master = state.lease().holder();
    const auto& pids = workers.pids();
    const bool kill_master = round % 2 == 0 && std::find(pids.begin(), pids.end(), master) != pids.end();
    const uint32_t tenure = state.lease().tenure();
    const pid_t victim = kill_master ? master : pids[random() % pids.size()];
    const Nanos killed = MonotonicNow();
    workers.Kill(victim);
    if (victim == master) {
      // A survivor takes over; the limit is generous for a machine under load and the times are printed.
      while (state.lease().tenure() == tenure && MonotonicNow() - killed < 60 * kSecond)
        Sleep(kMillisecond / 4);
      ASSERT_NE(state.lease().tenure(), tenure) << "round " << round;
      take_overs.push_back(MonotonicNow() - killed);
    }
    workers.Start(100 + round);
    ASSERT_TRUE(state.CheckInvariants().ok()) << "round " << round << ": " << state.CheckInvariants();
  }
  workers.KillAll();
  state.ReclaimDeadWorkers(MonotonicNow());
  ASSERT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
  const Totals totals = state.ReadTotals();
  EXPECT_EQ(totals.slots_used, 0U);
  EXPECT_EQ(totals.keys_used, 0U);
  for (const uint64_t count : totals.in_stage) EXPECT_EQ(count, 0U);
  for (const InstanceRecord& instance : state.Instances()) {
    EXPECT_EQ(instance.load.references, 0U);
    EXPECT_EQ(instance.load.prefill_work, 0);
    EXPECT_EQ(instance.load.kv_blocks, 0U);
  }
  EXPECT_GT(totals.outcomes[static_cast<size_t>(Outcome::kCompleted)], 50U);
  EXPECT_GT(totals.outcomes[static_cast<size_t>(Outcome::kLost)], 0U);
  ASSERT_FALSE(take_overs.empty());
  std::sort(take_overs.begin(), take_overs.end());
  std::printf("%zu take-overs: median %.1f ms, longest %.1f ms; %llu repairs, %llu reclaimed requests\n",
              take_overs.size(), take_overs[take_overs.size() / 2] * 1e-6, take_overs.back() * 1e-6,
              static_cast<unsigned long long>(totals.repairs),
              static_cast<unsigned long long>(totals.reclaimed));
}

// The master is killed with requests of its own in five stages, and is a zombie as long as its parent does
// not wait for it. The clock of the test says when the others ask for the lease.
TEST(Kill, TheLeaseIsTakenWithin100MsAndAllSlotsAreFreed) {
  TestZone memory;
  State state(memory.zone());
  ASSERT_TRUE(state.Configure(FourInstances(), 1).ok());
  constexpr Nanos kRenewed = 1000 * kSecond;
  const pid_t master = fork();
  ASSERT_GE(master, 0);
  if (master == 0) {
    Scheduler scheduler(state, BlockIndex(memory.zone()), *MakePolicy("round-robin", {}), {});
    const int worker = state.RegisterWorker(getpid()).value_or(-1);
    const auto lease = state.lease().Acquire(getpid(), kRenewed);
    if (!lease) _exit(3);
    for (int i = 0; i < 40; ++i) {
      const RequestId id = *state.Begin(worker, kRenewed);
      state.SetPrompt(id, {.prompt_tokens = 100, .mode = static_cast<Mode>(i % 3), .block_size = 16},
                      std::vector<uint64_t>(6, static_cast<uint64_t>(i)));
      if (i % 5 == 0) continue;  // received
      scheduler.Submit(id, kRenewed);
      if (i % 5 == 1) continue;  // waiting or scheduled
      scheduler.Run(*lease, kRenewed);
      if (i % 5 == 2) continue;
      state.Enter(id, Stage::kPrefillRunning, kRenewed);
      if (i % 5 == 4) scheduler.PrefillDone(id, kRenewed);
    }
    for (;;) pause();
  }
  const Nanos patience = MonotonicNow() + 60 * kSecond;
  while (state.ReadTotals().entered[static_cast<size_t>(Stage::kReceived)] < 40 && MonotonicNow() < patience)
    Sleep(kMillisecond);
  EXPECT_FALSE(state.lease().Acquire(getpid(), kRenewed + 50 * kMillisecond).has_value())
      << "the master lives";
  kill(master, SIGKILL);
  while (ProcessLives(master) && MonotonicNow() < patience) Sleep(kMillisecond);
  Nanos now = kRenewed;
  while (!state.lease().Acquire(getpid(), now) && now < kRenewed + kSecond) now += kMillisecond;
  EXPECT_EQ(state.lease().holder(), getpid());
  EXPECT_LT(now - kRenewed, 100 * kMillisecond);
  EXPECT_EQ(state.ReclaimDeadWorkers(now), 40);
  const Totals totals = state.ReadTotals();
  EXPECT_EQ(totals.slots_used, 0U);
  EXPECT_EQ(totals.keys_used, 0U);
  EXPECT_EQ(totals.outcomes[static_cast<size_t>(Outcome::kLost)], 40U);
  for (const uint64_t count : totals.in_stage) EXPECT_EQ(count, 0U);
  for (const InstanceRecord& instance : state.Instances()) {
    EXPECT_EQ(instance.load.references, 0U);
    EXPECT_EQ(instance.load.prefill_tokens + instance.load.decode_tokens + instance.load.kv_blocks, 0U);
  }
  EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
  waitpid(master, nullptr, 0);
}

// Every single store of an operation may be the last one of its process: a counter that is wrong is computed
// again.
TEST(Kill, RepairComputesAllCountersFromTheSlots) {
  TestZone memory;
  State state(memory.zone());
  ASSERT_TRUE(state.Configure(FourInstances(), 1).ok());
  const int worker = *state.RegisterWorker(getpid());
  std::vector<RequestId> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(*state.Begin(worker, 1));
    state.SetPrompt(ids.back(), {.prompt_tokens = 64, .block_size = 16}, std::vector<uint64_t>(300, 5));
  }
  const StateView view(state.zone());
  {
    const Locked lock(state.zone());
    ChargePrefill(view, view.slot(ids[0].slot), 0, 60, 4, 1000, 2);
    ChargeDecode(view, view.slot(ids[1].slot), 1, 64);
    MoveTo(view, ids[2].slot, Stage::kPrefillWaiting, 3);
    // Damage everything that is derived.
    view.instance(0).load = {};
    view.instance(1).load.kv_blocks = 77;
    view.s.in_stage.fill(9);
    view.s.free_slot = kNone;
    view.s.free_chunk = 3;
    view.s.slots_used = 0;
    view.waiting_prefill()[0].store(0);
    view.worker(worker).requests = 1;
  }
  EXPECT_FALSE(state.CheckInvariants().ok());
  Repair(state.zone());
  EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
  for (const RequestId id : ids) EXPECT_TRUE(state.Finish(id, Outcome::kAborted, 4));
  EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
  EXPECT_EQ(state.ReadTotals().slots_used, 0U);
}

// A child dies while it holds the lock, in the middle of a change.
TEST(Kill, ALockWhoseOwnerDiedIsRepaired) {
  TestZone memory;
  State state(memory.zone());
  ASSERT_TRUE(state.Configure(FourInstances(), 1).ok());
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    const Zone zone = memory.zone();
    const StateView view(zone);
    const Locked lock(memory.zone());
    view.s.in_stage[3] = 42;
    view.instance(0).load.prefill_requests = 7;
    _exit(0);  // without unlocking
  }
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(state.ReadTotals().in_stage[3], 0U);
  EXPECT_EQ(state.ReadTotals().repairs, 1U);
  EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
}

}  // namespace
}  // namespace moesaic::proxy
