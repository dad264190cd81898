#include "proxy/simulate/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <random>

#include "text/test_data.h"

namespace moesaic::proxy {
namespace {

// Sessions of growing prompts, as an agent makes them.
Trace Agents(int sessions, int turns) {
  Trace trace;
  trace.name = "agents";
  trace.block_size = 64;
  for (int s = 0; s < sessions; ++s) {
    for (int t = 0; t < turns; ++t) {
      TraceRequest request;
      request.arrival = (s * 37 % 100) * kMillisecond * 20 + t * 900 * kMillisecond;
      request.prompt_tokens = static_cast<uint32_t>(2000 + t * 700);
      request.output_tokens = static_cast<uint32_t>(5 + (s + t) % 40);
      request.session = static_cast<uint64_t>(s + 1) << 20;
      for (uint32_t b = 0; b < request.prompt_tokens / 64; ++b)
        request.keys.push_back((static_cast<uint64_t>(s + 1) << 32) + b + 1);
      trace.requests.push_back(request);
    }
  }
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
  return trace;
}

SimulationOptions TwoAndTwo(std::string_view policy) {
  SimulationOptions options;
  options.policy = std::string(policy);
  options.prefill = options.decode = 2;
  options.policy_options.slo_ttft = kSecond;
  options.policy_options.slo_tpot = 50 * kMillisecond;
  options.kv_tokens = 200'000;
  options.engine.jitter = 0.05;
  return options;
}

class SimulationTest : public testing::TestWithParam<std::string_view> {};

TEST_P(SimulationTest, ServesEveryRequestAndRepeatsItself) {
  const Trace trace = Agents(20, 6);
  for (const int engines : {0, 3}) {
    SimulationOptions options = TwoAndTwo(GetParam());
    options.engines = engines;
    const auto first = Simulate(trace, options), second = Simulate(trace, options);
    ASSERT_TRUE(first.ok()) << first.status();
    ASSERT_TRUE(second.ok());
    EXPECT_EQ(first->completed, trace.requests.size());
    EXPECT_EQ(first->rejected + first->failed, 0U);
    EXPECT_EQ(first->good, second->good);
    EXPECT_EQ(first->virtual_time, second->virtual_time);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(first->ttft_ms[i], second->ttft_ms[i]);
    EXPECT_GE(first->imbalance, 1);
    EXPECT_LE(first->goodput, GoodputBound(trace, options));
    EXPECT_LE(first->hit_rate, 1);
  }
}
INSTANTIATE_TEST_SUITE_P(All, SimulationTest, testing::ValuesIn(PolicyNames().begin(), PolicyNames().end()),
                         [](const auto& info) {
                           std::string name(info.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Simulation, MoesaicsPolicyReusesMorePrefixesThanRandom) {
  const Trace trace = Agents(20, 6);
  const auto ours = Simulate(trace, TwoAndTwo("moesaic")), random = Simulate(trace, TwoAndTwo("random"));
  ASSERT_TRUE(ours.ok() && random.ok());
  EXPECT_GT(ours->hit_rate, random->hit_rate + 0.1);
  EXPECT_LE(ours->hit_rate, trace.reusable() + 1e-9);
}

// Ten minutes of chats on eight engines, as in the traces: two requests a second, 200 tokens an answer.
TEST(Simulation, ServesTenMinutesOfChats) {
  Trace trace;
  trace.name = "chats";
  trace.block_size = 64;
  for (uint64_t i = 0; i < 1200; ++i) {
    TraceRequest request;
    request.arrival = static_cast<Nanos>(i) * kSecond / 2;
    request.prompt_tokens = 4096;
    request.output_tokens = 200;
    for (uint64_t b = 0; b < request.prompt_tokens / 64; ++b)
      request.keys.push_back(b < 32 ? 1 + b + 100 * (i % 10) : (i + 1) << 20 | b);
    trace.requests.push_back(request);
  }
  SimulationOptions options = TwoAndTwo("moesaic");
  options.engines = 8;
  const auto result = Simulate(trace, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->completed, trace.requests.size());
  EXPECT_GE(result->virtual_time, trace.requests.back().arrival);
}

TEST(Simulation, TheBoundIsTheLargestNumberOfRequestsOnTime) {
  SimulationOptions options = TwoAndTwo("moesaic");
  options.prefill = 1;
  options.engine.time = {.base = 0, .per_token = 1e6, .per_pair = 0};
  options.policy_options.slo_ttft = 3 * kSecond;
  options.scheduler.skip_prefill_tokens = 0;
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    Trace trace;
    trace.requests.resize(9);
    for (TraceRequest& request : trace.requests) {
      request.arrival = static_cast<Nanos>(random() % 8000) * kMillisecond;
      request.prompt_tokens = static_cast<uint32_t>(1 + random() % 3500);
    }
    std::stable_sort(trace.requests.begin(), trace.requests.end(),
                     [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
    // All sets of requests, each in order of arrival.
    int best = 0;
    for (unsigned set = 0; set < 1U << trace.requests.size(); ++set) {
      Nanos end = 0;
      bool on_time = true;
      for (size_t i = 0; i < trace.requests.size(); ++i) {
        if ((set >> i & 1) == 0) continue;
        const TraceRequest& request = trace.requests[i];
        end = std::max(end, request.arrival) + request.prompt_tokens * kMillisecond;
        on_time &= end <= request.arrival + options.policy_options.slo_ttft;
      }
      if (on_time) best = std::max(best, std::popcount(set));
    }
    const double span = static_cast<double>(trace.span()) / kSecond;
    EXPECT_NEAR(GoodputBound(trace, options) * span, best, 1e-6) << "round " << round;
  }
}

TEST(Simulation, ACommonCacheServesInTheOrderOfArrivals) {
  SimulationOptions options = TwoAndTwo("moesaic");
  options.engine.time = {.base = 0, .per_token = 1e6, .per_pair = 0};
  options.policy_options.slo_ttft = 3 * kSecond;
  Trace trace;
  trace.block_size = 500;
  // Two requests of 2 s occupy both engines. The third has 500 tokens of the first and ends after 3.5 s, the
  // fourth after 4 s.
  for (const auto& [tokens, keys] : std::vector<std::pair<uint32_t, std::vector<uint64_t>>>{
           {2000, {1, 2, 3, 4}}, {2000, {}}, {2000, {1, 9}}, {2000, {}}, {400, {}}}) {
    trace.requests.push_back({.arrival = 0, .prompt_tokens = tokens, .session = 0, .keys = keys});
  }
  trace.requests[2].arrival = kSecond;
  trace.requests[3].arrival = kSecond;
  trace.requests[4].arrival = 2 * kSecond;  // ends after 3.9 s
  EXPECT_NEAR(CommonCacheGoodput(trace, options) * 2, 5, 1e-9);
  trace.requests[3].arrival = kSecond - 1;  // begins before the third, and ends too late
  std::swap(trace.requests[2], trace.requests[3]);
  EXPECT_NEAR(CommonCacheGoodput(trace, options) * 2, 4, 1e-9);
}

TEST(Simulation, RefusesTracesThatCannotRun) {
  Trace trace = Agents(2, 2);
  SimulationOptions options = TwoAndTwo("moesaic");
  options.kv_tokens = 1024;
  EXPECT_FALSE(Simulate(trace, options).ok());
  options = TwoAndTwo("best");
  EXPECT_FALSE(Simulate(trace, options).ok());
  options = TwoAndTwo("moesaic");
  options.decode = 0;
  EXPECT_FALSE(Simulate(trace, options).ok());
}

TEST(Simulation, StopsWhenItsCallerCancels) {
  const auto result = Simulate(Agents(20, 6), TwoAndTwo("omni"), [](uint64_t) { return false; });
  EXPECT_EQ(result.status().code(), StatusCode::kCancelled);
}

// --- Traces ---

class TraceFile {
 public:
  TraceFile(const std::string& name, const std::string& content) : path_(testing::TempDir() + name) {
    std::ofstream(path_) << content;
  }
  ~TraceFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Trace, ReadsTheFormats) {
  const TraceFile mooncake(
      "proxy_mooncake.jsonl",
      "{\"timestamp\": 100, \"input_length\": 1030, \"output_length\": 3, \"hash_ids\": [0, 1, 2]}\n"
      "{\"timestamp\": 50, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [0, 9]}\n");
  const auto first = ReadTrace(mooncake.path());
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->requests.size(), 2U);
  EXPECT_EQ(first->requests[1].arrival, 50 * kMillisecond);
  EXPECT_EQ(first->requests[1].keys.size(), 2U);  // the partial block is not shared
  EXPECT_EQ(first->requests[0].keys[0], first->requests[1].keys[0]);
  EXPECT_NEAR(first->reusable(), 512.0 / 1630, 1e-9);

  const TraceFile azure(
      "proxy_azure.csv",
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,4808,10\n2023-11-16 18:17:04.0,3180,8");
  const auto second = ReadTrace(azure.path());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->requests[1].arrival, kSecond / 2);
  EXPECT_EQ(second->requests[1].output_tokens, 8U);

  const TraceFile sessions("proxy_sessions.jsonl",
                           "{\"id\":\"a\",\"requests\":[{\"t\":1,\"in\":200,\"out\":5,\"hash_runs\":[[1,4]]},"
                           "{\"t\":3.5,\"in\":300,\"out\":5,\"hash_runs\":[[1,3],[9,2]]}]}\n");
  const auto third = ReadTrace(sessions.path());
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(third->requests[1].arrival, 5 * kSecond / 2);
  EXPECT_EQ(third->requests[1].keys.size(), 4U);
  EXPECT_EQ(third->requests[0].session, third->requests[1].session);

  const TraceFile run(
      "proxy_run.traj",
      "{\"history\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"" +
          std::string(600, 'u') + "\"},{\"role\":\"assistant\",\"content\":\"" + std::string(400, 'a') +
          "\"},{\"role\":\"user\",\"content\":\"next\"},{\"role\":\"assistant\",\"content\":\"b\"}]}");
  const auto fourth = ReadTrace(run.path());
  ASSERT_TRUE(fourth.ok()) << fourth.status();
  ASSERT_EQ(fourth->requests.size(), 2U);
  EXPECT_EQ(fourth->requests[0].keys[0], fourth->requests[1].keys[0]);
  EXPECT_GT(fourth->requests[1].prompt_tokens, fourth->requests[0].prompt_tokens + 99);
}

TEST(Trace, ErrorsNameFileAndLine) {
  const auto expect = [](const std::string& name, const std::string& content, const std::string& part) {
    const TraceFile file(name, content);
    const auto trace = ReadTrace(file.path());
    ASSERT_FALSE(trace.ok()) << content;
    EXPECT_NE(Message(trace.status()).find(part), std::string::npos) << trace.status();
  };
  const std::string good = "{\"timestamp\":1,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}\n";
  expect("proxy_bad1.jsonl", good + "{\"timestamp\":1", "proxy_bad1.jsonl:2");
  expect("proxy_bad2.jsonl", good + "{\"hash_ids\":[1]}", "timestamp");
  expect("proxy_bad3.jsonl", "{\"timestamp\":1,\"input_length\":-5,\"output_length\":1,\"hash_ids\":[1]}",
         "input_length");
  expect("proxy_bad4.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2");
  expect("proxy_bad5.jsonl", "", "no requests");
  EXPECT_FALSE(ReadTrace(testing::TempDir() + "proxy_missing.jsonl").ok());
}

TEST(Trace, ScalesAndReplicates) {
  Trace trace = Agents(4, 3);
  trace.ScaleTo(2);
  EXPECT_NEAR(static_cast<double>(trace.span()), 6.0 * kSecond, 1e3);
  const size_t count = trace.requests.size();
  const double reusable = trace.reusable();
  trace.Replicate(3);
  EXPECT_EQ(trace.requests.size(), 3 * count);
  EXPECT_LE(trace.span(), 6 * kSecond + 1000);
  EXPECT_LE(trace.reusable(), reusable + 1e-9);  // a copy shares nothing with another
}

TEST(Trace, ReadsTheSharedTraces) {
  const auto folder = text::SharedData() / "traces";
  SKIP_WITHOUT(folder);
  struct Expected {
    const char* name;
    size_t requests;
    double reusable;
  };
  for (const Expected& expected : {Expected{"mooncake_synthetic_trace.jsonl.gz", 3993, 0.65},
                                   Expected{"AzureLLMInferenceTrace_code.csv.gz", 8819, 0},
                                   Expected{"claude_code_sessions_20.jsonl.gz", 959, 0.95},
                                   Expected{"swe-agent_demonstrations.tar.gz", 209, 0.86}}) {
    const auto trace = ReadTrace((folder / expected.name).string());
    ASSERT_TRUE(trace.ok()) << trace.status();
    EXPECT_EQ(trace->requests.size(), expected.requests) << expected.name;
    EXPECT_NEAR(trace->reusable(), expected.reusable, 0.01) << expected.name;
  }
}

}  // namespace
}  // namespace moesaic::proxy
