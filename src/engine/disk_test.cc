// The engine with blocks on disk. Outputs never depend on them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "engine/fake_engine.h"
#include "engine/kv_budget.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

class DiskTest : public FakeEngineTest {
 protected:
  DiskTest() {
    std::string pattern = testing::TempDir() + "disk_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~DiskTest() override { std::filesystem::remove_all(folder_); }

  EngineOptions Options(int blocks) const {
    EngineOptions options;
    options.kv_bytes = blocks * kBlockBytes;
    options.disk = DiskOptions{.folder = folder_, .bytes = 8 << 20, .model = "fake"};
    return options;
  }

  std::string folder_;
};

TEST_F(DiskTest, ARestartedEngineFindsStoredPrefixes) {
  const Request first = Greedy(RandomPrompt(1000, 1), 40);
  {
    auto engine = Make(Options(64));
    EXPECT_EQ(RunOne(*engine, first), 0);
    EXPECT_TRUE(engine->saving());
    engine->SaveCache();
    EXPECT_FALSE(engine->saving());
    EXPECT_EQ(engine->stats().disk.blocks, 1039 / 64) << "blocks of the output are stored too";
  }
  auto engine = Make(Options(64));
  const int64_t computed = model_.computed;
  EXPECT_EQ(RunOne(*engine, first), 960);
  EXPECT_EQ(model_.computed - computed, 1000 - 960 + 40 - 1);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.cache_hits, 960);
  EXPECT_EQ(stats.disk.loads, 1);
  EXPECT_EQ(stats.disk.loaded_blocks, 15);
  EXPECT_EQ(stats.disk.lost_blocks, 0);
  // The next turn continues the first one.
  EXPECT_EQ(RunOne(*engine, Greedy(Joined(Joined(first.prompt, Alone(first)), RandomPrompt(100, 2)))), 1024);
  EXPECT_EQ(engine->stats().disk.loads, 1) << "all blocks are in memory";
}

TEST_F(DiskTest, SaveCacheCanBeCancelled) {
  const Request request = Greedy(RandomPrompt(1000, 1));
  {
    auto engine = Make(Options(64));
    RunOne(*engine, request);
    int asked = 0;
    engine->SaveCache([&] { return ++asked > 0; });
    EXPECT_GT(asked, 0);
  }
  EXPECT_EQ(RunOne(*Make(Options(64)), request), 960) << "pending blocks are written nevertheless";
}

TEST_F(DiskTest, EvictedBlocksAreLoaded) {
  auto engine = Make(Options(24));
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < 6; ++i) {
      EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(700, i))), round == 0 ? 0 : 640) << i;
      engine->SaveCache();
    }
  }
  EXPECT_GT(engine->stats().cache_evictions, 100);
  EXPECT_EQ(engine->stats().disk.written_blocks, 60) << "each block is written once";
  EXPECT_GE(engine->stats().disk.loads, 11);
}

TEST_F(DiskTest, OtherRequestsRunDuringALoad) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(1000, 1)));
    engine->SaveCache();
  }
  auto engine = Make(Options(64));
  const Request running = Greedy(RandomPrompt(10, 7), 30);
  const RequestId running_id = *engine->Add(running);
  std::map<RequestId, Result> results;
  Step(*engine, &results);
  const Request cold = Greedy(RandomPrompt(1000, 1));
  const Request same = Greedy(Joined(RandomPrompt(1000, 1), {5}));
  const RequestId cold_id = *engine->Add(cold);
  const RequestId same_id = *engine->Add(same);
  Step(*engine, &results);
  EXPECT_EQ(results[running_id].tokens.size(), 2U) << "the step that begins the load computes too";
  EXPECT_EQ(engine->stats().running, 1);
  EXPECT_EQ(engine->stats().waiting, 2);
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[running_id].tokens, Alone(running));
  EXPECT_EQ(results[cold_id].tokens, Alone(cold));
  EXPECT_EQ(results[cold_id].cached_tokens, 960);
  EXPECT_EQ(results[same_id].tokens, Alone(same));
  EXPECT_EQ(results[same_id].cached_tokens, 960);
  EXPECT_EQ(engine->stats().disk.loads, 1) << "requests with the same prefix share one load";
}

