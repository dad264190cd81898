// The choices of other routers' policies, against costs that were computed by hand from their formulas. In
// the cases of ExpectChoices(), a simpler rule chooses another engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "proxy/schedule/policy.h"

namespace moesaic::proxy {
namespace {

constexpr Nanos kAt = 100 * kSecond;  // time of all choices
// A prefill of n new and c cached tokens takes 1 ms + n us + n (n + 2 c) / 10 ns, a decode step
// 5 ms + batch / 10 ms + tokens / 10 us.
constexpr LatencyCoefficients kTimes = {.base = 1e6,
                                        .per_token = 1e3,
                                        .per_pair = 0.1,
                                        .step_base = 5e6,
                                        .per_sequence = 1e5,
                                        .per_kv_token = 100};

InstanceView EngineAt(int id, const InstanceLoad& load, uint32_t matched = 0) {
  InstanceView view;
  view.id = id;
  view.role = Role::kPrefill;
  view.load = load;
  view.matched_tokens = view.device_matched_tokens = matched;
  view.model = &kTimes;
  return view;
}

InstanceView WithRole(InstanceView view, Role role) {
  view.role = role;
  return view;
}
InstanceView WithBlocks(InstanceView view, uint64_t capacity) {
  view.caps.kv_blocks = capacity;
  return view;
}
InstanceView BusySince(InstanceView view, Nanos since) {
  view.busy_since = since;
  return view;
}
InstanceView WithWeight(InstanceView view, double weight) {
  view.weight = weight;
  return view;
}
InstanceView InHostMemory(InstanceView view) {
  view.device_matched_tokens = 0;
  return view;
}

// Rules that a policy must differ from. The first of equal engines is chosen.
enum class Rule {
  kLongestMatch,
  kFewestRequests,
  kFewestPrefills,
  kFewestPrefillTokens,
  kFewestDecodeTokens,
  kFewestBlocks
};

double RuleValue(Rule rule, const InstanceView& v) {
  switch (rule) {
    case Rule::kLongestMatch:
      return -static_cast<double>(v.matched_tokens);
    case Rule::kFewestRequests:
      return static_cast<double>(v.load.prefill_requests) + v.load.decode_requests;
    case Rule::kFewestPrefills:
      return v.load.prefill_requests;
    case Rule::kFewestPrefillTokens:
      return static_cast<double>(v.load.prefill_tokens);
    case Rule::kFewestDecodeTokens:
      return static_cast<double>(v.load.decode_tokens);
    case Rule::kFewestBlocks:
      return static_cast<double>(v.load.kv_blocks);
  }
  return 0;
}

int ChosenByRule(Rule rule, const std::vector<InstanceView>& fleet) {
  return std::min_element(
             fleet.begin(), fleet.end(),
             [&](const auto& a, const auto& b) { return RuleValue(rule, a) < RuleValue(rule, b); })
      ->id;
}

RequestView RequestOf(uint32_t prompt_tokens) {
  RequestView request;
  request.facts.prompt_tokens = prompt_tokens;
  request.received = kAt;
  return request;
}

struct PolicyCase {
  std::string_view why;  // costs of the engines
  uint32_t prompt_tokens;
  std::vector<InstanceView> fleet;
  Rule rule;  // chooses another engine
  int expected;
};

void ExpectChoices(std::string_view policy, bool decode, const std::vector<PolicyCase>& cases) {
  for (const PolicyCase& c : cases) {
    SCOPED_TRACE(testing::Message() << policy << ": " << c.why);
    const std::unique_ptr<Policy> chooser = *MakePolicy(policy, {});
    const RequestView request = RequestOf(c.prompt_tokens);
    const Choice choice =
        decode ? chooser->ChooseDecode(request, c.fleet, kAt) : chooser->ChoosePrefill(request, c.fleet, kAt);
    EXPECT_EQ(choice.kind, Choice::Kind::kPlace);
    EXPECT_EQ(choice.instance, c.expected);
    EXPECT_NE(ChosenByRule(c.rule, c.fleet), c.expected) << "the case does not tell the rules apart";
  }
}

TEST(Baselines, RandomIgnoresLoadsAndPrefixes) {
  const std::vector<InstanceView> fleet = {EngineAt(0, {.prefill_requests = 90}),
                                           EngineAt(1, {.prefill_tokens = 50'000}), EngineAt(2, {}, 1000)};
  const std::unique_ptr<Policy> policy = *MakePolicy("random", {}), same = *MakePolicy("random", {});
  std::array<int, 3> chosen{};
  for (int i = 0; i < 3000; ++i) {
    const int engine = policy->ChoosePrefill(RequestOf(1000), fleet, kAt).instance;
    EXPECT_EQ(same->ChoosePrefill(RequestOf(1), fleet, kAt).instance, engine);
    ++chosen.at(static_cast<size_t>(engine));
  }
  // Five standard deviations of a binomial distribution with n = 3000 and p = 1/3.
  for (const int count : chosen) EXPECT_NEAR(count, 1000, 130);
}

TEST(Baselines, RoundRobinIgnoresLoadsAndPrefixes) {
  const std::vector<InstanceView> fleet = {EngineAt(4, {.prefill_requests = 90}), EngineAt(7, {}),
                                           EngineAt(9, {.prefill_tokens = 50'000}, 1000)};
  const std::unique_ptr<Policy> policy = *MakePolicy("round-robin", {});
  for (const int expected : {4, 7, 9, 4, 7}) {
    EXPECT_EQ(policy->ChoosePrefill(RequestOf(1000), fleet, kAt).instance, expected);
  }
  EXPECT_EQ(policy->ChooseDecode(RequestOf(1000), fleet, kAt).instance, 4);  // counts by itself
}

TEST(Baselines, LeastRequests) {
  ExpectChoices(
      "least-requests", /*decode=*/false,
      {{.why = "3 requests, 2 requests",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_requests = 3, .prefill_tokens = 100}, 1600),
                  EngineAt(2, {.prefill_requests = 2, .prefill_tokens = 9000})},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "1 + 4 requests, 3 + 1 requests",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_requests = 1, .decode_requests = 4}),
                  EngineAt(2, {.prefill_requests = 3, .decode_requests = 1})},
        .rule = Rule::kFewestPrefills,
        .expected = 2},
       // An aggregated engine has its requests in decode from the beginning: a prefill is not one more.
       {.why = "2 of 4 requests in prefill, 5 requests in decode",
        .prompt_tokens = 1600,
        .fleet = {WithRole(EngineAt(1, {.prefill_requests = 2, .decode_requests = 4}), Role::kBoth),
                  WithRole(EngineAt(2, {.decode_requests = 5}), Role::kBoth)},
        .rule = Rule::kFewestRequests,
        .expected = 1}});
}

TEST(Baselines, LeastTokens) {
  ExpectChoices(
      "least-tokens", /*decode=*/false,
      {{.why = "5000 tokens, 3000 + 1000 tokens",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_requests = 1, .prefill_tokens = 5000}),
                  EngineAt(2, {.prefill_requests = 4, .prefill_tokens = 3000, .decode_tokens = 1000})},
        .rule = Rule::kFewestRequests,
        .expected = 2},
       {.why = "2000 + 3000 tokens, 4000 + 500 tokens",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_tokens = 2000, .decode_tokens = 3000}),
                  EngineAt(2, {.prefill_tokens = 4000, .decode_tokens = 500})},
        .rule = Rule::kFewestPrefillTokens,
        .expected = 2}});
}

