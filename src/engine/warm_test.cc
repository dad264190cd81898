// The engine with a warm tier that stores evicted blocks unchanged. Outputs never depend on them. Int8 blocks
// are tested in warm_golden_test.cc, and random loads in disk_test.cc.
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

TEST_F(WarmTest, EvictedBlocksAreRestored) {
  auto engine = Make(Options(24, 80));
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < 6; ++i) {
      const int64_t computed = model_.computed;
      EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, i))), round == 0 ? 0 : 640) << i;
      if (round > 0) {
        EXPECT_EQ(model_.computed - computed, 700 - 640 + 4 - 1);
      }
    }
  }
  const EngineStats stats = engine->stats();
  EXPECT_GT(stats.cache_evictions, 100);
  EXPECT_EQ(stats.warm.stored_blocks, 60) << "each block is stored once";
  EXPECT_GE(stats.warm.restored_blocks, 100);
  EXPECT_EQ(stats.warm.evicted_blocks, 0);
  EXPECT_LE(stats.warm.bytes, Options(24, 80).warm_bytes);
}

// The tier stays within its budget and evicts the end of the least recently used prefix first.
TEST_F(WarmTest, EvictsTheLeastRecentlyUsedEndsFirst) {
  auto engine = Make(Options(13, 15));
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, i))), 0);
  const EngineStats stats = engine->stats();
  EXPECT_LE(stats.warm.blocks, stats.warm.capacity_blocks);
  EXPECT_GE(stats.warm.capacity_blocks, 15);
  EXPECT_GT(stats.warm.evicted_blocks, 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1))), 640) << "the whole prefix is found";
}

// The blocks that a step stores and restores are limited. The beginning of a prompt that is evicted in one
// step is stored.
TEST_F(WarmTest, LimitsTheBlocksCopiedInAStep) {
  EngineOptions options = Options(13, 40);
  options.warm_step_bytes = 4 * kBlockBytes;
  auto engine = Make(options);
  RunOne(*engine, Greedy(RandomPrompt(700, 1)));
  RunOne(*engine, Greedy(RandomPrompt(700, 2)));
  const cache::WarmTierStats stats = engine->stats().warm;
  EXPECT_EQ(stats.stored_blocks, 4);
  EXPECT_EQ(stats.dropped_blocks, 4) << "3 of the pool's 13 blocks were not needed";
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1))), 256 + 2 * 64)
      << "two blocks are still in the cache";
}

TEST_F(WarmTest, NamespacesShareNoBlocks) {
  auto engine = Make(Options(13, 40));
  RunOne(*engine, Greedy(RandomPrompt(700, 1), 4, "tenant"));
  RunOne(*engine, Greedy(RandomPrompt(700, 2)));
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1), 4, "other")), 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1))), 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1), 4, "tenant")), 640);
}

TEST_F(WarmTest, ClearCacheRemovesWarmBlocks) {
  auto engine = Make(Options(13, 40));
  RunOne(*engine, Greedy(RandomPrompt(700, 1)));
  RunOne(*engine, Greedy(RandomPrompt(700, 2)));
  EXPECT_GT(engine->stats().warm.blocks, 0);
  engine->ClearCache();
  EXPECT_EQ(engine->stats().warm.blocks, 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, 1))), 0);
}

// A request that waits for its blocks takes no blocks from running requests, and later requests run.
TEST_F(WarmTest, OtherRequestsRunDuringARestore) {
  auto engine = Make(Options(30, 60));
  const Request first = Greedy(RandomPrompt(700, 1));
  RunOne(*engine, first);
  for (uint32_t i = 2; i < 6; ++i) RunOne(*engine, Greedy(RandomPrompt(700, i)));
  std::map<RequestId, Result> results;
  const Request running = Greedy(RandomPrompt(200, 9), 100);
  const RequestId ahead = *engine->Add(running);
  for (int i = 0; i < 5; ++i) Step(*engine, &results);
  const size_t said = results[ahead].tokens.size();
  const RequestId waits = *engine->Add(first);
  const RequestId twin = *engine->Add(first);
  Step(*engine, &results);
  EXPECT_EQ(results[ahead].tokens.size(), said + 1) << "the step that restores blocks computes too";
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[ahead].tokens, Alone(running));
  for (const RequestId id : {waits, twin}) {
    EXPECT_EQ(results[id].tokens, Alone(first));
    EXPECT_EQ(results[id].cached_tokens, 640);
  }
  EXPECT_EQ(engine->stats().warm.restored_blocks, 10) << "blocks are restored once for both requests";
}

TEST_F(WarmTest, CancelBeforeAdmissionKeepsRestoredBlocks) {
  auto engine = Make(Options(13, 40));
  const Request first = Greedy(RandomPrompt(700, 1));
  RunOne(*engine, first);
  RunOne(*engine, Greedy(RandomPrompt(700, 2)));
  std::map<RequestId, Result> results;
  const RequestId id = *engine->Add(first);
  Step(*engine, &results);  // its blocks are restored
  engine->Cancel(id);
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[id].finish, FinishReason::kCancelled);
  EXPECT_EQ(RunOne(*engine, first), 640);
}

TEST_F(WarmTest, RefusesInvalidOptions) {
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
