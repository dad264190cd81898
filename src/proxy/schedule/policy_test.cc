#include "proxy/schedule/policy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "proxy/schedule/scheduler.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

// --- Properties over random arrivals, for every policy ---

InstanceView ViewOf(const InstanceRecord& record) {
  InstanceView view;
  view.role = record.config.role;
  view.block_size = record.config.block_size;
  view.caps = record.config.caps;
  view.load = record.load;
  return view;
}

// Requests that wait past the bound although instances have room for them. An older request that is past the
// bound and fits nowhere may keep one instance for itself.
int StarvedWithAFreeSlot(const State& state, Nanos now, Nanos bound) {
  std::vector<InstanceView> instances;
  for (const InstanceRecord& record : state.Instances()) instances.push_back(ViewOf(record));
  int violations = 0;
  for (const Stage stage : {Stage::kPrefillWaiting, Stage::kDecodeWaiting}) {
    std::vector<RequestRecord> starved;
    state.ForEachRequest([&](const RequestRecord& r) {
      if (r.stage == stage && now - r.entered[static_cast<size_t>(stage)] >= bound) starved.push_back(r);
    });
    std::stable_sort(starved.begin(), starved.end(), [&](const auto& a, const auto& b) {
      return a.entered[static_cast<size_t>(stage)] < b.entered[static_cast<size_t>(stage)];
    });
    for (size_t older = 0; older < starved.size(); ++older) {
      const RequestRecord& r = starved[older];
      const uint32_t tokens = r.facts.prompt_tokens;
      const auto decode_rooms =
          static_cast<size_t>(std::count_if(instances.begin(), instances.end(), [&](const InstanceView& v) {
            return v.role != Role::kPrefill && v.DecodeRoom(tokens + r.output_tokens);
          }));
      auto rooms =
          static_cast<size_t>(std::count_if(instances.begin(), instances.end(), [&](const InstanceView& v) {
            return v.role != Role::kDecode && v.PrefillRoom(tokens) &&
                   (v.role == Role::kPrefill || v.DecodeRoom(tokens));
          }));
      if (stage == Stage::kDecodeWaiting) rooms = decode_rooms;
      if (r.facts.mode == Mode::kParallel) rooms = std::min(rooms, decode_rooms);
      violations += rooms > older;
    }
  }
  return violations;
}

struct RandomRun {
  int starved = 0, most_waiting = 0;
  uint64_t completed = 0;
};

