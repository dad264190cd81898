#include "proxy/state/state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "proxy/state/layout.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

class StateTest : public testing::Test {
 protected:
  StateTest() : worker_(*state_.RegisterWorker(getpid())) {
    EXPECT_TRUE(state_.Configure(Named({"http://a", "http://b"}), 1).ok());
  }
  static std::vector<InstanceConfig> Named(std::vector<std::string> urls) {
    std::vector<InstanceConfig> configs;
    for (std::string& url : urls) configs.push_back({.url = std::move(url)});
    return configs;
  }
  void ExpectEmpty() {
    ASSERT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
    const Totals totals = state_.ReadTotals();
    EXPECT_EQ(totals.slots_used, 0U);
    EXPECT_EQ(totals.keys_used, 0U);
    for (const uint64_t count : totals.in_stage) EXPECT_EQ(count, 0U);
    for (const InstanceRecord& instance : state_.Instances()) {
      EXPECT_EQ(instance.load.prefill_requests + instance.load.decode_requests + instance.load.references,
                0U);
      EXPECT_EQ(instance.load.prefill_tokens + instance.load.decode_tokens + instance.load.kv_blocks, 0U);
    }
  }

  TestZone zone_;
  State state_{zone_.zone()};
  int worker_;
};

TEST_F(StateTest, AHandleOfAnEndedRequestIsRecognized) {
  const RequestId first = *state_.Begin(worker_, 1);
  EXPECT_TRUE(state_.Finish(first, Outcome::kAborted, 2));
  const RequestId second = *state_.Begin(worker_, 3);
  EXPECT_EQ(second.slot, first.slot);
  EXPECT_FALSE(state_.Finish(first, Outcome::kAborted, 4));
  EXPECT_FALSE(state_.Request(first).has_value());
  EXPECT_TRUE(state_.Request(second).has_value());
  EXPECT_TRUE(state_.Finish(second, Outcome::kAborted, 5));
  ExpectEmpty();
}

TEST_F(StateTest, StagesGoForwardOnly) {
  const RequestId id = *state_.Begin(worker_, 10);
  EXPECT_TRUE(state_.Enter(id, Stage::kPrefixMatched, 20));
  EXPECT_FALSE(state_.Enter(id, Stage::kTokenized, 30));
  EXPECT_FALSE(state_.Enter(id, Stage::kPrefillRunning, 30));
  EXPECT_FALSE(state_.Enter(id, Stage::kDecodeRunning, 30));
  EXPECT_EQ(state_.Request(id)->entered[0], 10);
  EXPECT_EQ(state_.Request(id)->entered[2], 20);
  EXPECT_EQ(state_.ReadTotals().in_stage[2], 1U);
  state_.Finish(id, Outcome::kAborted, 50);
  EXPECT_EQ(state_.stage_histogram(Stage::kPrefixMatched).sum(), 30);
  ExpectEmpty();
}

