#include "proxy/schedule/scheduler.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <random>

#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

class SchedulerTest : public testing::Test {
 protected:
  void Use(const std::vector<InstanceConfig>& instances, std::string_view policy = "moesaic",
           const SchedulerOptions& options = {}, const PolicyOptions& policy_options = {}) {
    ASSERT_TRUE(state_.Configure(instances, 1).ok());
    scheduler_.emplace(state_, BlockIndex(zone_.zone()), *MakePolicy(policy, policy_options), options);
    lease_ = *state_.lease().Acquire(getpid(), now_);
  }
  static std::vector<InstanceConfig> Engines(int both, int prefill = 0, int decode = 0,
                                             InstanceCaps caps = {}) {
    std::vector<InstanceConfig> configs;
    const auto add = [&](int count, Role role, const char* name) {
      for (int i = 0; i < count; ++i)
        configs.push_back({.url = fmt::format("http://{}{}", name, i), .role = role, .caps = caps});
    };
    add(both, Role::kBoth, "b");
    add(prefill, Role::kPrefill, "p");
    add(decode, Role::kDecode, "d");
    return configs;
  }
  RequestId Submitted(PromptFacts facts, const std::vector<uint64_t>& keys = {}) {
    const RequestId id = *state_.Begin(worker_, now_);
    facts.block_size = keys.empty() ? 0 : 16;
    state_.SetPrompt(id, facts, keys);
    state_.Enter(id, Stage::kTokenized, now_);
    EXPECT_EQ(scheduler_->Submit(id, now_).verdict, Admission::Verdict::kQueued);
    return id;
  }
  RunResult Run() {
    const RunResult result = scheduler_->Run(lease_, now_);
    EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
    return result;
  }
  Stage StageOf(RequestId id) { return state_.Request(id)->stage; }

  TestZone zone_;
  State state_{zone_.zone()};
  BlockIndex index_{zone_.zone()};
  int worker_ = *state_.RegisterWorker(getpid());
  std::optional<Scheduler> scheduler_;
  LeaseToken lease_;
  Nanos now_ = kSecond;
};

TEST_F(SchedulerTest, AggregatedRequestPassesItsStages) {
  Use(Engines(2));
  const RequestId id = Submitted({.prompt_tokens = 100});
  const RunResult result = Run();
  EXPECT_EQ(result.placed_prefill, 1U);
  EXPECT_EQ(result.wake, std::vector<int>{worker_});
  std::vector<RequestId> scheduled;
  state_.TakeScheduled(worker_, scheduled);
  ASSERT_EQ(scheduled, std::vector<RequestId>{id});
  EXPECT_FALSE(state_.HasScheduled(worker_));
  EXPECT_EQ(StageOf(id), Stage::kPrefillScheduled);
  state_.Enter(id, Stage::kPrefillRunning, now_);
  EXPECT_TRUE(scheduler_->PrefillDone(id, now_ += kMillisecond));
  EXPECT_EQ(StageOf(id), Stage::kDecodeRunning);
  EXPECT_EQ(state_.Request(id)->decode_instance, state_.Request(id)->prefill_instance);
  state_.AddOutput(id, 1, now_);
  state_.Finish(id, Outcome::kCompleted, now_);
  EXPECT_TRUE(state_.CheckInvariants().ok());
}

TEST_F(SchedulerTest, SequentialRequestGetsADecodeInstanceOfItsGroup) {
  auto configs = Engines(0, 2, 2);
  configs[1].group = configs[3].group = 7;
  Use(configs);
  for (int i = 0; i < 6; ++i) {
    const RequestId id = Submitted({.prompt_tokens = 4000, .mode = Mode::kSequential});
    Run();
    const int prefill = state_.Request(id)->prefill_instance;
    ASSERT_GE(prefill, 0);
    EXPECT_EQ(state_.Request(id)->decode_instance, -1);
    scheduler_->PrefillDone(id, now_ += kMillisecond);
    EXPECT_EQ(StageOf(id), Stage::kDecodeWaiting);
    Run();
    EXPECT_EQ(StageOf(id), Stage::kDecodeScheduled);
    EXPECT_EQ(state_.Instance(state_.Request(id)->decode_instance)->config.group,
              state_.Instance(prefill)->config.group);
  }
}

