// Choices of the policies of other routers on small fleets, against costs that the comments compute by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "proxy/schedule/policy.h"

namespace moesaic::proxy {
namespace {

using testing::ElementsAre;

// An engine for prefill or decode. Those of a test have the ids 0, 1, ... in their order.
struct Engine {
  uint32_t requests = 0;
  uint64_t tokens = 0;
  uint32_t matched = 0;  // tokens of the prompt, in device memory
  uint64_t kv_blocks = 0;
  Nanos work = 0;  // of prefills that begin now
  double weight = 1;
  uint32_t matched_in_ram = 0;  // tokens of the prompt beyond `matched`
};

constexpr LatencyCoefficients kModel = {.base = 10e6,
                                        .per_token = 10e3,
                                        .per_pair = 0,
                                        .step_base = 5e6,
                                        .per_sequence = 50e3,
                                        .per_kv_token = 10};
constexpr Nanos kNow = 100 * kSecond;

InstanceView ViewOf(const Engine& engine, int id, bool decodes) {
  InstanceView view;
  view.id = id;
  view.role = decodes ? Role::kDecode : Role::kPrefill;
  view.weight = engine.weight;
  view.caps.kv_blocks = 100;
  if (decodes) {
    view.load.decode_requests = engine.requests;
    view.load.decode_tokens = engine.tokens;
  } else {
    view.load.prefill_requests = engine.requests;
    view.load.prefill_tokens = engine.tokens;
  }
  view.load.prefill_work = engine.work;
  view.load.kv_blocks = engine.kv_blocks;
  view.busy_since = kNow;
  view.model = &kModel;
  view.device_matched_tokens = engine.matched;
  view.matched_tokens = engine.matched + engine.matched_in_ram;
  return view;
}

std::vector<InstanceView> ViewsOf(const std::vector<Engine>& engines, bool decodes = false) {
  std::vector<InstanceView> views;
  for (const Engine& engine : engines)
    views.push_back(ViewOf(engine, static_cast<int>(views.size()), decodes));
  return views;
}

RequestView RequestOf(uint32_t prompt_tokens, Nanos waiting = 0) {
  RequestView request;
  request.facts.prompt_tokens = prompt_tokens;
  request.received = kNow;
  request.waiting = waiting;
  return request;
}

std::unique_ptr<Policy> Make(std::string_view name, const PolicyOptions& options = {}) {
  return *MakePolicy(name, options);
}

// A new policy's choice for a prompt.
int Prefill(std::string_view name, uint32_t prompt_tokens, const std::vector<Engine>& engines) {
  return Make(name)->ChoosePrefill(RequestOf(prompt_tokens), ViewsOf(engines), kNow).instance;
}
int Decode(std::string_view name, const std::vector<Engine>& engines) {
  return Make(name)->ChooseDecode(RequestOf(1000), ViewsOf(engines, true), kNow).instance;
}

TEST(Baselines, RandomReachesAllEnginesAndRepeatsWithItsSeed) {
  PolicyOptions options;
  options.seed = 7;
  const auto a = Make("random", options), b = Make("random", options);
  const std::vector<InstanceView> views = ViewsOf({{}, {}, {}});
  std::set<int> chosen;
  for (int i = 0; i < 100; ++i) {
    const int choice = a->ChoosePrefill(RequestOf(10), views, kNow).instance;
    ASSERT_EQ(choice, b->ChoosePrefill(RequestOf(10), views, kNow).instance);
    chosen.insert(choice);
  }
  EXPECT_THAT(chosen, ElementsAre(0, 1, 2));
}

TEST(Baselines, RoundRobinTakesTurnsAndIgnoresLoads) {
  const auto policy = Make("round-robin");
  std::vector<int> chosen;
  for (int i = 0; i < 4; ++i) {
    const auto views = ViewsOf({{.requests = 50}, {}, {}});
    chosen.push_back(policy->ChoosePrefill(RequestOf(10), views, kNow).instance);
  }
  EXPECT_THAT(chosen, ElementsAre(0, 1, 2, 0));
}

TEST(Baselines, LeastRequestsCountsRequestsAndLeastTokensTokens) {
  const std::vector<Engine> engines = {{.requests = 1, .tokens = 900}, {.requests = 2, .tokens = 100}};
  EXPECT_EQ(Prefill("least-requests", 10, engines), 0);
  EXPECT_EQ(Prefill("least-tokens", 10, engines), 1);
  EXPECT_EQ(Decode("least-requests", engines), 0);
  EXPECT_EQ(Decode("least-tokens", engines), 1);
}

TEST(Baselines, SglangPrefersThePrefixUntilLoadsDifferByMoreThanBothThresholds) {
  // 65 - 1 = 64 is not above 64.
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 65, .matched = 900}, {.requests = 1}}), 0);
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 66, .matched = 900}, {.requests = 1}}), 1);
  // 200 is not above 1.5 x 135 = 202.5; 203 is.
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 200, .matched = 900}, {.requests = 135}}), 0);
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 203, .matched = 900}, {.requests = 135}}), 1);
}

