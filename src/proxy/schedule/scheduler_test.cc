#include "proxy/schedule/scheduler.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <random>

#include "proxy/index/instance_set.h"
#include "proxy/state/layout.h"
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

TEST_F(SchedulerTest, ExpectedBlocksEndWithoutAnotherRequest) {
  SchedulerOptions options;
  options.speculative_ttl = kSecond;
  Use(Engines(1), "moesaic", options);
  const Zone zone = zone_.zone();
  StateView(zone).instance(0).index_state = static_cast<uint8_t>(IndexState::kExact);
  const std::vector<uint64_t> keys = {1, 2, 3, 4};
  index_.Add(0, Tier::kDevice, std::span(keys).first(2));
  const RequestId id = Submitted({.prompt_tokens = 64}, keys);
  const RunResult placed = Run();
  EXPECT_EQ(placed.next_expiry, now_ + kSecond);
  EXPECT_EQ(index_.Stats().speculative, 2U);  // only those that the instance lacks
  state_.Finish(id, Outcome::kAborted, now_);
  EXPECT_EQ(Run().next_expiry, now_ + kSecond);
  now_ = placed.next_expiry;
  EXPECT_EQ(Run().next_expiry, 0);
  EXPECT_EQ(index_.Tiers(0, 3), 0U);
  EXPECT_EQ(index_.Tiers(0, 2), TierBit(Tier::kDevice));
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

TEST_F(SchedulerTest, ParallelRequestGetsBothInstancesAtOnce) {
  Use(Engines(0, 1, 1));
  const RequestId id = Submitted({.prompt_tokens = 4000, .mode = Mode::kParallel});
  Run();
  EXPECT_GE(state_.Request(id)->prefill_instance, 0);
  EXPECT_GE(state_.Request(id)->decode_instance, 0);
  EXPECT_TRUE(state_.Request(id)->prefill_charged && state_.Request(id)->decode_charged);
  scheduler_->PrefillDone(id, now_);
  EXPECT_EQ(StageOf(id), Stage::kDecodeRunning);
}

TEST_F(SchedulerTest, PrefersTheInstanceWithThePrefixUnlessItsQueueIsLonger) {
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
    EXPECT_EQ(scheduler_->Requeue(id, instance, false, now_), i < 2);
  }
  state_.Finish(id, Outcome::kFailed, now_);
  EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
}

TEST_F(SchedulerTest, ASequentialRetryReturnsToTheQueueThatItNeeds) {
  Use(Engines(0, 2, 2));
  for (const bool keeps : {true, false}) {
    const RequestId id = Submitted({.prompt_tokens = 1000, .mode = Mode::kSequential});
    Run();
    const int prefill = state_.Request(id)->prefill_instance;
    state_.Enter(id, Stage::kPrefillRunning, now_);
    scheduler_->PrefillDone(id, now_ += kMillisecond);
    Run();
    ASSERT_EQ(StageOf(id), Stage::kDecodeScheduled);
    ASSERT_TRUE(scheduler_->Requeue(id, state_.Request(id)->decode_instance, keeps, now_));
    EXPECT_EQ(StageOf(id), keeps ? Stage::kDecodeWaiting : Stage::kPrefillWaiting);
    EXPECT_EQ(state_.Request(id)->prefill_instance, keeps ? prefill : -1);
    state_.Finish(id, Outcome::kFailed, now_);
  }
}

