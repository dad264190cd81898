#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "cache/block_pool.h"
#include "engine/fake_engine.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

class EngineTest : public FakeEngineTest {
 protected:
  EngineTest() : FakeEngineTest(512) {}

  std::unique_ptr<Engine> Make(EngineOptions options) {
    if (options.kv_bytes == 0) options.kv_bytes = 64 * kBlockBytes;
    return FakeEngineTest::Make(options);
  }

  // Returns twelve requests with different parameters.
  static std::vector<Request> Mixed() {
    std::vector<Request> requests;
    for (uint32_t i = 0; i < 12; ++i) {
      requests.push_back(MakeRequest(RandomPrompt(1 + static_cast<int>(i * 37 % 100), i),
                                     20 + static_cast<int>(i * 53 % 240), i % 2 == 0 ? 0.0f : 0.8f));
      requests.back().sampling.seed = 1000 + i;
      if (i % 3 == 0) requests.back().sampling.repetition_penalty = 1.3f;
      if (i % 4 == 1) requests.back().sampling.top_p = 0.7f;
      if (i % 5 == 2) requests.back().sampling.frequency_penalty = 0.4f;
    }
    return requests;
  }
};

TEST_F(EngineTest, GreedyOutputFollowsTheModel) {
  auto engine = Make({});
  const Request request = MakeRequest({1, 2, 3}, 100, 0);
  const RequestId id = *engine->Add(request);
  const Result result = Drain(*engine)[id];
  EXPECT_EQ(result.tokens, Alone(request));
  EXPECT_EQ(result.finish, FinishReason::kLength);
}

struct Load {
  int blocks, sequences, batch_tokens;
  int swap_blocks = 0;
};
void PrintTo(const Load& load, std::ostream* out) {
  *out << fmt::format("{} blocks, {} sequences, {} batch tokens, {} swap blocks", load.blocks, load.sequences,
                      load.batch_tokens, load.swap_blocks);
}
class BatchInvarianceTest : public EngineTest, public testing::WithParamInterface<Load> {};