// Random arrivals on six small instances, which cannot serve all of them at once; the caps and the counters
// are checked after each run of the scheduler. Requests past `bound` are counted, which may differ from the
// bound of the scheduler.
void RunRandomly(std::string_view policy, Mode mode, Nanos scheduler_bound, Nanos bound, RandomRun& run) {
  TestZone zone;
  State state(zone.zone());
  const int worker = *state.RegisterWorker(getpid());
  const InstanceCaps caps = {
      .prefill_requests = 2, .prefill_tokens = 6000, .decode_requests = 6, .kv_blocks = 1500};
  std::vector<InstanceConfig> configs;
  for (int i = 0; i < 6; ++i) {
    configs.push_back(
        {.url = fmt::format("http://{}", i),
         .role = mode == Mode::kAggregated ? Role::kBoth : (i < 3 ? Role::kPrefill : Role::kDecode),
         .caps = caps});
  }
  ASSERT_TRUE(state.Configure(configs, 1).ok());
  SchedulerOptions options;
  options.starvation_bound = scheduler_bound;
  PolicyOptions policy_options;
  policy_options.slo_ttft = kSecond / 2;
  Scheduler scheduler(state, BlockIndex(zone.zone()), *MakePolicy(policy, policy_options), options);
  const LeaseToken lease = *state.lease().Acquire(getpid(), 1);
  const bool holds = scheduler.policy().HoldsCaps();
  std::mt19937 random(42);
  std::vector<RequestId> live, scheduled;
  Nanos now = kSecond;
  for (int round = 0; round < 1500; ++round) {
    now += static_cast<Nanos>(random() % 40) * kMillisecond;
    ASSERT_TRUE(state.lease().Renew(lease, now));
    for (auto arrivals = random() % 7; arrivals > 0 && live.size() < 60; --arrivals) {
      const RequestId id = *state.Begin(worker, now);
      // Some prompts are larger than a cap: they must be served as well.
      const auto tokens =
          static_cast<uint32_t>(random() % 10 == 0 ? 3000 + random() % 6000 : 1 + random() % 1500);
      state.SetPrompt(id, {.prompt_tokens = tokens, .mode = mode}, {});
      ASSERT_EQ(scheduler.Submit(id, now).verdict, Admission::Verdict::kQueued);
      live.push_back(id);
    }
    const RunResult result = scheduler.Run(lease, now);
    state.TakeScheduled(worker, scheduled);
    run.starved += StarvedWithAFreeSlot(state, now, bound);
    run.most_waiting = std::max(run.most_waiting, static_cast<int>(result.waiting_prefill));
    for (const InstanceRecord& instance : state.Instances()) {
      if (!holds) break;
      EXPECT_LE(instance.load.prefill_requests, caps.prefill_requests);
      EXPECT_LE(instance.load.decode_requests, caps.decode_requests);
      if (instance.load.prefill_requests > 1) {
        EXPECT_LE(instance.load.prefill_tokens, caps.prefill_tokens);
      }
      if (instance.load.decode_requests > 1) {
        EXPECT_LE(instance.load.kv_blocks, caps.kv_blocks);
      }
    }
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
  run.completed = state.ReadTotals().outcomes[0];
  for (const RequestId id : live) state.Finish(id, Outcome::kAborted, now);
  EXPECT_TRUE(state.CheckInvariants().ok()) << state.CheckInvariants();
  EXPECT_EQ(state.ReadTotals().slots_used, 0U);
}

// Shorter than a prefill, so that the policy holds requests beyond it.
constexpr Nanos kBound = 10 * kMillisecond;

class PolicyTest : public testing::TestWithParam<std::string_view> {};

TEST_P(PolicyTest, HoldsCapsAndTheStarvationBound) {
  for (const Mode mode : {Mode::kAggregated, Mode::kSequential, Mode::kParallel}) {
    RandomRun run;
    RunRandomly(GetParam(), mode, kBound, kBound, run);
    EXPECT_EQ(run.starved, 0);
    EXPECT_GT(run.completed, 200U);
    // Only a policy with a queue keeps requests.
    EXPECT_EQ(run.most_waiting > 0, GetParam() == "moesaic");
  }
}
INSTANTIATE_TEST_SUITE_P(All, PolicyTest, testing::ValuesIn(PolicyNames().begin(), PolicyNames().end()),
                         [](const auto& info) {
                           std::string name(info.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The check of the bound finds requests that starve when the scheduler has a later one.
TEST(StarvationBound, TheCheckDetectsALaterBound) {
  for (const Mode mode : {Mode::kAggregated, Mode::kSequential, Mode::kParallel}) {
    RandomRun run;
    RunRandomly("moesaic", mode, 3600 * kSecond, kBound, run);
    EXPECT_GT(run.starved, 0);
  }
}

// --- The order of the queue of policy `moesaic` ---

using Order = std::vector<uint32_t>;

struct QueuedRequest {
  uint32_t number;
  int work_ms;  // predicted
  int age_ms;   // since it was received and queued
};

// Returns the numbers of the requests in the order in which the policy places them.
Order OrderOf(Nanos slo_ttft, int engines, const std::vector<QueuedRequest>& requests) {
  PolicyOptions options;
  options.slo_ttft = slo_ttft;
  const std::unique_ptr<Policy> policy = *MakePolicy("moesaic", options);
  const Nanos now = 100 * kSecond;
  std::vector<RequestView> queue;
  for (const QueuedRequest& request : requests) {
    RequestView view;
    view.id = {.slot = request.number, .generation = 1};
    view.work = request.work_ms * kMillisecond;
    view.waiting = request.age_ms * kMillisecond;
    view.received = now - view.waiting;
    queue.push_back(view);
  }
  policy->OrderPrefill(queue, engines, now);
  Order order;
  for (const RequestView& view : queue) order.push_back(view.id.slot);
  return order;
}

TEST(QueueOrder, WithoutATargetShortAndOldRequestsComeFirst) {
  EXPECT_EQ(OrderOf(0, 1, {{1, 3000, 1000}, {2, 1000, 1000}, {3, 2000, 1000}}), (Order{2, 3, 1}));
  EXPECT_EQ(OrderOf(0, 1, {{1, 1000, 100}, {2, 1000, 300}, {3, 1000, 200}}), (Order{2, 3, 1}));
  // Age counts for a fifth: the oldest passes one that is a tenth shorter, and not the shortest.
  EXPECT_EQ(OrderOf(0, 1, {{1, 1000, 9000}, {2, 900, 0}, {3, 100, 0}}), (Order{3, 1, 2}));
}

TEST(QueueOrder, WithATargetTheEarliestDeadlineComesFirst) {
  EXPECT_EQ(OrderOf(kSecond, 1, {{1, 100, 500}, {2, 50, 900}, {3, 10, 0}}), (Order{2, 1, 3}));
}

TEST(QueueOrder, TheLongestRequestWaitsWhenNotAllCanMeetTheTarget) {
  const std::vector<QueuedRequest> requests = {{1, 800, 100}, {2, 150, 0}, {3, 150, 0}};
  EXPECT_EQ(OrderOf(kSecond, 1, requests), (Order{2, 3, 1}));  // 1.1 s of work until the last deadline
  EXPECT_EQ(OrderOf(kSecond, 2, requests), (Order{1, 2, 3}));
}

TEST(QueueOrder, RequestsThatAreLateComeLastAndTheShortestOfThemFirst) {
  EXPECT_EQ(OrderOf(kSecond, 1, {{1, 600, 2000}, {2, 300, 3000}, {3, 100, 0}}), (Order{3, 2, 1}));
}

TEST(MakePolicy, ErrorNamesTheKnownPolicies) {
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
