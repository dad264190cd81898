// Engines over several ranks, which are threads here. Outputs are those of the oracle in every layout, with
// small chunks, preemption, swapping, tiers, drafts, block sparsity and aborts.
#include <algorithm>
#include <map>
#include <thread>

#include "comm/transport/local_transport.h"
#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "engine/ranked_executor.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

using models::GoldenPrompt;
using models::SourcePath;
using parallel::Degrees;
using parallel::Layout;
using parallel::RankGroups;

constexpr double kTimeLimit = 20;

/// A model on the ranks of a layout: the engine in the calling thread, other ranks in threads.
class RankedEngine {
 public:
  RankedEngine(const std::string& checkpoint, const Degrees& degrees)
      : path_(SourcePath("tests/golden/" + checkpoint)),
        layout_(*Layout::Create(degrees)),
        topology_(comm::Topology::Flat(layout_.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10})),
        job_(layout_.ranks()),
        ended_(layout_.ranks()) {
    for (int rank = 1; rank < layout_.ranks(); ++rank) {
      ranks_.emplace_back([this, rank] {
        const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
        auto model = Load(rank, *threads);
        if (model.ok()) {
          ended_[rank] = RunRank(**model, kernels_, *threads, job_.end(rank), layout_, {}, kTimeLimit);
        } else {
          ended_[rank] = model.status();
        }
        job_.Leave(rank);
      });
    }
    auto model = Load(0, *threads_);
    EXPECT_TRUE(model.ok()) << Message(model.status());
    model_ = *std::move(model);
  }

  ~RankedEngine() { End(); }

  /// Starts the engine. `blocks` of the driver's cache and of its swap and warm areas.
  Status Start(EngineOptions options, int blocks, int swap_blocks = 0, int warm_blocks = 0) {
    const int64_t bytes = LayoutFor(model_->info().kv, tensor::DType::kF32, options.sparsity.key_summaries,
                                    options.sparsity.summary_kind)
                              .total_bytes();
    options.kv_bytes = blocks * bytes;
    options.swap_bytes = swap_blocks * bytes;
    options.warm_bytes = warm_blocks * bytes;
    options.job = &job_.end(0);
    options.layout = layout_;
    options.rank_time_limit_s = kTimeLimit;
    auto engine = Engine::Create(*model_, kernels_, *threads_, options);
    if (!engine.ok()) return engine.status();
    engine_ = *std::move(engine);
    return OkStatus();
  }

  Engine& engine() { return *engine_; }
  comm::LocalJob& job() { return job_; }

  /// Ends the engine and returns how the other ranks ended.
  const std::vector<Status>& End() {
    if (engine_ == nullptr) {
      for (int rank = 1; rank < layout_.ranks(); ++rank) job_.Kill(0);
    }
    engine_ = nullptr;
    for (std::thread& rank : ranks_) rank.join();
    ranks_.clear();
    return ended_;
  }

 private:
  StatusOr<std::unique_ptr<models::Model>> Load(int rank, runtime::ThreadPool& threads) {
    ASSIGN_OR_RETURN(std::shared_ptr<RankGroups> groups,
                     RankGroups::Create(job_.end(rank), topology_, layout_, kTimeLimit));
    return models::Model::Load(path_, {.dtype = "f32", .progress = nullptr, .groups = groups}, threads);
  }

  const std::string path_;
  const Layout layout_;
  const comm::Topology topology_;
  comm::LocalJob job_;
  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> threads_ = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  std::vector<Status> ended_;
  std::vector<std::thread> ranks_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<Engine> engine_;
};

struct Case {
  const char* checkpoint;
  Degrees degrees;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.checkpoint << " " << Name(c.degrees); }

constexpr int kTokens = 24;

// Runs every prompt twice at once and compares the outputs with the oracle's as far as it is certain.
void ExpectOracle(Engine& engine, const std::string& checkpoint) {
  const std::vector<GoldenPrompt> golden =
      models::ReadGolden(SourcePath("tests/golden/" + checkpoint + "/golden.safetensors"));
  std::map<RequestId, const GoldenPrompt*> prompts;
  for (size_t i = 0; i < 2 * golden.size(); ++i) {
    Request request;
    request.prompt = golden[i % golden.size()].ids;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = kTokens;
    const auto id = engine.Add(request);
    ASSERT_TRUE(id.ok()) << Message(id.status());
    prompts[*id] = &golden[i % golden.size()];
  }
  std::map<RequestId, std::vector<int32_t>> said;
  while (!engine.idle()) {
    std::vector<TokenEvent> events;
    const Status status = engine.Step(&events);
    ASSERT_TRUE(status.ok()) << Message(status);
    for (const TokenEvent& event : events) said[event.request].push_back(*event.token);
  }
  for (const auto& [id, prompt] : prompts) {
    ASSERT_EQ(said[id].size(), kTokens);
    for (size_t i = 0; i < std::min<size_t>(prompt->greedy.size(), kTokens); ++i) {
      if (prompt->margins[i] < 1e-3F) break;
      ASSERT_EQ(said[id][i], prompt->greedy[i]) << "request " << id << ", token " << i;
    }
  }
}