// The tokens of a request do not depend on other requests, on the chunks of its prompt and on preemption.
TEST_P(BatchInvarianceTest, OutputsAreThoseOfEachRequestAlone) {
  // A row takes longer than copying a block, as with a real model.
  if (GetParam().swap_blocks > 0) model_.row_time = std::chrono::microseconds(20);
  auto engine = Make({.kv_bytes = GetParam().blocks * kBlockBytes,
                      .swap_bytes = GetParam().swap_blocks * kBlockBytes,
                      .max_sequences = GetParam().sequences,
                      .max_batch_tokens = GetParam().batch_tokens});
  std::map<RequestId, Request> requests;
  for (const Request& request : Mixed()) requests[*engine->Add(request)] = request;
  const auto results = Drain(*engine);
  ASSERT_EQ(results.size(), requests.size());
  for (const auto& [id, request] : requests) EXPECT_EQ(results.at(id).tokens, Alone(request)) << id;
  EXPECT_LE(model_.largest_step, static_cast<size_t>(GetParam().batch_tokens));
  if (GetParam().blocks <= 12) {
    EXPECT_GT(engine->stats().preemptions, 0);
  }
  EXPECT_EQ(engine->stats().swapped_in > 0, GetParam().swap_blocks > 0);
  EXPECT_EQ(engine->stats().swapped_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Loads, BatchInvarianceTest,
                         testing::Values(Load{64, 16, 512}, Load{64, 1, 1}, Load{64, 3, 7}, Load{10, 6, 64},
                                         Load{9, 12, 33}, Load{8, 4, 300}, Load{9, 12, 33, 3},
                                         Load{8, 4, 300, 100}));

TEST_F(EngineTest, LaterRequestsDoNotChangeOutputs) {
  auto engine = Make({.max_sequences = 4, .max_batch_tokens = 50});
  std::map<RequestId, Request> requests;
  std::map<RequestId, Result> results;
  for (const Request& request : Mixed()) {
    requests[*engine->Add(request)] = request;
    for (int i = 0; i < 9; ++i) {
      std::vector<TokenEvent> events;
      ASSERT_TRUE(engine->Step(&events).ok());
      Collect(events, &results);
    }
  }
  for (auto& [id, rest] : Drain(*engine)) {
    results[id].tokens.insert(results[id].tokens.end(), rest.tokens.begin(), rest.tokens.end());
  }
  for (const auto& [id, request] : requests) EXPECT_EQ(results.at(id).tokens, Alone(request)) << id;
}

TEST_F(EngineTest, EndsAtStopAndEosIdsAndOmitsThem) {
  const Request base = MakeRequest({5, 6}, 50, 0);
  const std::vector<int32_t> all = Alone(base);
  const int32_t stop = all[10];
  const auto first = std::find(all.begin(), all.end(), stop) - all.begin();
  const std::vector<int32_t> before(all.begin(), all.begin() + first);

  Request with_stop = base;
  with_stop.sampling.stop_ids = {stop};
  auto engine = Make({});
  RequestId id = *engine->Add(with_stop);
  Result result = Drain(*engine)[id];
  EXPECT_EQ(result.tokens, before);
  EXPECT_EQ(result.finish, FinishReason::kStop);

  auto with_eos = Make({.eos_ids = {stop}});
  id = *with_eos->Add(base);
  EXPECT_EQ(Drain(*with_eos)[id].tokens, before);

  Request ignoring = base;
  ignoring.sampling.ignore_eos = true;
  id = *with_eos->Add(ignoring);
  EXPECT_EQ(Drain(*with_eos)[id].tokens, all);
}

TEST_F(EngineTest, MinTokensDelaysTheEnd) {
  const Request base = MakeRequest({5, 6}, 50, 0);
  Request request = base;
  request.sampling.stop_ids = {Alone(base)[0]};
  request.sampling.min_tokens = 20;
  auto engine = Make({});
  const RequestId id = *engine->Add(request);
  const Result result = Drain(*engine)[id];
  ASSERT_GE(result.tokens.size(), 20U);
  EXPECT_EQ(std::count(result.tokens.begin(), result.tokens.end(), request.sampling.stop_ids[0]), 0);
}

TEST_F(EngineTest, EndsByLengthAtTheContextOrCacheLimit) {
  auto small_context = Make({.max_context = 20});
  EXPECT_EQ(small_context->max_context(), 20);
  RequestId id = *small_context->Add(MakeRequest(RandomPrompt(15, 1), 100, 0));
  Result result = Drain(*small_context)[id];
  EXPECT_EQ(result.tokens.size(), 5U);
  EXPECT_EQ(result.finish, FinishReason::kLength);

  auto small_cache = Make({.kv_bytes = kBlockBytes});
  EXPECT_EQ(small_cache->max_context(), 64);
  id = *small_cache->Add(MakeRequest(RandomPrompt(60, 1), 100, 0));
  EXPECT_EQ(Drain(*small_cache)[id].tokens.size(), 4U);
}

TEST_F(EngineTest, CancelFreesBlocksAndIsReportedOnce) {
  auto engine = Make({});
  const RequestId keep = *engine->Add(MakeRequest(RandomPrompt(70, 1), 5, 0));
  const RequestId drop = *engine->Add(MakeRequest(RandomPrompt(70, 2), 500, 0));
  std::vector<TokenEvent> events;
  ASSERT_TRUE(engine->Step(&events).ok());
  const auto held_blocks = [&] {
    const EngineStats stats = engine->stats();
    return stats.total_blocks - stats.free_blocks - stats.cached_blocks;
  };
  const int held = held_blocks();
  engine->Cancel(drop);
  engine->Cancel(drop);
  engine->Cancel(12345);
  EXPECT_EQ(held_blocks(), held / 2);
  std::map<RequestId, Result> results = Drain(*engine);
  EXPECT_EQ(results[drop].finish, FinishReason::kCancelled);
  EXPECT_TRUE(results[drop].tokens.empty());
  EXPECT_EQ(results[keep].finish, FinishReason::kLength);
}

TEST_F(EngineTest, ReportsACancellationWithoutOtherRequests) {
  auto engine = Make({});
  engine->Cancel(*engine->Add(MakeRequest({1}, 5, 0)));
  EXPECT_FALSE(engine->idle());
  EXPECT_EQ(Drain(*engine).size(), 1U);
}

TEST_F(EngineTest, AFailedStepCanBeRetried) {
  auto engine = Make({.max_batch_tokens = 16});
  const Request request = MakeRequest(RandomPrompt(40, 3), 10, 0);
  const RequestId id = *engine->Add(request);
  std::map<RequestId, Result> results;
  for (int step = 0; !engine->idle(); ++step) {
    std::vector<TokenEvent> events;
    model_.fail_next = step % 3 == 1;
    const bool should_fail = model_.fail_next;
    EXPECT_EQ(engine->Step(&events).ok(), !should_fail);
    if (should_fail) {
      EXPECT_TRUE(events.empty());
    }
    Collect(events, &results);
  }
  EXPECT_EQ(results[id].tokens, Alone(request));
}

double LogSoftmax(std::span<const float> logits, int32_t token) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  return logits[token] - std::log(sum);
}