TEST_F(SchedulerTest, ARetryKeepsTheTimeOfItsFirstWait) {
  SchedulerOptions options;
  options.starvation_bound = 10 * kSecond;
  Use(Engines(2), "moesaic", options);
  const RequestId id = Submitted({.prompt_tokens = 100});
  const Nanos queued = now_;
  now_ += kSecond;
  Run();
  state_.Enter(id, Stage::kPrefillRunning, now_ += kSecond);
  scheduler_->PrefillDone(id, now_ += kSecond);
  ASSERT_EQ(StageOf(id), Stage::kDecodeRunning);
  ASSERT_TRUE(scheduler_->Requeue(id, 0, false, now_ += 5 * kSecond));
  const RequestRecord record = *state_.Request(id);
  EXPECT_EQ(record.entered[static_cast<size_t>(Stage::kPrefillWaiting)], queued);
  for (int later = static_cast<int>(Stage::kPrefillScheduled); later < kNumStages; ++later)
    EXPECT_EQ(record.entered[static_cast<size_t>(later)], 0);
  // The histogram has the waits themselves: one second, and none so far.
  const Histogram& waited = state_.stage_histogram(Stage::kPrefillWaiting);
  EXPECT_EQ(waited.sum(), kSecond);
  EXPECT_EQ(state_.stage_histogram(Stage::kDecodeRunning).sum(), 5 * kSecond);
  now_ += kMillisecond;
  Run();
  EXPECT_EQ(StageOf(id), Stage::kPrefillScheduled);
  EXPECT_EQ(waited.sum(), kSecond + kMillisecond);
  Nanos last = 0;
  const RequestRecord again = *state_.Request(id);
  for (const Nanos at : again.entered) {
    if (at == 0) continue;
    EXPECT_GE(at, last);
    last = at;
  }
  state_.Finish(id, Outcome::kFailed, now_);
}

TEST_F(SchedulerTest, StarvedRequestsThatFitNowhereDoNotHideYoungerOnes) {
  Use(Engines(2, 0, 0, {.prefill_tokens = 1000}));
  const RequestId first = Submitted({.prompt_tokens = 600}), second = Submitted({.prompt_tokens = 600});
  Run();
  ASSERT_EQ(StageOf(first), Stage::kPrefillScheduled);
  ASSERT_EQ(StageOf(second), Stage::kPrefillScheduled);
  for (int i = 0; i < 100; ++i) Submitted({.prompt_tokens = 5000});  // these fit an idle instance only
  now_ += kMillisecond;
  const RequestId small = Submitted({.prompt_tokens = 100});
  now_ += 11 * kSecond;
  Run();
  EXPECT_EQ(StageOf(small), Stage::kPrefillScheduled);
}

TEST_F(SchedulerTest, TheGroupWithLessToTransferIsChosenForPrefill) {
  for (const double nanos_per_token : {0.0, 1e6}) {
    auto configs = Engines(0, 2, 2);
    configs[1].group = configs[3].group = 7;
    PolicyOptions policy;
    policy.transfer.nanos_per_token = nanos_per_token;
    Use(configs, "moesaic", {}, policy);
    // P of group 0 has 64 tokens of the prompt, and D of group 7 has 1600.
    std::vector<uint64_t> keys(200);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = 10 + i;
    index_.Add(0, Tier::kDevice, std::span(keys).first(4));
    index_.Add(3, Tier::kDevice, std::span(keys).first(100));
    const RequestId id = Submitted({.prompt_tokens = 3200, .mode = Mode::kSequential}, keys);
    Run();
    EXPECT_EQ(state_.Request(id)->prefill_instance, nanos_per_token == 0 ? 0 : 1);
    state_.Finish(id, Outcome::kAborted, now_);
    state_.lease().Release(lease_);
  }
}