TEST_F(DiskTest, ScoredPromptsDoNotWaitForALoad) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(1000, 1)));
    engine->SaveCache();
  }
  auto engine = Make(Options(64));
  const Request cold = Greedy(RandomPrompt(1000, 1));
  Request scored = cold;
  scored.prompt_logprobs = true;
  const RequestId cold_id = *engine->Add(cold);
  const RequestId scored_id = *engine->Add(scored);
  std::map<RequestId, Result> results;
  Step(*engine, &results);
  EXPECT_EQ(engine->stats().running, 1) << "the scored prompt is computed in any case";
  EXPECT_EQ(engine->stats().waiting, 1);
  while (!engine->idle()) Step(*engine, &results);
  EXPECT_EQ(results[cold_id].tokens, Alone(cold));
  EXPECT_EQ(results[scored_id].tokens, Alone(scored));
}

// S9: a request that reached the overtake limit computes its tokens, and no younger request overtakes it.
TEST_F(DiskTest, DueRequestsDoNotLoad) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(300, 1)));
    engine->SaveCache();
  }
  EngineOptions options = Options(64);
  options.max_sequences = 1;
  options.max_overtakes = 1;
  auto engine = Make(options);
  Request cold = Greedy(RandomPrompt(300, 1));
  cold.priority = 1;
  const RequestId cold_id = *engine->Add(cold);
  engine->Add(Greedy(RandomPrompt(10, 2))).value();
  auto results = Drain(*engine);
  EXPECT_EQ(results[cold_id].tokens, Alone(cold));
  EXPECT_EQ(results[cold_id].cached_tokens, 0);
  EXPECT_EQ(engine->stats().disk.loads, 0);
}

TEST_F(DiskTest, LoadingRequestsAtTheOvertakeLimitAreNotOvertaken) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(1000, 1)));
    engine->SaveCache();
  }
  EngineOptions options = Options(64);
  options.max_overtakes = 1;
  auto engine = Make(options);
  Request cold = Greedy(RandomPrompt(1000, 1));
  cold.priority = 1;
  const RequestId cold_id = *engine->Add(cold);
  engine->Add(Greedy(RandomPrompt(10, 2), 30)).value();  // overtakes it when its load begins
  std::map<RequestId, Result> results;
  Step(*engine, &results);
  const Request late = Greedy(RandomPrompt(10, 3));
  const RequestId late_id = *engine->Add(late);
  while (!engine->idle()) {
    Step(*engine, &results);
    EXPECT_LE(results[late_id].tokens.size(), results[cold_id].tokens.size());
  }
  EXPECT_EQ(results[cold_id].tokens, Alone(cold));
  EXPECT_EQ(results[cold_id].cached_tokens, 960);
  EXPECT_EQ(results[late_id].tokens, Alone(late));
}

TEST_F(DiskTest, CancelDuringALoadFreesBlocks) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(1000, 1)));
    engine->SaveCache();
  }
  auto engine = Make(Options(64));
  for (int round = 0; round < 20; ++round) {
    const RequestId id = *engine->Add(Greedy(RandomPrompt(1000, 1)));
    std::map<RequestId, Result> results;
    Step(*engine, &results);
    engine->Cancel(id);
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
    EXPECT_EQ(Drain(*engine)[id].finish, FinishReason::kCancelled);
  }
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(1000, 1))), 960);
}

// No request runs, the prompt needs the whole pool, and the tree has a block that shares a part of the next
// one.
TEST_F(DiskTest, LoadsAPromptOfThePoolSizeAfterABranchWasCached) {
  constexpr int kShared = 10 * 64 + 32, kPrompt = 24 * 64 - 10;
  auto engine = Make(Options(24));
  const std::vector<int32_t> shared = RandomPrompt(kShared, 1);
  const Request first = Greedy(Joined(shared, RandomPrompt(kPrompt - kShared, 2)));
  RunOne(*engine, first);
  engine->SaveCache();
  EXPECT_EQ(RunOne(*engine, Greedy(Joined(shared, RandomPrompt(kPrompt - kShared, 3)))), 640);
  EXPECT_EQ(RunOne(*engine, first), 23 * 64);
  EXPECT_EQ(engine->stats().disk.loads, 1);
}