TEST_F(EngineTest, PromptLogprobsDoNotDependOnChunksAndPreemption) {
  for (const int blocks : {5, 64}) {
    auto engine = Make({.kv_bytes = blocks * kBlockBytes, .max_sequences = 4, .max_batch_tokens = 30});
    std::map<RequestId, Request> requests;
    for (uint32_t i = 0; i < 4; ++i) {
      Request request = MakeRequest(RandomPrompt(50, i), 70, 0);
      request.prompt_logprobs = true;
      request.sampling.logprobs = 2;
      requests[*engine->Add(request)] = request;
    }
    const auto results = Drain(*engine);
    for (const auto& [id, request] : requests) {
      const Result& result = results.at(id);
      ASSERT_EQ(result.prompt_logprobs.size(), request.prompt.size() - 1);
      for (size_t i = 0; i + 1 < request.prompt.size(); ++i) {
        const auto logits = FakeModel::LogitsAfter(std::span(request.prompt).first(i + 1));
        EXPECT_NEAR(result.prompt_logprobs[i].logprob, LogSoftmax(logits, request.prompt[i + 1]), 1e-5);
        EXPECT_EQ(result.prompt_logprobs[i].top.size(), 2U);
      }
      EXPECT_EQ(result.tokens, Alone(request));
      std::vector<int32_t> tokens = request.prompt;
      for (size_t i = 0; i < result.tokens.size(); ++i) {
        EXPECT_NEAR(result.logprobs[i], LogSoftmax(FakeModel::LogitsAfter(tokens), result.tokens[i]), 1e-5);
        tokens.push_back(result.tokens[i]);
      }
    }
  }
}

TEST_F(EngineTest, MaxTokensZeroOnlyReadsThePrompt) {
  auto engine = Make({.max_batch_tokens = 20});
  Request request = MakeRequest(RandomPrompt(50, 1), 0, 0);
  request.prompt_logprobs = true;
  const RequestId id = *engine->Add(request);
  request.prompt_logprobs = false;
  const RequestId silent = *engine->Add(request);
  std::map<RequestId, Result> results = Drain(*engine);
  EXPECT_EQ(results[id].prompt_logprobs.size(), 49U);
  EXPECT_EQ(results[id].finish, FinishReason::kLength);
  EXPECT_TRUE(results[id].tokens.empty());
  EXPECT_TRUE(results[silent].prompt_logprobs.empty());
  EXPECT_EQ(engine->stats().prompt_tokens, 100);
  EXPECT_EQ(engine->stats().output_tokens, 0);
}

TEST_F(EngineTest, ASecondTurnComputesOnlyNewTokens) {
  auto engine = Make({});
  Request turn = MakeRequest(RandomPrompt(200, 1), 80, 0);
  std::vector<TokenEvent> events;
  RequestId id = *engine->Add(turn);
  std::map<RequestId, Result> results = Drain(*engine);
  EXPECT_EQ(results[id].cached_tokens, 0);
  const std::vector<int32_t> answer = results[id].tokens;

  turn.prompt.insert(turn.prompt.end(), answer.begin(), answer.end());
  turn.prompt.push_back(7);
  const int64_t before = model_.computed;
  id = *engine->Add(turn);
  results = Drain(*engine);
  EXPECT_EQ(results[id].tokens, Alone(turn));
  EXPECT_EQ(results[id].cached_tokens, 256)
      << "the whole blocks of the first turn and its answer are found, of 281 tokens";
  EXPECT_EQ(model_.computed - before, 281 - 256 + 79);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.cache_queries, 200 + 281);
  EXPECT_EQ(stats.cache_hits, 256);
}

