// The engine with blocks that are kept as they are when the cache gives them up: what it says never depends
// on them. What int8 does to them is in warm_golden_test.cc; storms are in disk_test.cc.
#include <gmock/gmock.h>

#include "engine/fake_engine.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

class WarmTest : public FakeEngineTest {
 protected:
  static EngineOptions Options(int blocks, int warm) {
    EngineOptions options;
    options.kv_bytes = blocks * kBlockBytes;
    options.warm_bytes = warm * (kBlockBytes + 1024);
    options.warm_exact = true;
    return options;
  }
};

TEST_F(WarmTest, WhatTheCacheGivesUpComesBack) {
  auto engine = Make(Options(24, 80));
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < 6; ++i) {
      const int64_t computed = model_.computed;
      EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, i))), round == 0 ? 0 : 640) << i;
      if (round > 0) {
        EXPECT_EQ(model_.computed - computed, 700 - 640 + 4 - 1);
      }
    }
  }
  const EngineStats stats = engine->stats();
  EXPECT_GT(stats.cache_evictions, 100);
  EXPECT_EQ(stats.warm.stored_blocks, 60) << "each once";
  EXPECT_GE(stats.warm.restored_blocks, 100);
  EXPECT_EQ(stats.warm.evicted_blocks, 0);
  EXPECT_LE(stats.warm.bytes, Options(24, 80).warm_bytes);
}

// The memory cap holds, and the end of what was not asked for longest goes first.
TEST_F(WarmTest, TheOldestEndsGoFirst) {
  auto engine = Make(Options(13, 15));
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, i))), 0);
  const EngineStats stats = engine->stats();
  EXPECT_LE(stats.warm.blocks, stats.warm.capacity_blocks);
  EXPECT_GE(stats.warm.capacity_blocks, 15);
  EXPECT_GT(stats.warm.evicted_blocks, 0);
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1))), 640) << "whole";
}

// One step keeps and brings back so much; of a prompt that goes in one step, its beginning stays.
TEST_F(WarmTest, AStepsWorkIsBounded) {
  EngineOptions options = Options(13, 40);
  options.warm_step_bytes = 4 * kBlockBytes;
  auto engine = Make(options);
  Ask(*engine, Greedy(RandomPrompt(700, 1)));
  Ask(*engine, Greedy(RandomPrompt(700, 2)));
  const cache::WarmTierStats stats = engine->stats().warm;
  EXPECT_EQ(stats.stored_blocks, 4);
  EXPECT_EQ(stats.dropped_blocks, 4) << "3 of the pool's 13 blocks were not asked for";
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1))), 256 + 2 * 64) << "two are still in the cache";
}

TEST_F(WarmTest, NamespacesStayApart) {
  auto engine = Make(Options(13, 40));
  Ask(*engine, Greedy(RandomPrompt(700, 1), 4, "tenant"));
  Ask(*engine, Greedy(RandomPrompt(700, 2)));
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1), 4, "other")), 0);
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1))), 0);
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1), 4, "tenant")), 640);
}

TEST_F(WarmTest, ClearingForgetsThem) {
  auto engine = Make(Options(13, 40));
  Ask(*engine, Greedy(RandomPrompt(700, 1)));
  Ask(*engine, Greedy(RandomPrompt(700, 2)));
  EXPECT_GT(engine->stats().warm.blocks, 0);
  engine->ClearCache();
  EXPECT_EQ(engine->stats().warm.blocks, 0);
  EXPECT_EQ(Ask(*engine, Greedy(RandomPrompt(700, 1))), 0);
}

// A request that waits for its blocks takes nothing from who runs, and others behind it go on.
TEST_F(WarmTest, RunningRequestsGoOn) {
  auto engine = Make(Options(30, 60));
  const Request first = Greedy(RandomPrompt(700, 1));
  Ask(*engine, first);
  for (uint32_t i = 2; i < 6; ++i) Ask(*engine, Greedy(RandomPrompt(700, i)));
  std::map<RequestId, Result> results;
  const Request running = Greedy(RandomPrompt(200, 9), 100);
  const RequestId ahead = *engine->Add(running);
  for (int i = 0; i < 5; ++i) Step(*engine, &results);
  const size_t said = results[ahead].tokens.size();
  const RequestId waits = *engine->Add(first);
  const RequestId twin = *engine->Add(first);
  Step(*engine, &results);
  EXPECT_EQ(results[ahead].tokens.size(), said + 1) << "the step that brings them back computes too";
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[ahead].tokens, Alone(running));
  for (const RequestId id : {waits, twin}) {
    EXPECT_EQ(results[id].tokens, Alone(first));
    EXPECT_EQ(results[id].cached_tokens, 640);
  }
  EXPECT_EQ(engine->stats().warm.restored_blocks, 10) << "once for both";
}

TEST_F(WarmTest, CancelledBeforeItIsAdmitted) {
  auto engine = Make(Options(13, 40));
  const Request first = Greedy(RandomPrompt(700, 1));
  Ask(*engine, first);
  Ask(*engine, Greedy(RandomPrompt(700, 2)));
  std::map<RequestId, Result> results;
  const RequestId id = *engine->Add(first);
  Step(*engine, &results);  // its blocks are back
  engine->Cancel(id);
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[id].finish, FinishReason::kCancelled);
  EXPECT_EQ(Ask(*engine, first), 640);
}

TEST_F(WarmTest, RefusesWhatItCannotDo) {
  EngineOptions options = Options(20, 20);
  options.prefix_cache = false;
  EXPECT_THAT(Message(Engine::Create(model_, kernels_, *threads_, options).status()),
              HasSubstr("need the prefix cache"));
  options = Options(20, 20);
  options.warm_bytes = 100;
  EXPECT_THAT(Message(Engine::Create(model_, kernels_, *threads_, options).status()),
              HasSubstr("the memory for warm KV blocks must be at least"));
}

}  // namespace
}  // namespace moesaic::engine
