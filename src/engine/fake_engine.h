// A fixture for tests of engines with the fake model, and their expected outputs.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/fake_model.h"
#include "engine/sampling.h"

namespace moesaic::engine {

inline constexpr int64_t kBlockBytes = 2 * 3 * 64 * (2 + 1) * 4;  // bytes of a block of FakeModel

struct Result {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<LogprobEntry> prompt_logprobs;
  FinishReason finish = FinishReason::kNone;
  Status status;
  int ends = 0;
  int cached_tokens = 0;
  std::vector<float> embedding;
};

inline std::vector<int32_t> RandomPrompt(int tokens, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> prompt(tokens);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % FakeModel::kVocab);
  return prompt;
}

inline std::vector<int32_t> Joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Request MakeRequest(std::vector<int32_t> prompt, int max_tokens, float temperature) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.temperature = temperature;
  return request;
}

inline Request Greedy(std::vector<int32_t> prompt, int max_tokens = 4, std::string name = "") {
  Request request = MakeRequest(std::move(prompt), max_tokens, 0);
  request.cache_namespace = std::move(name);
  return request;
}

// Returns the output of a request by definition, without an engine.
inline std::vector<int32_t> Alone(const Request& request) {
  std::vector<int32_t> tokens = request.prompt;
  TokenHistory history;
  history.AddPrompt(request.prompt);
  DrawScratch scratch;
  for (int i = 0; i < request.sampling.max_tokens; ++i) {
    const std::vector<float> logits = FakeModel::LogitsAfter(tokens);
    const auto drawn = Draw({.logits = logits,
                             .sampling = &request.sampling,
                             .history = &history,
                             .banned = {},
                             .seed = request.sampling.seed.value_or(0),
                             .position = tokens.size()},
                            scratch);
    tokens.push_back(drawn->token);
    history.AddOutput(drawn->token);
  }
  return {tokens.begin() + static_cast<int64_t>(request.prompt.size()), tokens.end()};
}

class FakeEngineTest : public testing::Test {
 protected:
  explicit FakeEngineTest(int context = 4096) : model_(context) {}

  std::unique_ptr<Engine> Make(const EngineOptions& options) {
    auto engine = Engine::Create(model_, kernels_, *threads_, options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  static void Collect(const std::vector<TokenEvent>& events, std::map<RequestId, Result>* results) {
    for (const TokenEvent& event : events) {
      Result& result = (*results)[event.request];
      if (event.token) result.tokens.push_back(*event.token);
      if (event.token) result.logprobs.push_back(event.logprobs.logprob);
      result.cached_tokens += event.cached_tokens;
      if (!event.embedding.empty()) result.embedding = event.embedding;
      if (!event.prompt_logprobs.empty()) result.prompt_logprobs = event.prompt_logprobs;
      if (event.finish != FinishReason::kNone) {
        result.finish = event.finish;
        result.status = event.status;
        ++result.ends;
      }
    }
  }

  static void Step(Engine& engine, std::map<RequestId, Result>* results) {
    std::vector<TokenEvent> events;
    const Status status = engine.Step(&events);
    ASSERT_TRUE(status.ok()) << status;
    Collect(events, results);
  }

  static void ExpectNothingHeld(const Engine& engine) {
    const EngineStats stats = engine.stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
  }

  static std::map<RequestId, Result> Drain(Engine& engine) {
    std::map<RequestId, Result> results;
    for (int step = 0; step < 100000 && !engine.idle() && !HasFatalFailure(); ++step) Step(engine, &results);
    EXPECT_TRUE(engine.idle());
    ExpectNothingHeld(engine);
    for (const auto& [id, result] : results) EXPECT_EQ(result.ends, 1) << id;
    return results;
  }

  // Runs one request and checks its output. Returns the number of cached tokens.
  static int RunOne(Engine& engine, const Request& request) {
    const RequestId id = *engine.Add(request);
    const Result result = Drain(engine)[id];
    EXPECT_EQ(result.tokens, Alone(request));
    return result.cached_tokens;
  }

  FakeModel model_;
  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> threads_ = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
};

}  // namespace moesaic::engine