// Three conversations of four blocks each share a pool of eight. The session hint of the second decides
// whether its blocks or the older ones of the first are evicted for the third.
TEST_F(EngineTest, SessionHintsDetermineTheOrderOfEviction) {
  const std::vector<int32_t> prompts[] = {RandomPrompt(250, 1), RandomPrompt(250, 2), RandomPrompt(250, 3)};
  const auto cached = [&](SessionNote first, SessionNote second, int max_tokens) {
    auto engine = Make({.kv_bytes = 8 * kBlockBytes});
    const SessionNote notes[] = {first, second, {}};
    for (int i = 0; i < 3; ++i) {
      Request request = MakeRequest(prompts[i], max_tokens, 0);
      request.session = notes[i];
      EXPECT_TRUE(engine->Add(request).ok());
      Drain(*engine);
    }
    std::string found;
    for (const int i : {0, 1}) {
      const RequestId id = *engine->Add(MakeRequest(prompts[i], 1, 0));
      found += fmt::format("{} ", Drain(*engine)[id].cached_tokens / tensor::kKvBlockTokens);
    }
    return found;
  };
  const SessionNote ends{.state = cache::Session::kEnds};
  const auto returns_in = [](double seconds) {
    return SessionNote{.state = cache::Session::kContinues, .returns_in = seconds};
  };
  for (const int max_tokens : {1, 0}) {
    const std::string plain = cached({}, {}, max_tokens);
    const std::string ended = cached({}, ends, max_tokens);
    EXPECT_EQ(plain, cached(ends, {}, max_tokens)) << "blocks of the older conversation are evicted anyway";
    EXPECT_NE(plain, ended);
    EXPECT_EQ(ended[0], '3') << "blocks of the second were evicted, though it is younger";
    // The request rate is unknown for the first hint of a return time, so that only the second hint counts.
    EXPECT_EQ(cached({}, returns_in(1e9), max_tokens), ended) << "the second returns last";
    EXPECT_EQ(cached({}, returns_in(1e-6), max_tokens), plain) << "the second returns first";
    const SessionNote nothing{.state = cache::Session::kContinues, .tokens = 0};
    EXPECT_EQ(cached({}, nothing, max_tokens), ended);
  }
}

TEST_F(EngineTest, RequestsWithEqualPromptsComputeThemOnce) {
  auto engine = Make({.max_batch_tokens = 64});
  std::map<RequestId, Request> requests;
  for (int i = 0; i < 5; ++i) {
    const Request request = MakeRequest(RandomPrompt(300, 1), 1, 0.9f);
    requests[*engine->Add(request)] = request;
  }
  Drain(*engine);
  EXPECT_EQ(model_.computed, 300 + 4 * (300 - 256));
}

TEST_F(EngineTest, NamespacesShareNoBlocks) {
  auto engine = Make({});
  Request request = MakeRequest(RandomPrompt(200, 1), 1, 0);
  engine->Add(request).value();
  Drain(*engine);
  request.cache_namespace = "other";
  const RequestId id = *engine->Add(request);
  EXPECT_EQ(Drain(*engine)[id].cached_tokens, 0);
}

// Conversations share prefixes, diverge inside blocks and grow. The pool has room for few of them.
TEST_F(EngineTest, CachedBlocksDoNotChangeOutputs) {
  for (const char* eviction : {"cost", "lru"}) {
    auto engine = Make(
        {.kv_bytes = 14 * kBlockBytes, .max_sequences = 3, .max_batch_tokens = 90, .eviction = eviction});
    std::mt19937 random(3);
    const std::vector<int32_t> system = RandomPrompt(150, 0);
    std::vector<std::vector<int32_t>> talks(6, system);
    for (int round = 0; round < 8; ++round) {
      std::map<RequestId, std::pair<Request, size_t>> asked;
      for (size_t i = 0; i < talks.size(); ++i) {
        std::vector<int32_t>& talk = talks[i];
        if (talk.size() > 380) talk.resize(100 + random() % 100);  // continues from an earlier token
        const std::vector<int32_t> question = RandomPrompt(1 + static_cast<int>(random() % 40), random());
        talk.insert(talk.end(), question.begin(), question.end());
        const Request request = MakeRequest(talk, 1 + static_cast<int>(random() % 60), 0);
        asked[*engine->Add(request)] = {request, i};
      }
      const auto results = Drain(*engine);
      for (const auto& [id, ask] : asked) {
        const std::vector<int32_t>& answer = results.at(id).tokens;
        ASSERT_EQ(answer, Alone(ask.first)) << id;
        talks[ask.second].insert(talks[ask.second].end(), answer.begin(), answer.end());
      }
    }
    EXPECT_GT(engine->stats().cache_hits, 1000);
    EXPECT_GT(engine->stats().cache_evictions, 0);
    engine->ClearCache();
    EXPECT_EQ(engine->stats().free_blocks, 14);
  }
}