TEST_F(DiskTest, NamespacesShareNoBlocks) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(500, 1), 4, "tenant"));
    engine->SaveCache();
  }
  auto engine = Make(Options(64));
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1), 4, "other")), 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1))), 0);
  EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1), 4, "tenant")), 448);
}

TEST_F(DiskTest, AnotherModelsBlocksAreRefused) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(500, 1)));
    engine->SaveCache();
  }
  EngineOptions options = Options(64);
  options.disk->model = "another";
  {
    auto engine = Make(options);
    EXPECT_EQ(engine->stats().disk.refused_files, 1);
    EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1))), 0);
  }
  options = Options(64);
  options.kv_dtype = "f32";  // the value of "auto" here
  EXPECT_EQ(RunOne(*Make(options), Greedy(RandomPrompt(500, 1))), 448);
}

TEST_F(DiskTest, BlocksWithOtherKeySummariesAreRefused) {
  const auto options = [&](KeySummaryKind kind) {
    EngineOptions made = Options(64);
    made.sparsity.key_summaries = true;
    made.sparsity.summary_kind = kind;
    made.kv_bytes = 64 * LayoutFor(model_.info().kv, tensor::DType::kF32, true, kind).total_bytes();
    return made;
  };
  {
    auto engine = Make(options(KeySummaryKind::kBox));
    RunOne(*engine, Greedy(RandomPrompt(500, 1)));
    engine->SaveCache();
  }
  {
    auto engine = Make(options(KeySummaryKind::kSketch));
    EXPECT_EQ(engine->stats().disk.refused_files, 1);
    EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1))), 0);
  }
  EXPECT_EQ(RunOne(*Make(options(KeySummaryKind::kBox)), Greedy(RandomPrompt(500, 1))), 448);
}

TEST_F(DiskTest, ClearCacheRemovesBlocksFromDisk) {
  {
    auto engine = Make(Options(64));
    RunOne(*engine, Greedy(RandomPrompt(500, 1)));
    engine->SaveCache();
    engine->ClearCache();
    EXPECT_EQ(RunOne(*engine, Greedy(RandomPrompt(500, 1), 1)), 0);
    engine->ClearCache();
  }
  EXPECT_EQ(RunOne(*Make(Options(64)), Greedy(RandomPrompt(500, 1))), 0);
}

TEST_F(DiskTest, NeedsThePrefixCache) {
  EngineOptions options = Options(64);
  options.prefix_cache = false;
  EXPECT_THAT(Message(Engine::Create(model_, kernels_, *threads_, options).status()),
              HasSubstr("need the prefix cache"));
}

TEST_F(DiskTest, ReportsAFolderThatCannotBeCreated) {
  EngineOptions options = Options(64);
  options.disk->folder = "/proc/nothing";
  EXPECT_THAT(Message(Engine::Create(model_, kernels_, *threads_, options).status()),
              HasSubstr("/proc/nothing: can't be made"));
}

// Sessions that grow and branch exceed the memory. The engine is restarted, and files are damaged between
// runs. With cancelled requests, swap space, drafts and a warm tier, each output is that of the request
// alone.
struct DiskLoad {
  int blocks, sequences;
  const char* speculative = "off";
  int swap_blocks = 0;
  int warm_blocks = 0;
  bool disk = true;
};
void PrintTo(const DiskLoad& load, std::ostream* out) {
  *out << fmt::format("{} blocks, {} sequences, speculative {}, {} swap blocks, {} warm blocks, {} disk",
                      load.blocks, load.sequences, load.speculative, load.swap_blocks, load.warm_blocks,
                      load.disk ? "with" : "without");
}
class DiskStressTest : public DiskTest, public testing::WithParamInterface<DiskLoad> {};