// Imbalanced: most - least > 64 and most > 1.5 least. Otherwise the longest match, if it is over 0.3.
TEST(Baselines, SglangCacheAware) {
  ExpectChoices(
      "sglang-cache-aware", /*decode=*/false,
      {{.why = "balanced (60 more); 0.32 matched",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 60}, 320)},
        .rule = Rule::kFewestRequests,
        .expected = 2},
       {.why = "balanced; 0.29 matched",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 5}, 290), EngineAt(2, {.prefill_requests = 1})},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "imbalanced: 65 more, 75 > 1.5 * 10",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 75}, 900), EngineAt(2, {.prefill_requests = 10})},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "balanced: 65 more, 205 < 1.5 * 140",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 140}), EngineAt(2, {.prefill_requests = 205}, 900)},
        .rule = Rule::kFewestRequests,
        .expected = 2}});
}

// Blocks of 16 tokens: queued + new - credit + blocks in use; the credit is 1 in device and 0.75 in host
// memory.
TEST(Baselines, Dynamo) {
  ExpectChoices(
      "dynamo", /*decode=*/false,
      {{.why = "100 + 100 - 100 + 30 = 130, 100 + 20 = 120",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_tokens = 1600, .kv_blocks = 30}, 1600),
                  EngineAt(2, {.kv_blocks = 20})},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "100 - 0.75 * 100 + 40 = 65, 100 - 60 + 20 = 60",
        .prompt_tokens = 1600,
        .fleet = {InHostMemory(EngineAt(1, {.kv_blocks = 40}, 1600)), EngineAt(2, {.kv_blocks = 20}, 960)},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "200 + 100 = 300, 100 - 50 + 150 = 200",
        .prompt_tokens = 1600,
        .fleet = {EngineAt(1, {.prefill_requests = 1, .prefill_tokens = 3200}),
                  EngineAt(2, {.decode_requests = 9, .kv_blocks = 150}, 800)},
        .rule = Rule::kFewestRequests,
        .expected = 2}});
  ExpectChoices("dynamo", /*decode=*/true,
                {{.why = "500 blocks, 300 blocks",
                  .prompt_tokens = 1600,
                  .fleet = {EngineAt(1, {.decode_requests = 1, .kv_blocks = 500}),
                            EngineAt(2, {.decode_requests = 8, .kv_blocks = 300})},
                  .rule = Rule::kFewestRequests,
                  .expected = 2}});
}