TEST_F(EngineTest, AnEmbeddingIsTheLastHiddenState) {
  auto engine = Make({.max_batch_tokens = 50});
  Request request = MakeRequest(RandomPrompt(130, 1), 0, 0);
  request.want_embedding = true;
  const std::array<float, 4> expected = FakeModel::HiddenAfter(request.prompt);
  double squares = 0;
  for (const float value : expected) squares += double{value} * value;
  for (int round = 0; round < 2; ++round) {  // the second round uses the cache
    const RequestId id = *engine->Add(request);
    const std::vector<float> embedding = Drain(*engine)[id].embedding;
    ASSERT_EQ(embedding.size(), 4U);
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(embedding[i], expected[i] / std::sqrt(squares), 1e-6);
  }
  request.sampling.max_tokens = 1;
  EXPECT_THAT(Message(engine->Add(request).status()), HasSubstr("max_tokens must be 0 for an embedding"));
}

TEST_F(EngineTest, EndsRequestsPastTheirDeadline) {
  auto engine = Make({.max_sequences = 1});
  Request late = MakeRequest({1, 2}, 400, 0);
  late.deadline = Clock::now() - std::chrono::seconds(1);
  const RequestId keep = *engine->Add(MakeRequest({1, 2}, 4, 0));
  const RequestId drop = *engine->Add(late);
  std::map<RequestId, Result> results = Drain(*engine);
  EXPECT_EQ(results[keep].finish, FinishReason::kLength);
  EXPECT_EQ(results[drop].finish, FinishReason::kDeadline);
}

TEST_F(EngineTest, ReportsTheTimesOfARequest) {
  auto engine = Make({});
  const Clock::time_point before = Clock::now();
  ASSERT_TRUE(engine->Add(MakeRequest({1, 2}, 2, 0)).ok());
  std::vector<TokenEvent> events;
  while (!engine->idle()) ASSERT_TRUE(engine->Step(&events).ok());
  ASSERT_EQ(events.size(), 2U);
  const RequestTimes& times = events[1].times;
  EXPECT_LE(before, times.queued);
  EXPECT_LE(times.queued, *times.started);
  EXPECT_LE(*times.started, *times.first_token);
  EXPECT_EQ(times.first_token, events[0].times.first_token);
}

class CountingObserver : public cache::KvObserver {
 public:
  void Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
              std::span<const int32_t> tokens, std::string_view) override {
    EXPECT_EQ(tokens.size(), hashes.size() * tensor::kKvBlockTokens);
    EXPECT_TRUE(!parent || here_.contains(*parent));
    for (const uint64_t hash : hashes) EXPECT_TRUE(here_.insert(hash).second);
  }
  void Removed(std::span<const uint64_t> hashes) override {
    for (const uint64_t hash : hashes) EXPECT_EQ(here_.erase(hash), 1U);
  }
  size_t blocks() const { return here_.size(); }

 private:
  std::set<uint64_t> here_;
};

TEST_F(EngineTest, ObserversAreNotifiedOfCachedBlocks) {
  const auto observer = std::make_shared<CountingObserver>();
  auto engine = Make({.kv_bytes = 8 * kBlockBytes, .kv_observer = observer});
  for (uint32_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(engine->Add(MakeRequest(RandomPrompt(200, i % 3), 5, 0)).ok());
    Drain(*engine);
    EXPECT_EQ(observer->blocks(), static_cast<size_t>(engine->stats().cached_blocks));
  }
  EXPECT_GT(engine->stats().cache_evictions, 0);
  engine->ClearCache();
  EXPECT_EQ(observer->blocks(), 0U);
}

TEST_F(EngineTest, SeedsOfTheEngineAreRepeatable) {
  const auto run = [&](uint64_t seed) {
    auto engine = Make({.seed = seed});
    const RequestId first = *engine->Add(MakeRequest({1}, 30, 1));
    const RequestId second = *engine->Add(MakeRequest({1}, 30, 1));
    auto results = Drain(*engine);
    EXPECT_NE(results[first].tokens, results[second].tokens);
    return results[second].tokens;
  };
  EXPECT_EQ(run(5), run(5));
  EXPECT_NE(run(5), run(6));
}