TEST_F(StateTest, KeysAreReturnedWithTheRequest) {
  const RequestId id = *state_.Begin(worker_, 1);
  std::vector<uint64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i + 1;
  EXPECT_TRUE(state_.SetPrompt(id, {.prompt_tokens = 16'000, .block_size = 16}, keys));
  EXPECT_EQ(state_.Request(id)->num_keys, 1000U);
  EXPECT_TRUE(state_.CheckInvariants().ok());
  EXPECT_TRUE(state_.SetPrompt(id, {.prompt_tokens = 16, .block_size = 16}, std::span(keys).first(1)));
  EXPECT_EQ(state_.Request(id)->num_keys, 1U);
  // More keys than the zone has memory for: the request continues without them.
  const std::vector<uint64_t> many(100'000, 7);
  EXPECT_TRUE(state_.SetPrompt(id, {.prompt_tokens = 5, .block_size = 16}, many));
  EXPECT_EQ(state_.Request(id)->num_keys, 0U);
  EXPECT_EQ(state_.Request(id)->facts.prompt_tokens, 5U);
  EXPECT_EQ(state_.Request(id)->facts.block_size, 0U);
  state_.Finish(id, Outcome::kAborted, 2);
  ExpectEmpty();
}

TEST_F(StateTest, RefusesMoreRequestsThanSlots) {
  std::vector<RequestId> ids;
  for (;;) {
    const auto id = state_.Begin(worker_, 1);
    if (!id.ok()) {
      EXPECT_EQ(id.status().code(), StatusCode::kResourceExhausted);
      break;
    }
    ids.push_back(*id);
  }
  EXPECT_EQ(ids.size(), 256U);
  for (const RequestId id : ids) state_.Finish(id, Outcome::kAborted, 2);
  ExpectEmpty();
}

TEST_F(StateTest, ConfigureKeepsNumbersAndRemovesInstancesThatAreNoLongerNamed) {
  const int a = state_.FindInstance("http://a", 0), b = state_.FindInstance("http://b", 0);
  const auto changed = state_.Configure(Named({"http://b", "http://c"}), 2);
  ASSERT_TRUE(changed.ok());
  EXPECT_EQ(changed->kept, std::vector<int>{b});
  EXPECT_EQ(changed->removed, std::vector<int>{a});
  EXPECT_EQ(state_.FindInstance("http://b", 0), b);
  EXPECT_EQ(state_.FindInstance("http://a", 0), -1);  // without references it is freed at once
  EXPECT_EQ(state_.FindInstance("http://c", 0), a);   // and its entry is used again
  EXPECT_EQ(state_.Instance(a)->generation, 2U);
}

TEST_F(StateTest, OtherSettingsOfAnInstanceHaveAnotherRevision) {
  const int a = state_.FindInstance("http://a", 0);
  const InstanceVersion before = *state_.Version(a);
  std::vector<InstanceConfig> configs = Named({"http://a", "http://b"});
  ASSERT_TRUE(state_.Configure(configs, 2).ok());
  EXPECT_EQ(*state_.Version(a), before);
  configs[0].bootstrap_port = 9000;
  ASSERT_TRUE(state_.Configure(configs, 3).ok());
  const InstanceVersion port = *state_.Version(a);
  EXPECT_EQ(port.generation, before.generation);
  EXPECT_NE(port.revision, before.revision);
  configs[0].dp_ranks = 2;
  ASSERT_TRUE(state_.Configure(configs, 4).ok());
  EXPECT_NE(state_.Version(a)->revision, port.revision);
  EXPECT_EQ(state_.Instance(a)->config, configs[0]);
  EXPECT_FALSE(state_.Version(15).has_value());
}

TEST_F(StateTest, TheOptionDrainStopsAndResumesAnInstance) {
  const int a = state_.FindInstance("http://a", 0), b = state_.FindInstance("http://b", 0);
  std::vector<InstanceConfig> configs = Named({"http://a", "http://b", "http://c"});
  configs[0].drain = configs[2].drain = true;
  ASSERT_TRUE(state_.Configure(configs, 2).ok());
  const int c = state_.FindInstance("http://c", 0);
  EXPECT_EQ(state_.Instance(a)->state, InstanceState::kDraining);
  EXPECT_EQ(state_.Instance(b)->state, InstanceState::kEnabled);
  EXPECT_EQ(state_.Instance(c)->state, InstanceState::kDraining);
  EXPECT_EQ(state_.Instance(a)->config, configs[0]);
  // A state that was set in another way survives a reload without a change of the option.
  ASSERT_TRUE(state_.SetInstanceState(b, InstanceState::kDraining).ok());
  configs[0].drain = false;
  ASSERT_TRUE(state_.Configure(configs, 3).ok());
  EXPECT_EQ(state_.Instance(a)->state, InstanceState::kEnabled);
  EXPECT_EQ(state_.Instance(b)->state, InstanceState::kDraining);
  EXPECT_EQ(state_.Instance(c)->state, InstanceState::kDraining);
}

TEST_F(StateTest, AnAbandonedInstanceLivesUntilItsLastReference) {
  const int a = state_.FindInstance("http://a", 0);
  const RequestId id = *state_.Begin(worker_, 1);
  {
    const StateView view(state_.zone());
    const Locked lock(state_.zone());
    ChargePrefill(view, view.slot(id.slot), a, 100, 20, 1000, 2);
  }
  ASSERT_TRUE(state_.Configure(Named({"http://b"}), 3).ok());
  ASSERT_TRUE(state_.Instance(a).has_value());
  EXPECT_EQ(state_.Instance(a)->state, InstanceState::kAbandoned);
  EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
  state_.Finish(id, Outcome::kCompleted, 4);
  EXPECT_FALSE(state_.Instance(a).has_value());
  ExpectEmpty();
}

TEST_F(StateTest, ConfigureRefusesInvalidAndTooManyInstances) {
  EXPECT_FALSE(state_.Configure(Named({"http://a", "http://a"}), 2).ok());
  EXPECT_FALSE(state_.Configure(Named({""}), 2).ok());
  std::vector<std::string> urls;
  for (int i = 0; i < 17; ++i) urls.push_back(fmt::format("http://{}", i));
  const auto result = state_.Configure(Named(urls), 2);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kResourceExhausted);
  EXPECT_GE(state_.FindInstance("http://a", 0), 0);  // nothing was changed
}

TEST_F(StateTest, TheBreakerOpensLongerWithEachFailure) {
  const BreakerOptions options = {.failures = 2, .open = 100, .max_open = 300};
  state_.RecordFailure(0, 1000, options);
  EXPECT_EQ(state_.Instance(0)->closed_until, 0);
  state_.RecordFailure(0, 1000, options);
  EXPECT_EQ(state_.Instance(0)->closed_until, 1100);
  // Others of the same crash.
  for (int i = 0; i < 10; ++i) state_.RecordFailure(0, 1050, options);
  EXPECT_EQ(state_.Instance(0)->closed_until, 1100);
  state_.RecordFailure(0, 1100, options);
  EXPECT_EQ(state_.Instance(0)->closed_until, 1300);
  for (Nanos now = 1300; now < 20'000; now += 300) {
    state_.RecordFailure(0, now, options);
    EXPECT_EQ(state_.Instance(0)->closed_until, now + 300);
  }
  state_.RecordSuccess(0);
  EXPECT_EQ(state_.Instance(0)->closed_until, 0);
}

TEST_F(StateTest, LongTimesOfTheBreakerDoNotOverflow) {
  const BreakerOptions options = {.failures = 1, .open = 3600 * kSecond, .max_open = 24 * 3600 * kSecond};
  Nanos now = kSecond;
  for (int i = 0; i < 60; ++i) {
    state_.RecordFailure(0, now, options);
    EXPECT_EQ(state_.Instance(0)->closed_until - now,
              std::min<Nanos>(1 << std::min(i, 10), 24) * options.open);
    now = state_.Instance(0)->closed_until;
  }
}

TEST_F(StateTest, OutputIsChargedToTheDecodeInstance) {
  const RequestId id = *state_.Begin(worker_, 100);
  state_.SetPrompt(id, {.prompt_tokens = 30}, {});
  {
    const StateView view(state_.zone());
    const Locked lock(state_.zone());
    ChargeDecode(view, view.slot(id.slot), 1, 30);
  }
  state_.AddOutput(id, 1, 150);
  state_.AddOutput(id, 4, 350);
  const InstanceRecord instance = *state_.Instance(1);
  EXPECT_EQ(instance.load.decode_tokens, 35U);
  EXPECT_EQ(instance.load.kv_blocks, 3U);
  EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
  state_.Finish(id, Outcome::kCompleted, 400);
  EXPECT_EQ(state_.ttft().sum(), 50);
  EXPECT_EQ(state_.tpot().sum(), 50);
  EXPECT_EQ(state_.e2e().sum(), 300);
  ExpectEmpty();
}

TEST(Zone, AttachRefusesOtherMemory) {
  TestZone zone;
  std::vector<char> other(4096);
  EXPECT_EQ(Zone::Attach(other.data(), other.size()).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Zone::Attach(zone.memory(), zone.bytes() - 1).ok());
  zone.zone().At<ZoneHeader>(0)->version += 1;
  const auto attached = Zone::Attach(zone.memory(), zone.bytes());
  ASSERT_FALSE(attached.ok());
  EXPECT_NE(Message(attached.status()).find("version"), std::string::npos);
}

TEST(Zone, WorksAtAnotherAddress) {
  TestZone zone;
  State state(zone.zone());
  const int worker = *state.RegisterWorker(getpid());
  const RequestId id = *state.Begin(worker, 1);
  void* const other =
      mremap(zone.memory(), 0, zone.bytes(), MREMAP_MAYMOVE);  // a second mapping of shared memory
  ASSERT_NE(other, MAP_FAILED);
  State moved(*Zone::Attach(other, zone.bytes()));
  EXPECT_TRUE(moved.Request(id).has_value());
  EXPECT_TRUE(moved.Finish(id, Outcome::kAborted, 2));
  EXPECT_FALSE(state.Request(id).has_value());
  munmap(other, zone.bytes());
}

TEST(Zone, FitUsesTheGivenMemory) {
  for (const size_t bytes : {size_t{8} << 20, size_t{256} << 20, size_t{4} << 30}) {
    const ZoneOptions options = Zone::Fit(bytes, 64, 1024);
    EXPECT_LE(Zone::Bytes(options), bytes);
    EXPECT_GT(Zone::Bytes(options), bytes / 3);
  }
}

TEST(Lease, PassesFromAnEndedOrSilentHolder) {
  Lease lease = {};
  const LeaseOptions options = {.renew = 10, .timeout = 50};
  const int32_t self = getpid(), parent = getppid();
  const auto first = lease.Acquire(self, 100, options);
  ASSERT_TRUE(first.has_value());
  EXPECT_FALSE(lease.Acquire(parent, 110, options).has_value());
  EXPECT_FALSE(lease.Acquire(parent, 140, options).has_value());  // the holder lives
  EXPECT_TRUE(lease.Renew(*first, 140));
  const auto second = lease.Acquire(parent, 191, options);  // it was silent for too long
  ASSERT_TRUE(second.has_value());
  EXPECT_FALSE(lease.Renew(*first, 192));
  EXPECT_FALSE(lease.Holds(*first));
  lease.Release(*first);  // not its lease any more
  EXPECT_TRUE(lease.Holds(*second));
  lease.Release(*second);
  EXPECT_TRUE(lease.Acquire(self, 193, options).has_value());
}

}  // namespace
}  // namespace moesaic::proxy