// 3 matched share + 2 (most - requests) / (most - least) + 2 free share of the KV blocks.
TEST(Baselines, Llmd) {
  ExpectChoices("llm-d", /*decode=*/false,
                {{.why = "2.7 + 0 + 2 = 4.7, 0 + 2 + 2 = 4",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.prefill_requests = 10}, 900), EngineAt(2, {})},
                  .rule = Rule::kFewestRequests,
                  .expected = 1},
                 {.why = "2.7 + 0 + 0.2 = 2.9, 0 + 2 + 1.4 = 3.4",
                  .prompt_tokens = 1000,
                  .fleet = {WithBlocks(EngineAt(1, {.prefill_requests = 10, .kv_blocks = 90}, 900), 100),
                            WithBlocks(EngineAt(2, {.kv_blocks = 30}), 100)},
                  .rule = Rule::kLongestMatch,
                  .expected = 2},
                 {.why = "0 + 2 + 2 = 4, 1.5 + 1 + 2 = 4.5, 2.4 + 0 + 2 = 4.4",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 4}, 500),
                            EngineAt(3, {.prefill_requests = 8}, 800)},
                  .rule = Rule::kLongestMatch,
                  .expected = 2}});
  ExpectChoices("llm-d", /*decode=*/true,
                {{.why = "prefixes do not count: 0 + 1 = 1, 2 + 0 = 2",
                  .prompt_tokens = 1000,
                  .fleet = {WithBlocks(EngineAt(1, {.decode_requests = 5, .kv_blocks = 50}, 1000), 100),
                            WithBlocks(EngineAt(2, {.decode_requests = 2, .kv_blocks = 100}), 100)},
                  .rule = Rule::kFewestBlocks,
                  .expected = 2}});
}