TEST_F(SchedulerTest, ParallelRequestGetsBothAtOnce) {
  Use(Engines(0, 1, 1));
  const RequestId id = Submitted({.prompt_tokens = 4000, .mode = Mode::kParallel});
  Run();
  EXPECT_GE(state_.Request(id)->prefill_instance, 0);
  EXPECT_GE(state_.Request(id)->decode_instance, 0);
  EXPECT_TRUE(state_.Request(id)->prefill_charged && state_.Request(id)->decode_charged);
  scheduler_->PrefillDone(id, now_);
  EXPECT_EQ(StageOf(id), Stage::kDecodeRunning);
}

TEST_F(SchedulerTest, GoesWhereThePrefixIsUnlessTheQueueThereIsLonger) {
  Use(Engines(2));
  std::vector<uint64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 1000 + i;
  for (const uint64_t key : keys) index_.Add(1, Tier::kDevice, key);
  const RequestId hit = Submitted({.prompt_tokens = 16'016}, keys);
  Run();
  EXPECT_EQ(state_.Request(hit)->prefill_instance, 1);
  EXPECT_EQ(state_.Request(hit)->cached_tokens, 16'000U);
  // Instance 1 gets work of many seconds; the prefix is worth about half a second.
  const std::vector<uint64_t> others = {1};
  ASSERT_TRUE(state_.SetInstanceState(0, InstanceState::kDisabled).ok());
  const RequestId huge = Submitted({.prompt_tokens = 200'000});
  now_ += kSecond;
  scheduler_->PrefillDone(hit, now_);
  Run();
  ASSERT_EQ(state_.Request(huge)->prefill_instance, 1);
  ASSERT_TRUE(state_.SetInstanceState(0, InstanceState::kEnabled).ok());
  const RequestId again = Submitted({.prompt_tokens = 16'016}, keys);
  Run();
  EXPECT_EQ(state_.Request(again)->prefill_instance, 0);
}

TEST_F(SchedulerTest, HoldsARequestUntilTheBestInstanceIsAlmostFree) {
  Use(Engines(1));
  const RequestId first = Submitted({.prompt_tokens = 50'000});
  Run();
  EXPECT_EQ(StageOf(first), Stage::kPrefillScheduled);
  const RequestId second = Submitted({.prompt_tokens = 20'000});
  const RunResult held = Run();
  EXPECT_EQ(StageOf(second), Stage::kPrefillWaiting);
  ASSERT_GT(held.next_run, now_);
  now_ = held.next_run;
  Run();
  EXPECT_EQ(StageOf(second), Stage::kPrefillScheduled);
}

TEST_F(SchedulerTest, SkipsPrefillWhenDecodeHasThePrefix) {
  Use(Engines(0, 1, 2));
  std::vector<uint64_t> keys(100);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 10 + i;
  for (const uint64_t key : keys) index_.Add(2, Tier::kDevice, key);
  const RequestId id = Submitted({.prompt_tokens = 1650, .mode = Mode::kSequential}, keys);
  Run();
  EXPECT_EQ(StageOf(id), Stage::kDecodeScheduled);
  EXPECT_TRUE(state_.Request(id)->prefill_skipped);
  EXPECT_EQ(state_.Request(id)->decode_instance, 2);
  EXPECT_EQ(state_.Request(id)->cached_tokens, 1600U);
}

TEST_F(SchedulerTest, RetriesElsewhereUntilTheRetriesAreUsedUp) {
  Use(Engines(3));
  const RequestId id = Submitted({.prompt_tokens = 100});
  std::set<int> used;
  for (int i = 0; i < 3; ++i) {
    Run();
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    const int instance = state_.Request(id)->prefill_instance;
    EXPECT_TRUE(used.insert(instance).second) << "the same instance again";
    EXPECT_EQ(scheduler_->Requeue(id, instance, now_), i < 2);
  }
  state_.Finish(id, Outcome::kFailed, now_);
  EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
}

TEST_F(SchedulerTest, RetriesOnTheOnlyInstance) {
  Use(Engines(1));
  const RequestId id = Submitted({.prompt_tokens = 100});
  for (int i = 0; i < 3; ++i) {
    Run();
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    EXPECT_EQ(scheduler_->Requeue(id, 0, now_), i < 2);
  }
  state_.Finish(id, Outcome::kFailed, now_);
}

TEST_F(SchedulerTest, AvoidsTheFailedHalfOfAParallelPair) {
  Use(Engines(0, 1, 2));
  const RequestId id = Submitted({.prompt_tokens = 1000, .mode = Mode::kParallel});
  Run();
  ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
  state_.Enter(id, Stage::kPrefillRunning, now_);
  const int failed = state_.Request(id)->decode_instance;
  ASSERT_TRUE(scheduler_->Requeue(id, failed, now_));
  Run();
  ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
  EXPECT_EQ(state_.Request(id)->prefill_instance, 0);
  EXPECT_NE(state_.Request(id)->decode_instance, failed);
  state_.Finish(id, Outcome::kFailed, now_);
}

TEST_F(SchedulerTest, AStarvedRequestKeepsOneInstanceAndNotThePool) {
  Use(Engines(2, 0, 0, {.prefill_tokens = 1000}));
  const RequestId first = Submitted({.prompt_tokens = 600}), second = Submitted({.prompt_tokens = 600});
  Run();
  ASSERT_EQ(StageOf(first), Stage::kPrefillScheduled);
  ASSERT_EQ(StageOf(second), Stage::kPrefillScheduled);
  ASSERT_NE(state_.Request(first)->prefill_instance, state_.Request(second)->prefill_instance);
  const RequestId large = Submitted({.prompt_tokens = 5000});  // fits an idle instance only
  now_ += 11 * kSecond;
  const RequestId small = Submitted({.prompt_tokens = 100});
  Run();
  EXPECT_EQ(StageOf(large), Stage::kPrefillWaiting);
  EXPECT_EQ(StageOf(small), Stage::kPrefillScheduled);
  const int kept = state_.Request(small)->prefill_instance == state_.Request(first)->prefill_instance
                       ? state_.Request(second)->prefill_instance
                       : state_.Request(first)->prefill_instance;
  state_.Finish(state_.Request(first)->prefill_instance == kept ? first : second, Outcome::kCompleted, now_);
  Run();
  EXPECT_EQ(StageOf(large), Stage::kPrefillScheduled);
  EXPECT_EQ(state_.Request(large)->prefill_instance, kept);
}

TEST_F(SchedulerTest, ParallelPairsAvoidGroupsWithoutADecodeInstance) {
  auto configs = Engines(0, 2, 1);
  configs[0].group = 5;  // no decode instance is in it
  configs[1].group = configs[2].group = 7;
  Use(configs);
  for (int i = 0; i < 4; ++i) {
    const RequestId id = Submitted({.prompt_tokens = 1000, .mode = Mode::kParallel});
    now_ += 12 * kSecond;
    Run();
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    EXPECT_EQ(state_.Request(id)->prefill_instance, 1);
    EXPECT_EQ(state_.Request(id)->decode_instance, 2);
    state_.Finish(id, Outcome::kCompleted, now_);
  }
}

TEST_F(SchedulerTest, UnhealthyClosedAndDrainingInstancesGetNothing) {
  Use(Engines(3));
  state_.SetHealthy(0, false);
  for (int i = 0; i < 3; ++i) state_.RecordFailure(1, now_, {.failures = 3, .open = kSecond});
  ASSERT_TRUE(state_.SetInstanceState(2, InstanceState::kDraining).ok());
  const RequestId id = Submitted({.prompt_tokens = 10});
  const RunResult result = Run();
  EXPECT_EQ(StageOf(id), Stage::kPrefillWaiting);
  EXPECT_EQ(result.next_run, now_ + kSecond);  // the breaker closes
  now_ = result.next_run;
  Run();
  EXPECT_EQ(state_.Request(id)->prefill_instance, 1);
}

TEST_F(SchedulerTest, BoundsQueueAndTenants) {
  Use(Engines(1, 0, 0, {.prefill_requests = 1}), "moesaic",
      {.queue_limit = 2, .tenant = {.tokens_per_second = 100, .burst_tokens = 1000}});
  Submitted({.prompt_tokens = 900, .tenant = 5});
  RequestId id = *state_.Begin(worker_, now_);
  state_.SetPrompt(id, {.prompt_tokens = 200, .tenant = 5}, {});
  const Admission limited = scheduler_->Submit(id, now_);
  EXPECT_EQ(limited.verdict, Admission::Verdict::kRateLimited);
  EXPECT_NEAR(static_cast<double>(limited.retry_after), 1.0 * kSecond, 1e6);
  EXPECT_EQ(scheduler_->Submit(id, now_ + limited.retry_after).verdict, Admission::Verdict::kQueued);
  id = *state_.Begin(worker_, now_);
  state_.SetPrompt(id, {.prompt_tokens = 1}, {});
  const Admission full = scheduler_->Submit(id, now_);
  EXPECT_EQ(full.verdict, Admission::Verdict::kQueueFull);
  EXPECT_GT(full.retry_after, 0);
}

TEST_F(SchedulerTest, HigherPriorityGoesFirst) {
  Use(Engines(1, 0, 0, {.prefill_requests = 1}));
  const RequestId low = Submitted({.prompt_tokens = 10});
  const RequestId high = Submitted({.prompt_tokens = 1000, .priority = 1});
  Run();
  EXPECT_EQ(StageOf(high), Stage::kPrefillScheduled);
  EXPECT_EQ(StageOf(low), Stage::kPrefillWaiting);
}

TEST_F(SchedulerTest, ALostLeaseChangesNothing) {
  Use(Engines(1));
  const RequestId id = Submitted({.prompt_tokens = 10});
  ASSERT_TRUE(state_.lease().Acquire(getppid(), now_ + kSecond).has_value());
  EXPECT_TRUE(scheduler_->Run(lease_, now_).lost_lease);
  EXPECT_EQ(StageOf(id), Stage::kPrefillWaiting);
}

TEST_F(SchedulerTest, AnAbortAtEveryStageReleasesEverything) {
  Use(Engines(0, 1, 1));
  for (int stop = 0; stop < 9; ++stop) {
    const RequestId id = *state_.Begin(worker_, now_);
    std::vector<uint64_t> keys(10, 3);
    state_.SetPrompt(id, {.prompt_tokens = 3000, .mode = Mode::kSequential, .block_size = 16}, keys);
    const std::function<void()> steps[] = {[&] { state_.Enter(id, Stage::kTokenized, now_); },
                                           [&] { state_.Enter(id, Stage::kPrefixMatched, now_); },
                                           [&] { scheduler_->Submit(id, now_); },
                                           [&] { Run(); },
                                           [&] { state_.Enter(id, Stage::kPrefillRunning, now_); },
                                           [&] { scheduler_->PrefillDone(id, now_); },
                                           [&] { Run(); },
                                           [&] { state_.Enter(id, Stage::kDecodeRunning, now_); }};
    for (int i = 0; i < stop; ++i) steps[i]();
    EXPECT_EQ(StageOf(id), static_cast<Stage>(stop));
    EXPECT_TRUE(state_.Finish(id, Outcome::kAborted, now_));
    EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
    EXPECT_EQ(state_.ReadTotals().slots_used, 0U);
    EXPECT_EQ(state_.ReadTotals().keys_used, 0U);
    for (const InstanceRecord& instance : state_.Instances()) EXPECT_EQ(instance.load.references, 0U);
  }
}

// --- Properties over random arrivals, for every policy ---

class PolicyTest : public testing::TestWithParam<std::string_view> {};

TEST_P(PolicyTest, HoldsCapsAndTheStarvationBound) {
  for (const bool disaggregated : {false, true}) {
    TestZone zone;
    State state(zone.zone());
    const int worker = *state.RegisterWorker(getpid());
    const InstanceCaps caps = {
        .prefill_requests = 2, .prefill_tokens = 6000, .decode_requests = 6, .kv_blocks = 1500};
    std::vector<InstanceConfig> configs;
    for (int i = 0; i < 6; ++i) {
      configs.push_back({.url = fmt::format("http://{}", i),
                         .role = !disaggregated ? Role::kBoth : (i < 3 ? Role::kPrefill : Role::kDecode),
                         .caps = caps});
    }
    ASSERT_TRUE(state.Configure(configs, 1).ok());
    SchedulerOptions options;
    options.starvation_bound = kSecond;
    PolicyOptions policy_options;
    policy_options.slo_ttft = kSecond / 2;
    Scheduler scheduler(state, BlockIndex(zone.zone()), *MakePolicy(GetParam(), policy_options), options);
    const LeaseToken lease = *state.lease().Acquire(getpid(), 1);
    std::mt19937 random(42);
    std::vector<RequestId> live, scheduled;
    Nanos now = kSecond;
    for (int round = 0; round < 1500; ++round) {
      now += static_cast<Nanos>(random() % 40) * kMillisecond;
      ASSERT_TRUE(state.lease().Renew(lease, now));
      if (live.size() < 60 && random() % 3 != 0) {
        const RequestId id = *state.Begin(worker, now);
        // Some prompts are larger than a cap: they must be served as well.
        const auto tokens =
            static_cast<uint32_t>(random() % 10 == 0 ? 3000 + random() % 6000 : 1 + random() % 1500);
        state.SetPrompt(
            id, {.prompt_tokens = tokens, .mode = disaggregated ? Mode::kSequential : Mode::kAggregated}, {});
        ASSERT_EQ(scheduler.Submit(id, now).verdict, Admission::Verdict::kQueued);
        live.push_back(id);
      }
      scheduler.Run(lease, now);
      state.TakeScheduled(worker, scheduled);
      const bool holds = GetParam() == "moesaic";
      const auto instances = state.Instances();
      bool idle_prefill = false;
      for (const InstanceRecord& instance : instances) {
        idle_prefill |= instance.config.role != Role::kDecode && instance.load.prefill_requests == 0 &&
                        (instance.config.role == Role::kPrefill || instance.load.decode_requests == 0);
        if (!holds) continue;
        EXPECT_LE(instance.load.prefill_requests, caps.prefill_requests);
        EXPECT_LE(instance.load.decode_requests, caps.decode_requests);
        if (instance.load.prefill_requests > 1) {
          EXPECT_LE(instance.load.prefill_tokens, caps.prefill_tokens);
        }
        if (instance.load.decode_requests > 1) {
          EXPECT_LE(instance.load.kv_blocks, caps.kv_blocks);
        }
      }
      state.ForEachRequest([&](const RequestRecord& record) {
        if (record.stage != Stage::kPrefillWaiting) return;
        const Nanos waiting = now - record.entered[static_cast<size_t>(Stage::kPrefillWaiting)];
        EXPECT_FALSE(waiting > options.starvation_bound && idle_prefill) << "an instance is idle";
        EXPECT_TRUE(holds) << "only a policy with a queue keeps requests";
      });
      for (size_t i = 0; i < live.size(); ++i) {
        const auto record = state.Request(live[i]);
        bool ended = false;
        if (record->stage == Stage::kPrefillScheduled && random() % 3 == 0) {
          scheduler.PrefillDone(live[i], now);
        } else if (record->stage == Stage::kDecodeScheduled || record->stage == Stage::kDecodeRunning) {
          ended = random() % 6 == 0;
        }
        if (!ended) continue;
        state.Finish(live[i], Outcome::kCompleted, now);
        live[i--] = live.back();
        live.pop_back();
      }
      if (round % 50 == 0) {
        ASSERT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
      }
    }
    EXPECT_GT(state.ReadTotals().outcomes[0], 200U);
    for (const RequestId id : live) state.Finish(id, Outcome::kAborted, now);
    EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
    EXPECT_EQ(state.ReadTotals().slots_used, 0U);
  }
}
INSTANTIATE_TEST_SUITE_P(All, PolicyTest, testing::ValuesIn(PolicyNames().begin(), PolicyNames().end()),
                         [](const auto& info) {
                           std::string name(info.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(MakePolicy, NamesTheKnownOnes) {
  const auto policy = MakePolicy("best", {});
  ASSERT_FALSE(policy.ok());
  EXPECT_NE(Message(policy.status()).find("omni-earliest-batch"), std::string::npos);
}

TEST(LatencyModel, LearnsCoefficientsFromNoisySamples) {
  LatencyModel model;
  model.Init({.base = 1e6, .per_token = 1e3, .per_pair = 0.01});
  const LatencyCoefficients truth = {.base = 20e6,
                                     .per_token = 15e3,
                                     .per_pair = 0.4,
                                     .step_base = 6e6,
                                     .per_sequence = 40e3,
                                     .per_kv_token = 10};
  std::mt19937 random(3);
  std::normal_distribution<double> noise(1, 0.03);
  for (int i = 0; i < 2000; ++i) {
    const double fresh = 100 + random() % 16'000, cached = random() % 3 == 0 ? random() % 50'000 : 0;
    model.ObservePrefill(fresh, LatencyCoefficients::Pairs(fresh, cached),
                         static_cast<Nanos>(truth.PrefillNanos(fresh, cached) * noise(random)), 1);
    const double batch = 1 + random() % 100, kv = batch * (500 + random() % 4000);
    model.ObserveStep(batch, kv, static_cast<Nanos>(truth.StepNanos(batch, kv) * noise(random)), 1);
  }
  for (const double fresh : {500.0, 4000.0, 16'000.0}) {
    EXPECT_NEAR(model.coefficients.PrefillNanos(fresh, 10'000) / truth.PrefillNanos(fresh, 10'000), 1, 0.1);
  }
  EXPECT_NEAR(model.coefficients.StepNanos(64, 150'000) / truth.StepNanos(64, 150'000), 1, 0.1);
}

}  // namespace
}  // namespace moesaic::proxy