TEST(Baselines, SglangIgnoresAPrefixOfThreeTenths) {
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 2, .matched = 300}, {.requests = 1}}), 1);
  EXPECT_EQ(Prefill("sglang-cache-aware", 1000, {{.requests = 2, .matched = 301}, {.requests = 1}}), 0);
}

TEST(Baselines, DynamoAddsBlocksToComputeAndBlocksInUse) {
  // 1,600 tokens are 100 blocks, of which 50 are cached: 50 + 60 against 100, then 50 + 40.
  EXPECT_EQ(Prefill("dynamo", 1600, {{.matched = 800, .kv_blocks = 60}, {}}), 1);
  EXPECT_EQ(Prefill("dynamo", 1600, {{.matched = 800, .kv_blocks = 40}, {}}), 0);
  // Blocks in RAM count 0.75: 100 - 37.5 + 40 against 100; 100 - 37.5 + 37.
  EXPECT_EQ(Prefill("dynamo", 1600, {{.kv_blocks = 40, .matched_in_ram = 800}, {}}), 1);
  EXPECT_EQ(Prefill("dynamo", 1600, {{.kv_blocks = 37, .matched_in_ram = 800}, {}}), 0);
  // Prefills that wait count: 320 tokens are 20 blocks, so that 50 + 40 + 20 are more than 100.
  EXPECT_EQ(Prefill("dynamo", 1600, {{.tokens = 320, .matched = 800, .kv_blocks = 40}, {}}), 1);
  EXPECT_EQ(Decode("dynamo", {{.requests = 1, .kv_blocks = 9}, {.requests = 5, .kv_blocks = 8}}), 1);
}

TEST(Baselines, LlmdWeighsPrefixQueueAndCacheByThreeTwoTwo) {
  // 3 x 0.9 + 2 x 0 + 2 x 0.5 = 3.7 against 0 + 2 + 2; then 2.7 + 0 + 2 x 0.75 = 4.2.
  EXPECT_EQ(Prefill("llm-d", 1000, {{.requests = 4, .matched = 900, .kv_blocks = 50}, {}}), 1);
  EXPECT_EQ(Prefill("llm-d", 1000, {{.requests = 4, .matched = 900, .kv_blocks = 25}, {}}), 0);
  // Without a prefix: 2 x 1 + 2 x 0.1 against 2 x 0 + 2 x 1.
  EXPECT_EQ(Decode("llm-d", {{.requests = 1, .kv_blocks = 90}, {.requests = 2}}), 0);
  EXPECT_EQ(Decode("llm-d", {{.requests = 2, .kv_blocks = 90}, {.requests = 2}}), 1);
}

TEST(Baselines, AibrixBalancesAboveADifferenceOfSixteen) {
  EXPECT_EQ(Prefill("aibrix", 1000, {{.requests = 16, .matched = 100}, {}}), 0);
  EXPECT_EQ(Prefill("aibrix", 1000, {{.requests = 17, .matched = 100}, {}}), 1);
}

TEST(Baselines, AibrixSkipsEnginesAboveTheMeanPlusTwoDeviations) {
  // Six engines with 10 requests in all: mean 1.67, deviation 3.73, limit 9.12.
  EXPECT_EQ(Prefill("aibrix", 1000, {{.requests = 10, .matched = 900}, {}, {}, {.matched = 100}, {}, {}}), 3);
  // Ten requests on two engines: mean 5, deviation 5, limit 15.
  EXPECT_EQ(Prefill("aibrix", 1000, {{.requests = 10, .matched = 900}, {.matched = 100}}), 0);
  // Equal prefixes: the engine with fewer requests.
  EXPECT_EQ(Prefill("aibrix", 1000, {{.requests = 2, .matched = 900}, {.requests = 1, .matched = 900}}), 1);
}