// Least requests if most - least > 16. Otherwise the longest match among the engines with at most mean + 2
// standard deviations of the requests.
TEST(Baselines, Aibrix) {
  ExpectChoices("aibrix", /*decode=*/false,
                {{.why = "17 more",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.prefill_requests = 17}, 900), EngineAt(2, {})},
                  .rule = Rule::kLongestMatch,
                  .expected = 2},
                 {.why = "16 more; the bound is 8 + 2 * 8",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 16}, 100)},
                  .rule = Rule::kFewestRequests,
                  .expected = 2},
                 {.why = "the bound is 3.67 + 2 * 3.73 = 11.1, below 12",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.prefill_requests = 12}, 900), EngineAt(2, {.prefill_requests = 2}),
                            EngineAt(3, {.prefill_requests = 2}), EngineAt(4, {.prefill_requests = 2}),
                            EngineAt(5, {.prefill_requests = 2}, 300), EngineAt(6, {.prefill_requests = 2})},
                  .rule = Rule::kLongestMatch,
                  .expected = 5},
                 {.why = "of equal matches the one with fewer requests; the bound is 4 + 2 * 3.7",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 9}, 500),
                            EngineAt(3, {.prefill_requests = 3}, 500)},
                  .rule = Rule::kFewestRequests,
                  .expected = 3}});
}