TEST_F(SchedulerTest, DecodeUsesTheReportedSizeOfThePool) {
  Use(Engines(0, 1, 2));
  state_.SetReportedBlocks(1, 100);
  state_.SetReportedBlocks(2, 10'000);
  std::vector<int> chosen;
  for (int i = 0; i < 6; ++i) {
    const RequestId id = Submitted({.prompt_tokens = 1500, .mode = Mode::kSequential});
    now_ += kSecond;
    Run();
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    scheduler_->PrefillDone(id, now_ += kMillisecond);
    Run();
    chosen.push_back(state_.Request(id)->decode_instance);
  }
  EXPECT_GE(std::count(chosen.begin(), chosen.end(), 2), 5);
}

// One prefill instance, 0, and two decode instances, 1 and 2.
class DecodeChoiceTest : public SchedulerTest {
 protected:
  void UsePair(double transfer_nanos_per_token) {
    PolicyOptions policy;
    policy.transfer.nanos_per_token = transfer_nanos_per_token;
    Use(Engines(0, 1, 2), "moesaic", {}, policy);
    for (size_t i = 0; i < keys_.size(); ++i) keys_[i] = 10 + i;
  }
  // Sends a request to the prefill instance and then to a decode instance, on which it stays. Returns the
  // latter.
  int Decode(uint32_t tokens, const std::vector<uint64_t>& keys = {}) {
    const RequestId id = Submitted({.prompt_tokens = tokens, .mode = Mode::kSequential}, keys);
    Run();
    EXPECT_EQ(StageOf(id), Stage::kPrefillScheduled);
    scheduler_->PrefillDone(id, now_ += kSecond);
    Run();
    EXPECT_EQ(StageOf(id), Stage::kDecodeScheduled);
    return state_.Request(id)->decode_instance;
  }
  // The same with the only decode instance that takes requests.
  void DecodeOn(int instance, uint32_t tokens) {
    ASSERT_TRUE(state_.SetInstanceState(3 - instance, InstanceState::kDisabled).ok());
    EXPECT_EQ(Decode(tokens), instance);
    ASSERT_TRUE(state_.SetInstanceState(3 - instance, InstanceState::kEnabled).ok());
  }

  std::vector<uint64_t> keys_ = std::vector<uint64_t>(200);  // of a prompt of 3200 tokens
};

TEST_F(DecodeChoiceTest, FewerTokensCountMoreThanFewerRequests) {
  UsePair(0);
  DecodeOn(2, 100'000);
  DecodeOn(1, 1000);
  DecodeOn(1, 1000);
  EXPECT_EQ(Decode(1000), 1);
}

TEST_F(DecodeChoiceTest, ALoadedInstanceWithThePrefixIsChosenIfTransfersAreSlow) {
  UsePair(1e6);
  DecodeOn(2, 100'000);
  index_.Add(2, Tier::kDevice, std::span(keys_).first(100));
  EXPECT_EQ(Decode(3200, keys_), 2);
}

TEST_F(DecodeChoiceTest, AMatchInADegradedIndexHasLessWeightThanInAnExactIndex) {
  UsePair(1e6);
  const Zone zone = zone_.zone();
  index_.Add(1, Tier::kDevice, std::span(keys_).first(100));
  index_.Add(2, Tier::kDevice, std::span(keys_).first(120));  // 0.8 of them are 96
  StateView(zone).instance(1).index_state = static_cast<uint8_t>(IndexState::kExact);
  for (const IndexState of_the_second : {IndexState::kDegraded, IndexState::kExact}) {
    StateView(zone).instance(2).index_state = static_cast<uint8_t>(of_the_second);
    EXPECT_EQ(Decode(3200, keys_), of_the_second == IndexState::kExact ? 2 : 1);
    index_.Expire(now_ + 1000 * kSecond);
  }
}

TEST_F(DecodeChoiceTest, ALoadedInstanceWithThePrefixIsNotChosenIfTransfersAreFast) {
  UsePair(1);
  DecodeOn(2, 100'000);
  index_.Add(2, Tier::kDevice, std::span(keys_).first(100));
  EXPECT_EQ(Decode(3200, keys_), 1);
}

TEST_F(SchedulerTest, AnIdleRankWaitsForTheStepOfItsPod) {
  auto configs = Engines(3);
  configs[0].pod = configs[1].pod = 1;
  configs[0].dp_ranks = configs[1].dp_ranks = 2;
  configs[2].pod = 2;
  Use(configs);
  ASSERT_TRUE(state_.SetInstanceState(2, InstanceState::kDisabled).ok());
  const RequestId first = Submitted({.prompt_tokens = 50'000});
  Run();
  const int busy = state_.Request(first)->prefill_instance;
  ASSERT_TRUE(state_.SetInstanceState(2, InstanceState::kEnabled).ok());
  const RequestId second = Submitted({.prompt_tokens = 500});
  Run();
  EXPECT_EQ(state_.Request(second)->prefill_instance, 2);  // the other rank would begin later
  ASSERT_TRUE(state_.SetInstanceState(2, InstanceState::kDisabled).ok());
  const RequestId third = Submitted({.prompt_tokens = 500});
  const RunResult held = Run();
  EXPECT_EQ(StageOf(third), Stage::kPrefillWaiting);
  ASSERT_GT(held.next_run, now_);
  now_ = held.next_run;
  Run();
  ASSERT_EQ(StageOf(third), Stage::kPrefillScheduled);
  EXPECT_EQ(state_.Request(third)->prefill_instance, 1 - busy);
}

TEST_F(SchedulerTest, ColdInstancesGetRequestsOfEqualCost) {
  Use(Engines(3));
  std::set<int> used;
  for (int i = 0; i < 3; ++i) {
    const RequestId id = Submitted({.prompt_tokens = 100});
    Run();
    used.insert(state_.Request(id)->prefill_instance);
    state_.Finish(id, Outcome::kCompleted, now_ += kSecond);
  }
  EXPECT_EQ(used.size(), 3U);
}

// A step more on an idle instance costs others nothing, although a shared step costs less in sum.
TEST_F(SchedulerTest, ShortPromptsThatArriveTogetherSpread) {
  Use(Engines(4));
  std::vector<RequestId> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(Submitted({.prompt_tokens = 32}));
  Run();
  std::vector<int> counts(4);
  for (const RequestId id : ids) {
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    ++counts[static_cast<size_t>(state_.Request(id)->prefill_instance)];
  }
  EXPECT_EQ(counts, std::vector<int>({2, 2, 2, 2}));
}

// The index of an instance that lost messages knows less than the instance has: the session counts for more.
TEST_F(SchedulerTest, ASessionOutweighsAPrefixWhenTheIndexIsDegraded) {
  for (const IndexState index : {IndexState::kExact, IndexState::kDegraded}) {
    Use(Engines(2));
    std::vector<uint64_t> keys(200);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = 10 + i;
    const Zone zone = zone_.zone();
    for (int i = 0; i < 2; ++i) StateView(zone).instance(i).index_state = static_cast<uint8_t>(index);
    ASSERT_TRUE(state_.SetInstanceState(0, InstanceState::kDisabled).ok());
    const RequestId before = Submitted({.prompt_tokens = 100, .session = 77ULL << 20});
    Run();
    ASSERT_EQ(state_.Request(before)->prefill_instance, 1);
    state_.Finish(before, Outcome::kCompleted, now_ += kSecond);
    ASSERT_TRUE(state_.SetInstanceState(0, InstanceState::kEnabled).ok());
    index_.Add(0, Tier::kDevice, std::span(keys).first(10));
    const RequestId id = Submitted({.prompt_tokens = 3200, .session = 77ULL << 20}, keys);
    Run();
    EXPECT_EQ(state_.Request(id)->prefill_instance, index == IndexState::kExact ? 0 : 1);
    state_.Finish(id, Outcome::kCompleted, now_ += kSecond);
    index_.Clear(0);
    index_.Clear(1);
    state_.lease().Release(lease_);
  }
}

// The engine may have evicted blocks that an index with gaps still has.
TEST_F(SchedulerTest, AMatchInADegradedIndexHasLessWeightThanInAnExactIndex) {
  Use(Engines(2));
  const Zone zone = zone_.zone();
  std::vector<uint64_t> keys(200);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 10 + i;
  for (int i = 0; i < 2; ++i) index_.Add(i, Tier::kDevice, std::span(keys).first(100));
  const auto choose = [&](IndexState of_the_second) {
    StateView(zone).instance(0).index_state = static_cast<uint8_t>(IndexState::kExact);
    StateView(zone).instance(1).index_state = static_cast<uint8_t>(of_the_second);
    const RequestId id = Submitted({.prompt_tokens = 3200}, keys);
    Run();
    const int chosen = state_.Request(id)->prefill_instance;
    state_.Finish(id, Outcome::kAborted, now_ += kSecond);
    index_.Expire(now_ + 1000 * kSecond);
    return chosen;
  };
  EXPECT_EQ(choose(IndexState::kExact), 0);
  EXPECT_EQ(choose(IndexState::kExact), 1);  // equal: the one that was idle longest
  EXPECT_EQ(choose(IndexState::kExact), 0);
  EXPECT_EQ(choose(IndexState::kDegraded), 0);
  EXPECT_EQ(choose(IndexState::kReplaying), 0);
  index_.Add(1, Tier::kDevice, std::span(keys).first(150));
  EXPECT_EQ(choose(IndexState::kDegraded), 1);  // 0.8 of 150 blocks
  index_.Remove(1, Tier::kDevice, std::span(keys).subspan(120));
  EXPECT_EQ(choose(IndexState::kDegraded), 0);
  EXPECT_EQ(choose(IndexState::kExact), 1);
}

TEST_F(SchedulerTest, RetriesOnTheOnlyInstance) {
  Use(Engines(1));
  const RequestId id = Submitted({.prompt_tokens = 100});
  for (int i = 0; i < 3; ++i) {
    Run();
    ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
    EXPECT_EQ(scheduler_->Requeue(id, 0, false, now_), i < 2);
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
  ASSERT_TRUE(scheduler_->Requeue(id, failed, false, now_));
  Run();
  ASSERT_EQ(StageOf(id), Stage::kPrefillScheduled);
  EXPECT_EQ(state_.Request(id)->prefill_instance, 0);
  EXPECT_NE(state_.Request(id)->decode_instance, failed);
  state_.Finish(id, Outcome::kFailed, now_);
}

TEST_F(SchedulerTest, AStarvedRequestReservesOneInstanceAndNotThePool) {
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

TEST_F(SchedulerTest, UnhealthyClosedAndDrainingInstancesGetNoRequests) {
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

TEST_F(SchedulerTest, LimitsTheQueueAndTheRateOfTenants) {
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

// The first model computes 50,000 tokens in 1.8 s, and 200,000 in 20 s.
TEST_F(SchedulerTest, ShedsRequestsThatCannotMeetTheTarget) {
  PolicyOptions policy;
  policy.slo_ttft = kSecond;
  policy.rejects = true;
  SchedulerOptions options;
  options.starvation_bound = 10 * kSecond;
  Use(Engines(1), "moesaic", options, policy);
  const RequestId large = Submitted({.prompt_tokens = 50'000}), small = Submitted({.prompt_tokens = 100});
  const RunResult result = Run();
  EXPECT_EQ(result.rejected, 1U);
  EXPECT_EQ(result.placed_prefill, 1U);
  EXPECT_EQ(result.waiting_prefill, 0U);
  EXPECT_EQ(result.wake, std::vector<int>{worker_});
  EXPECT_EQ(StageOf(small), Stage::kPrefillScheduled);
  EXPECT_TRUE(state_.Request(large)->rejected);
  EXPECT_FALSE(state_.Request(small)->rejected);
  std::vector<RequestId> scheduled;
  state_.TakeScheduled(worker_, scheduled);
  EXPECT_EQ(scheduled.size(), 2U);  // the worker answers the rejected one
  EXPECT_EQ(Run().rejected, 0U);
  state_.Finish(large, Outcome::kRejected, now_);
  state_.Finish(small, Outcome::kCompleted, now_);
  // A request past the starvation bound is served in any case.
  const RequestId late = Submitted({.prompt_tokens = 100});
  now_ += options.starvation_bound;
  EXPECT_EQ(Run().rejected, 0U);
  EXPECT_EQ(StageOf(late), Stage::kPrefillScheduled);
}

TEST_F(SchedulerTest, ShedsNothingByDefault) {
  PolicyOptions policy;
  policy.slo_ttft = kSecond;
  Use(Engines(1), "moesaic", {}, policy);
  const RequestId large = Submitted({.prompt_tokens = 50'000});
  EXPECT_EQ(Run().rejected, 0U);
  EXPECT_EQ(StageOf(large), Stage::kPrefillScheduled);
}

TEST_F(SchedulerTest, RefusesRequestsWhosePredictedWaitIsTooLong) {
  SchedulerOptions options;
  options.queue_time_limit = 5 * kSecond;
  Use(Engines(1), "moesaic", options);
  const RequestId large = Submitted({.prompt_tokens = 200'000});  // nothing is queued before it
  Run();
  ASSERT_EQ(StageOf(large), Stage::kPrefillScheduled);
  const RequestId id = *state_.Begin(worker_, now_);
  state_.SetPrompt(id, {.prompt_tokens = 100}, {});
  const Admission refused = scheduler_->Submit(id, now_);
  EXPECT_EQ(refused.verdict, Admission::Verdict::kTooSlow);
  const auto wait = static_cast<double>(state_.Instance(0)->load.prefill_work);
  EXPECT_GT(wait, 19.0 * kSecond);
  EXPECT_NEAR(static_cast<double>(refused.retry_after), wait - 5.0 * kSecond, 1e6);
  EXPECT_EQ(scheduler_->Submit(id, now_ + refused.retry_after - 10 * kMillisecond).verdict,
            Admission::Verdict::kTooSlow);
  EXPECT_EQ(scheduler_->Submit(id, now_ + refused.retry_after).verdict, Admission::Verdict::kQueued);
}

TEST_F(SchedulerTest, AFasterInstanceIsPreferredUntilItsQueueIsLonger) {
  auto configs = Engines(2);
  configs[1].weight = 4;
  Use(configs);
  const RequestId large = Submitted({.prompt_tokens = 20'000});  // 0.5 s at weight 1
  Run();
  EXPECT_EQ(state_.Request(large)->prefill_instance, 1);
  EXPECT_LT(state_.Instance(1)->load.prefill_work, 130 * kMillisecond);
  const RequestId small = Submitted({.prompt_tokens = 1000});
  Run();
  EXPECT_EQ(state_.Request(small)->prefill_instance, 0);
}

// Tokens of a tenant's bucket, at the rate of one per second over no time.
TEST_F(SchedulerTest, ChargesTheBucketForTheTokensThatWereUsed) {
  constexpr double kBurst = 1e9;
  Use(Engines(1, 1, 2), "moesaic", {.tenant = {.tokens_per_second = 1e-6, .burst_tokens = kBurst}});
  const auto left = [&](uint64_t tenant) {
    const Zone zone = zone_.zone();  // which the view refers to
    const StateView view(zone);
    for (uint32_t i = 0; i < view.options.max_tenants; ++i) {
      if (view.tenant(i).tenant == tenant) return view.tenant(i).tokens;
    }
    return kBurst;
  };
  std::mt19937 random(11);
  std::map<uint64_t, uint64_t> used;
  struct Running {
    RequestId id;
    uint64_t tenant;
    uint32_t prompt, output = 0;
    bool sent = false;
  };
  std::vector<Running> live;
  std::vector<RequestId> scheduled;
  int ended = 0;
  while (ended < 600) {
    now_ += kMillisecond;
    ASSERT_TRUE(state_.lease().Renew(lease_, now_));
    if (live.size() < 30) {
      Running r;
      r.tenant = 1 + random() % 5;
      r.prompt = 1 + random() % 2000;
      r.id = Submitted({.prompt_tokens = r.prompt,
                        .max_tokens = static_cast<uint32_t>(random() % 3 == 0 ? 0 : random() % 1000),
                        .tenant = r.tenant,
                        .mode = static_cast<Mode>(random() % 3)});
      live.push_back(r);
    }
    scheduler_->Run(lease_, now_);
    state_.TakeScheduled(worker_, scheduled);
    for (size_t i = 0; i < live.size(); ++i) {
      Running& r = live[i];
      const Stage stage = StageOf(r.id);
      bool produces = false;
      if (stage == Stage::kPrefillScheduled || stage == Stage::kDecodeScheduled) {
        if (random() % 5 == 0 && state_.Request(r.id)->retries == 0) {
          ASSERT_TRUE(scheduler_->Requeue(r.id, -1, true, now_));
        } else if (random() % 2 == 0) {
          state_.Enter(
              r.id, stage == Stage::kPrefillScheduled ? Stage::kPrefillRunning : Stage::kDecodeRunning, now_);
          r.sent = true;
        }
      } else if (stage == Stage::kPrefillRunning) {
        if (random() % 3 == 0) scheduler_->PrefillDone(r.id, now_);
      } else if (stage == Stage::kDecodeRunning) {
        produces = true;
        const uint32_t tokens = random() % 50;
        state_.AddOutput(r.id, tokens, now_);
        r.output += tokens;
      }
      if (random() % (produces ? 6 : 20) != 0) continue;
      if (random() % 4 == 0) {  // the engine counted other tokens than the proxy
        r.prompt += 7;
        state_.SetPromptTokens(r.id, r.prompt);
      }
      const auto outcome = static_cast<Outcome>(random() % kNumOutcomes);
      const bool no_work = outcome == Outcome::kFailed || outcome == Outcome::kRejected;
      used[r.tenant] += r.output + (r.output > 0 || (r.sent && !no_work) ? r.prompt : 0);
      ASSERT_TRUE(state_.Finish(r.id, outcome, now_));
      live[i--] = live.back();
      live.pop_back();
      ++ended;
    }
  }
  for (const Running& r : live) {
    state_.Finish(r.id, Outcome::kRejected, now_);
    used[r.tenant] += r.output > 0 ? r.output + r.prompt : 0;
  }
  ASSERT_EQ(used.size(), 5U);
  for (const auto& [tenant, tokens] : used)
    EXPECT_NEAR(kBurst - left(tenant), static_cast<double>(tokens), 0.5);
}

TEST_F(SchedulerTest, LearnsDecodeTimesFromTheTokensOfStreams) {
  Use(Engines(1, 0, 1));
  const LatencyCoefficients truth = {.step_base = 15e6, .per_sequence = 2e5, .per_kv_token = 30};
  const LatencyCoefficients before = scheduler_->Model(0);
  std::mt19937 random(5);
  std::normal_distribution<double> noise(1, 0.05);
  std::vector<RequestId> live;
  for (int step = 0; step < 20'000; ++step) {
    const InstanceLoad load = state_.Instance(0)->load;
    now_ +=
        static_cast<Nanos>(truth.StepNanos(load.decode_requests, static_cast<double>(load.decode_tokens)) *
                           std::max(0.1, noise(random)));
    if (!live.empty() && random() % 40 == 0) {  // a client does not read: the gateway says so
      const RequestId slow = live[random() % live.size()];
      state_.SkipInterval(slow);
      state_.AddOutput(slow, 1, now_ + 10 * kSecond);
      state_.Finish(slow, Outcome::kCompleted, now_ + 10 * kSecond);
      std::erase(live, slow);
    }
    for (const RequestId id : live) state_.AddOutput(id, 1, now_);
    if (live.size() < 64 && random() % 10 == 0) {
      const RequestId id = Submitted({.prompt_tokens = static_cast<uint32_t>(100 + random() % 8000)});
      ASSERT_TRUE(state_.lease().Renew(lease_, now_));
      scheduler_->Run(lease_, now_);
      if (StageOf(id) != Stage::kPrefillScheduled) {
        state_.Finish(id, Outcome::kAborted, now_);
        continue;
      }
      state_.Enter(id, Stage::kPrefillRunning, now_);
      now_ += 100 * kMillisecond;  // the others wait for the prefill
      scheduler_->PrefillDone(id, now_);
      state_.AddOutput(id, 1, now_);
      live.push_back(id);
    } else if (!live.empty() && random() % 12 == 0) {
      state_.Finish(live.front(), Outcome::kCompleted, now_);
      live.erase(live.begin());
    }
  }
  const LatencyCoefficients learned = scheduler_->Model(0);
  for (const auto& [batch, kv] : {std::pair(10.0, 40'000.0), {30.0, 120'000.0}, {60.0, 250'000.0}}) {
    EXPECT_NEAR(learned.StepNanos(batch, kv) / truth.StepNanos(batch, kv), 1, 0.08);
    EXPECT_GT(std::abs(before.StepNanos(batch, kv) / truth.StepNanos(batch, kv) - 1), 0.2);
  }
  for (const RequestId id : live) state_.Finish(id, Outcome::kCompleted, now_);
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

TEST_F(SchedulerTest, AnAbortAtEveryStageReleasesAllResources) {
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

}  // namespace
}  // namespace moesaic::proxy