TEST(Baselines, MooncakeTakesTheShortestTimeToTheFirstToken) {
  // 10 ms + 10 us per token: 20 ms of the cached engine and 110 ms of the other. 89 and 91 ms of work decide.
  EXPECT_EQ(Prefill("mooncake", 10000, {{.requests = 1, .matched = 9000, .work = 89 * kMillisecond}, {}}), 0);
  EXPECT_EQ(Prefill("mooncake", 10000, {{.requests = 1, .matched = 9000, .work = 91 * kMillisecond}, {}}), 1);
  // A decode step is 5 ms + 50 us x 11 + 10 ns x 1,000 = 5.56 ms there, and 5.06 ms / 0.9 = 5.62 ms here.
  EXPECT_EQ(Decode("mooncake", {{.weight = 0.9}, {.requests = 10}}), 1);
  EXPECT_EQ(Decode("mooncake", {{.weight = 0.95}, {.requests = 10}}), 0);
}

TEST(Baselines, MooncakeRejectsARequestThatWouldMissTheTarget) {
  const auto choose = [](Nanos target) {
    PolicyOptions options;
    options.slo_ttft = target;
    options.rejects = true;
    const auto policy = Make("mooncake", options);
    return policy->ChoosePrefill(RequestOf(10000), ViewsOf({{}}), kNow).kind;
  };
  EXPECT_EQ(choose(109 * kMillisecond), Choice::Kind::kReject);
  EXPECT_EQ(choose(111 * kMillisecond), Choice::Kind::kPlace);
}

TEST(Baselines, OmniTakesTheLongestPrefixWithinItsCaps) {
  EXPECT_EQ(Prefill("omni", 1000, {{.tokens = 32000, .matched = 100}, {.matched = 50}}), 0);
  EXPECT_EQ(Prefill("omni", 1000, {{.tokens = 32001, .matched = 100}, {.tokens = 9, .matched = 50}, {}}), 1);
  EXPECT_EQ(Prefill("omni", 1000, {{.requests = 33, .matched = 100}, {.tokens = 9, .matched = 50}, {}}), 1);
  // No engine within its caps has a prefix: the least tokens of all.
  EXPECT_EQ(Prefill("omni", 1000, {{.tokens = 32001, .matched = 100}, {.tokens = 9}, {.tokens = 8}}), 2);
  EXPECT_EQ(Decode("omni", {{.requests = 32, .tokens = 10}, {.requests = 31, .tokens = 99}}), 1);
}

TEST(Baselines, OmniOrdersShortAndOldPromptsFirstAndLongDecodesFirst) {
  const auto policy = Make("omni");
  // 0.8 x 0 + 0.2 x 1 = 0.2, 0.8 x 0.1 = 0.08 and 0.8 x 0.9 = 0.72.
  std::vector<RequestView> queue = {RequestOf(900), RequestOf(1000, kSecond), RequestOf(100)};
  const auto tokens = [&] {
    std::vector<uint32_t> order;
    for (const RequestView& request : queue) order.push_back(request.facts.prompt_tokens);
    return order;
  };
  policy->OrderPrefill(queue, 1, kNow);
  EXPECT_THAT(tokens(), ElementsAre(100, 1000, 900));
  policy->OrderDecode(queue, kNow);
  EXPECT_THAT(tokens(), ElementsAre(1000, 900, 100));
}

TEST(Baselines, OmniEarliestBatchAddsBatchesThatWaitAndTheRestOfTheOneThatRuns) {
  const auto policy = Make("omni-earliest-batch");
  const std::vector<InstanceView> views = ViewsOf({{.matched = 900}, {}});
  const RequestView request = RequestOf(1000);
  const auto choose = [&](Nanos at) { return policy->ChoosePrefill(request, views, kNow + at).instance; };
  policy->Placed(request, views[0], kNow);
  // A batch of one takes 220 ms: 220 + (220 - 10 - 30) against 220 ms. The prefix does not count.
  EXPECT_EQ(choose(10 * kMillisecond), 1);
  policy->Placed(request, views[1], kNow + 100 * kMillisecond);
  // 220 + 0 (20 ms are left, less than 30) against 220 + (220 - 100 - 30).
  EXPECT_EQ(choose(200 * kMillisecond), 0);
  policy->Placed(request, views[0], kNow + 200 * kMillisecond);
  // One waits: (280 - 220) x 1 + 280 = 340 against 310.
  EXPECT_EQ(choose(200 * kMillisecond), 1);
}

}  // namespace
}  // namespace moesaic::proxy