TEST_F(EngineTest, ScoreReturnsAllRowsInOrder) {
  auto engine = Make({.max_batch_tokens = 16});
  const std::vector<int32_t> ids = RandomPrompt(150, 4);
  int64_t next = 0;
  const Status status = engine->Score(ids, [&](int64_t first, std::span<const float> rows) {
    EXPECT_EQ(first, next);
    for (size_t i = 0; i * FakeModel::kVocab < rows.size(); ++i, ++next) {
      const auto expected = FakeModel::LogitsAfter(std::span(ids).first(next + 1));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             rows.begin() + static_cast<int64_t>(i) * FakeModel::kVocab));
    }
    return OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(next, 150);
  EXPECT_EQ(engine->stats().free_blocks + engine->stats().cached_blocks, engine->stats().total_blocks);

  const Status stopped =
      engine->Score(ids, [](int64_t, std::span<const float>) { return Cancelled("enough"); });
  EXPECT_EQ(stopped.code(), StatusCode::kCancelled);
  EXPECT_EQ(engine->stats().free_blocks + engine->stats().cached_blocks, engine->stats().total_blocks);
  ASSERT_TRUE(engine->Add(MakeRequest({1}, 5, 0)).ok());
  EXPECT_FALSE(engine->Score(ids, [](int64_t, std::span<const float>) { return OkStatus(); }).ok());
}

TEST(KeySummaryKindTest, ParsesNames) {
  EXPECT_EQ(*ParseKeySummaryKind("box"), KeySummaryKind::kBox);
  EXPECT_EQ(*ParseKeySummaryKind("sketch"), KeySummaryKind::kSketch);
  EXPECT_EQ(SparsityOptions().summary_kind, KeySummaryKind::kBox);
  for (const char* wrong : {"", "auto", "Box", "sketches"}) {
    const auto kind = ParseKeySummaryKind(wrong);
    ASSERT_FALSE(kind.ok()) << wrong;
    EXPECT_THAT(std::string(kind.status().message()),
                HasSubstr(std::string("key summaries must be box or sketch, found \"") + wrong + "\""));
  }
}

TEST_F(EngineTest, NamesTheReasonOfARefusal) {
  auto engine = Make({.max_context = 100});
  const auto fault = [&](const Request& request) { return Message(engine->Add(request).status()); };
  EXPECT_EQ(fault(MakeRequest({}, 5, 0)), "the prompt is empty");
  EXPECT_EQ(fault(MakeRequest({1, 97}, 5, 0)), "token 1 of the prompt is outside the vocabulary [0, 97): 97");
  EXPECT_EQ(fault(MakeRequest({-1}, 5, 0)), "token 0 of the prompt is outside the vocabulary [0, 97): -1");
  EXPECT_EQ(fault(MakeRequest(RandomPrompt(100, 1), 5, 0)),
            "the prompt leaves no room in the context of 100 tokens: it has 100");
  EXPECT_THAT(fault(MakeRequest({1}, 5, -2)), HasSubstr("temperature"));
  auto one_block = Make({.kv_bytes = kBlockBytes});
  EXPECT_EQ(Message(one_block->Add(MakeRequest(RandomPrompt(64, 1), 5, 0)).status()),
            "the prompt leaves no room in the KV cache of 64 tokens: it has 64");

  const auto refused = [&](const EngineOptions& options) {
    return Message(Engine::Create(model_, kernels_, *threads_, options).status());
  };
  EXPECT_THAT(refused({.max_sequences = 0}), HasSubstr("max_sequences"));
  EXPECT_THAT(refused({.max_sequences = 9, .max_batch_tokens = 8}), HasSubstr("max_batch_tokens"));
  EXPECT_THAT(refused({.max_context = 513}), HasSubstr("the model's context is 512"));
  EXPECT_THAT(refused({.kv_dtype = "f16"}), HasSubstr("auto, f32, bf16 or int8"));
  EXPECT_THAT(refused({.kv_bytes = 100}), HasSubstr("one block of 64 tokens"));
  EXPECT_THAT(refused({.eviction = "fifo"}), HasSubstr("cost or lru"));
  EXPECT_THAT(refused({.max_overtakes = 0}), HasSubstr("max_overtakes"));
}

}  // namespace
}  // namespace moesaic::engine