TEST_P(DiskStressTest, OutputsAreThoseOfEachRequestAlone) {
  std::mt19937 random(17);
  FakeModel model(4096, FakeModel::kVocab, /*mtp=*/std::string(GetParam().speculative) == "mtp");
  model.misses_every = 3;
  std::map<int, std::vector<int32_t>> sessions;
  for (int i = 0; i < 6; ++i) sessions[i] = RandomPrompt(100 + 60 * i, i);
  int64_t loads = 0, preempted = 0, abandoned = 0, restored = 0;
  for (int restart = 0; restart < 8; ++restart) {
    EngineOptions options = Options(GetParam().blocks);
    options.kv_bytes = GetParam().blocks * kBlockBytes * model.info().kv.layers / 2;
    options.max_sequences = GetParam().sequences;
    options.max_batch_tokens = 96;
    options.swap_bytes = GetParam().swap_blocks * kBlockBytes;
    options.speculative.method = GetParam().speculative;
    options.warm_bytes = GetParam().warm_blocks * (kBlockBytes * model.info().kv.layers / 2 + 1024);
    options.warm_exact = true;
    if (!GetParam().disk) options.disk.reset();
    auto created = Engine::Create(model, kernels_, *threads_, options);
    ASSERT_TRUE(created.ok()) << created.status();
    Engine& engine = **created;
    std::map<RequestId, Request> asked;
    std::map<RequestId, Result> results;
    for (int i = 0; i < 25; ++i) {
      std::vector<int32_t>& session = sessions[static_cast<int>(random() % sessions.size())];
      if (random() % 5 == 0) session.resize(session.size() / 2);
      if (session.size() < 900)
        session = Joined(session, RandomPrompt(1 + static_cast<int>(random() % 90), random()));
      const int room = GetParam().blocks * tensor::kKvBlockTokens - static_cast<int>(session.size());
      const Request request = Greedy(session, std::min(room, 1 + static_cast<int>(random() % 350)));
      const RequestId id = *engine.Add(request);
      asked[id] = request;
      for (int steps = static_cast<int>(random() % 40); steps-- > 0;) Step(engine, &results);
      if (random() % 8 == 0) engine.Cancel(id);
    }
    while (!engine.idle()) Step(engine, &results);
    for (const auto& [id, request] : asked) {
      const std::vector<int32_t> alone = Alone(request);
      ASSERT_LE(results[id].tokens.size(), alone.size());
      ASSERT_TRUE(std::equal(results[id].tokens.begin(), results[id].tokens.end(), alone.begin())) << id;
      ASSERT_TRUE(results[id].finish == FinishReason::kCancelled ||
                  results[id].tokens.size() == alone.size());
    }
    const EngineStats stats = engine.stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
    loads += stats.disk.loads;
    restored += stats.warm.restored_blocks;
    EXPECT_LE(stats.warm.bytes, options.warm_bytes);
    preempted += stats.preemptions;
    abandoned += stats.disk.abandoned_loads;
    if (random() % 2 == 0) engine.SaveCache();
    created->reset();
    if (random() % 2 == 0) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      const auto size = static_cast<int64_t>(std::filesystem::file_size(entry.path()));
      for (int i = 0; i < 3 && size > 0; ++i) {
        file.seekp(static_cast<int64_t>(random()) % size);
        file.put(static_cast<char>(random()));
      }
    }
  }
  EXPECT_EQ(model.mtp_gaps, 0);
  RecordProperty("abandoned_loads", static_cast<int>(abandoned));
  if (GetParam().disk) {
    EXPECT_GT(loads, GetParam().warm_blocks > 0 ? 3 : 20);
  }
  if (GetParam().warm_blocks > 0) {
    EXPECT_GT(restored, 50);
  }
  if (GetParam().blocks < 30) {
    EXPECT_GT(preempted, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Loads, DiskStressTest,
                         testing::Values(DiskLoad{100, 16}, DiskLoad{24, 8}, DiskLoad{17, 4},
                                         DiskLoad{20, 6, "mtp"}, DiskLoad{20, 6, "ngram"},
                                         DiskLoad{20, 6, "off", 10}, DiskLoad{20, 6, "off", 0, 25},
                                         DiskLoad{24, 8, "mtp", 0, 9}, DiskLoad{22, 5, "off", 0, 12, false},
                                         DiskLoad{20, 6, "ngram", 10, 30, false}),
                         [](const auto& load) {
                           const DiskLoad& l = load.param;
                           return fmt::format("Blocks{}Sequences{}Speculative_{}Swap{}Warm{}{}", l.blocks,
                                              l.sequences, l.speculative, l.swap_blocks, l.warm_blocks,
                                              l.disk ? "" : "NoDisk");
                         });

}  // namespace
}  // namespace moesaic::engine