// Queue + prefill of 10,000 tokens: 21 ms with nothing cached, 6.6 ms with 8000 cached tokens.
TEST(Baselines, Mooncake) {
  constexpr Nanos kMs = kMillisecond;
  ExpectChoices(
      "mooncake", /*decode=*/false,
      {{.why = "22 - 5 + 6.6 = 23.6 ms, 21 ms",
        .prompt_tokens = 10'000,
        .fleet = {BusySince(EngineAt(1, {.prefill_requests = 2, .prefill_work = 22 * kMs}, 8000),
                            kAt - 5 * kMs),
                  EngineAt(2, {})},
        .rule = Rule::kLongestMatch,
        .expected = 2},
       {.why = "18 - 4 + 6.6 = 20.6 ms, 21 ms",
        .prompt_tokens = 10'000,
        .fleet = {BusySince(EngineAt(1, {.prefill_requests = 2, .prefill_work = 18 * kMs}, 8000),
                            kAt - 4 * kMs),
                  EngineAt(2, {})},
        .rule = Rule::kFewestRequests,
        .expected = 1},
       {.why = "21 ms, 12 - 2 + 21 / 2 = 20.5 ms on an engine of twice the speed",
        .prompt_tokens = 10'000,
        .fleet = {EngineAt(1, {}),
                  WithWeight(BusySince(EngineAt(2, {.prefill_requests = 1, .prefill_work = 12 * kMs}),
                                       kAt - 2 * kMs),
                             2)},
        .rule = Rule::kFewestRequests,
        .expected = 2}});
  ExpectChoices("mooncake", /*decode=*/true,
                {{.why = "5 + 0.3 + 5.1 = 10.4 ms, 5 + 2.1 + 1.1 = 8.2 ms",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.decode_requests = 2, .decode_tokens = 50'000}),
                            EngineAt(2, {.decode_requests = 20, .decode_tokens = 10'000})},
                  .rule = Rule::kFewestRequests,
                  .expected = 2},
                 {.why = "5 + 0.3 + 1.1 = 6.4 ms, 5 + 6.1 + 0.2 = 11.3 ms",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.decode_requests = 2, .decode_tokens = 10'000}),
                            EngineAt(2, {.decode_requests = 60, .decode_tokens = 1000})},
                  .rule = Rule::kFewestDecodeTokens,
                  .expected = 1}});
}

TEST(Baselines, MooncakeRejectsRequestsThatWouldMissTheTarget) {
  const std::vector<InstanceView> fleet = {EngineAt(1, {})};  // 21 ms
  const auto kind = [&](int slo_ms, int age_ms) {
    PolicyOptions options;
    options.rejects = true;
    options.slo_ttft = slo_ms * kMillisecond;
    RequestView request = RequestOf(10'000);
    request.received = kAt - age_ms * kMillisecond;
    const std::unique_ptr<Policy> policy = *MakePolicy("mooncake", options);
    return policy->ChoosePrefill(request, fleet, kAt).kind;
  };
  EXPECT_EQ(kind(20, 0), Choice::Kind::kReject);
  EXPECT_EQ(kind(22, 0), Choice::Kind::kPlace);
  EXPECT_EQ(kind(22, 2), Choice::Kind::kReject);
}

// The longest match among the engines with at most 32,000 tokens and 32 requests, then the fewest tokens.
TEST(Baselines, Omni) {
  ExpectChoices(
      "omni", /*decode=*/false,
      {{.why = "128 tokens matched on an engine at its caps",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 32, .prefill_tokens = 32'000}, 128)},
        .rule = Rule::kFewestRequests,
        .expected = 2},
       {.why = "one token above the cap",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 1, .prefill_tokens = 32'001}, 900), EngineAt(2, {}),
                  EngineAt(3, {.prefill_requests = 3, .prefill_tokens = 10}, 100)},
        .rule = Rule::kLongestMatch,
        .expected = 3},
       {.why = "one request above the cap",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 33, .prefill_tokens = 100}, 900),
                  EngineAt(2, {.prefill_requests = 5, .prefill_tokens = 200}, 100)},
        .rule = Rule::kFewestPrefillTokens,
        .expected = 2},
       {.why = "equal matches: 900 tokens, 800 tokens",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 1, .prefill_tokens = 900}, 500),
                  EngineAt(2, {.prefill_requests = 2, .prefill_tokens = 800}, 500)},
        .rule = Rule::kFewestRequests,
        .expected = 2},
       {.why = "all above the caps, which then do not count: 50,000 tokens, 40,000 tokens",
        .prompt_tokens = 1000,
        .fleet = {EngineAt(1, {.prefill_requests = 33, .prefill_tokens = 50'000}, 900),
                  EngineAt(2, {.prefill_requests = 40, .prefill_tokens = 40'000})},
        .rule = Rule::kLongestMatch,
        .expected = 2}});
  ExpectChoices("omni", /*decode=*/true,
                {{.why = "32 requests: full, 500 tokens, 400 tokens",
                  .prompt_tokens = 1000,
                  .fleet = {EngineAt(1, {.decode_requests = 32, .decode_tokens = 10}),
                            EngineAt(2, {.decode_requests = 3, .decode_tokens = 500}),
                            EngineAt(3, {.decode_requests = 31, .decode_tokens = 400})},
                  .rule = Rule::kFewestDecodeTokens,
                  .expected = 3}});
}

// 0.8 (longest - length) / longest + 0.2 wait / max(longest wait, 50 ms): larger first.
TEST(Baselines, OmniOrdersTheQueueByLengthAndWait) {
  const auto order = [](uint32_t third_tokens, int third_ms) {
    std::vector<RequestView> queue = {RequestOf(1000), RequestOf(500), RequestOf(third_tokens)};
    for (uint32_t i = 0; i < 3; ++i) queue[i].id.slot = i + 1;
    queue[2].waiting = third_ms * kMillisecond;
    const std::unique_ptr<Policy> policy = *MakePolicy("omni", {});
    policy->OrderPrefill(queue, 1, kAt);
    return std::vector<uint32_t>{queue[0].id.slot, queue[1].id.slot, queue[2].id.slot};
  };
  EXPECT_EQ(order(600, 100), (std::vector<uint32_t>{3, 2, 1}));  // 0, 0.4, 0.32 + 0.2
  EXPECT_EQ(order(800, 100), (std::vector<uint32_t>{2, 3, 1}));  // 0, 0.4, 0.16 + 0.2
  EXPECT_EQ(order(600, 10), (std::vector<uint32_t>{2, 3, 1}));   // 0, 0.4, 0.32 + 0.04
}

TEST(Baselines, OmniSendsTheLongestRequestToDecodeFirst) {
  std::vector<RequestView> queue = {RequestOf(500), RequestOf(1000), RequestOf(800)};
  queue[0].waiting = kSecond;
  const std::unique_ptr<Policy> policy = *MakePolicy("omni", {});
  policy->OrderDecode(queue, kAt);
  EXPECT_EQ(queue[0].facts.prompt_tokens, 1000U);
  EXPECT_EQ(queue[1].facts.prompt_tokens, 800U);
  EXPECT_EQ(queue[2].facts.prompt_tokens, 500U);
}

// With q queued requests: (e(q + 1) - e(q)) q^2 + e(q + 1) + the rest of the batch that runs - 30 ms, where
// batches of 1 to 3 take 220, 280 and 330 ms until one was measured.
class OmniEarliestBatch : public testing::Test {
 protected:
  void Place(int engine, int at_ms, int times = 1) {
    for (int i = 0; i < times; ++i) policy_->Placed(RequestOf(1000), EngineAt(engine, {}), Time(at_ms));
  }
  int ChooseAt(int at_ms, const std::vector<InstanceView>& fleet) {
    return policy_->ChoosePrefill(RequestOf(1000), fleet, Time(at_ms)).instance;
  }
  static Nanos Time(int at_ms) { return kAt + at_ms * kMillisecond; }

  const std::unique_ptr<Policy> policy_ = *MakePolicy("omni-earliest-batch", {});
};

TEST_F(OmniEarliestBatch, ChoosesTheBatchThatEndsFirstByRequestsOnly) {
  const std::vector<InstanceView> fleet = {EngineAt(1, {.prefill_requests = 1, .prefill_tokens = 100}, 900),
                                           EngineAt(2, {.prefill_requests = 1, .prefill_tokens = 9000})};
  Place(2, 0);
  Place(1, 150);
  // Engine 1: 220 + 170 - 30 = 360. Engine 2: 220 + 0, since its batch ends in 20 ms.
  EXPECT_EQ(ChooseAt(200, fleet), 2);
  EXPECT_EQ(ChosenByRule(Rule::kLongestMatch, fleet), 1);
  EXPECT_EQ(ChosenByRule(Rule::kFewestPrefillTokens, fleet), 1);
}

TEST_F(OmniEarliestBatch, ChargesAnOverdueBatchInFullAgain) {
  const std::vector<InstanceView> fleet = {EngineAt(1, {}), EngineAt(2, {})};
  Place(1, 0);
  Place(2, 150);
  // Engine 1: 220 + 220 - 30 = 410, although its batch should have ended. Engine 2: 220 + 140 - 30 = 330.
  EXPECT_EQ(ChooseAt(230, fleet), 2);
}

TEST_F(OmniEarliestBatch, ChargesQueuedRequestsByTheirSquare) {
  const std::vector<InstanceView> fleet = {EngineAt(1, {}), EngineAt(2, {})};
  Place(1, 0, 3);  // one runs, two are queued
  Place(2, 150, 2);
  // Engine 1: (330 - 280) * 4 + 330 + 0 = 530, and 430 without the square. Engine 2: 60 + 280 + 170 - 30 =
  // 480.
  EXPECT_EQ(ChooseAt(200, fleet), 2);
}

TEST_F(OmniEarliestBatch, JoinsABatchThatWasMeasuredToBeFaster) {
  const std::vector<InstanceView> fleet = {EngineAt(1, {}), EngineAt(2, {.prefill_requests = 2})};
  Place(2, 0);
  policy_->PrefillDone(2, 1, Time(0), Time(600));  // a batch of one takes 600 ms
  Place(2, 1000, 2);
  // Engine 1: 600. Engine 2: 0 + 280 + (600 - 400) - 30 = 450.
  EXPECT_EQ(ChooseAt(1400, fleet), 2);
  EXPECT_EQ(ChosenByRule(Rule::kFewestRequests, fleet), 1);
}

}  // namespace
}  // namespace moesaic::proxy