class RankedGoldenTest : public testing::TestWithParam<Case> {
 protected:
  std::string checkpoint() const { return GetParam().checkpoint; }
};

TEST_P(RankedGoldenTest, OutputsAreTheOraclesUnderEveryLoad) {
  struct Load {
    int blocks, batch_tokens, swap_blocks = 0, warm_blocks = 0;
  };
  for (const Load& load : {Load{64, 512}, {64, 13}, {14, 50}, {14, 50, 14}, {20, 512, 0, 20}}) {
    RankedEngine ranks(checkpoint(), GetParam().degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = load.batch_tokens;
    options.warm_exact = true;
    const Status started = ranks.Start(options, load.blocks, load.swap_blocks, load.warm_blocks);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), checkpoint());
    ExpectOracle(ranks.engine(), checkpoint());  // prompts are in the prefix cache now
    EXPECT_GT(ranks.engine().stats().cache_hits, 0);
    for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
  }
}

TEST_P(RankedGoldenTest, DraftsKeepOutputs) {
  for (const char* method : {"ngram", "mtp"}) {
    if (std::string(method) == "mtp" && checkpoint().find("mtp") == std::string::npos) continue;
    RankedEngine ranks(checkpoint(), GetParam().degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = 64;
    options.speculative.method = method;
    const Status started = ranks.Start(options, 64);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), checkpoint());
    EXPECT_GT(ranks.engine().stats().speculation.draft_tokens, 0) << method;
  }
}

TEST_P(RankedGoldenTest, AbortsFreeBlocksOnAllRanks) {
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  EngineOptions options;
  options.max_sequences = 4;
  options.max_batch_tokens = 32;
  ASSERT_TRUE(ranks.Start(options, 32).ok());
  Engine& engine = ranks.engine();
  for (int i = 0; i < 60; ++i) {
    Request request;
    request.prompt.assign(1 + i * 7 % 90, 3 + i % 5);
    request.sampling.max_tokens = 20;
    const auto id = engine.Add(request);
    ASSERT_TRUE(id.ok()) << Message(id.status());
    std::vector<TokenEvent> events;
    for (int steps = i % 4; steps > 0; --steps) ASSERT_TRUE(engine.Step(&events).ok());
    if (i % 3 != 0) engine.Cancel(*id);
  }
  std::vector<TokenEvent> events;
  while (!engine.idle()) ASSERT_TRUE(engine.Step(&events).ok());
  EXPECT_EQ(engine.stats().free_blocks + engine.stats().cached_blocks, engine.stats().total_blocks);
  ExpectOracle(engine, checkpoint());
}

TEST_P(RankedGoldenTest, ADeadRankIsNamed) {
  RankedEngine ranks(checkpoint(), GetParam().degrees);
  EngineOptions options;
  options.max_sequences = 4;
  options.max_batch_tokens = 64;
  ASSERT_TRUE(ranks.Start(options, 32).ok());
  Request request;
  request.prompt = {5, 6, 7};
  request.sampling.max_tokens = 50;
  ASSERT_TRUE(ranks.engine().Add(request).ok());
  std::vector<TokenEvent> events;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks.engine().Step(&events).ok());
  ranks.job().Kill(1);
  const Status failed = ranks.engine().Step(&events);
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(Message(failed).find("rank 1"), std::string::npos) << Message(failed);
  EXPECT_EQ(Message(ranks.engine().Step(&events)), Message(failed));
}

INSTANTIATE_TEST_SUITE_P(All, RankedGoldenTest,
                         testing::Values(Case{"deepseek-v3-mtp", {.tensor = 2}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2, .pipeline = 2, .expert = 2}},
                                         Case{"qwen3-moe-norm-tied", {.tensor = 2, .expert = 2}},
                                         Case{"qwen3-moe-norm-tied", {.pipeline = 2}}),
                         [](const auto& info) {
                           return models::TestName(info.param.checkpoint) + "_" + [](std::string name) {
                             std::erase(name, ' ');
                             return name;
                           }(Name(info.param.degrees));
                         });

}  // namespace
}  // namespace moesaic::engine
