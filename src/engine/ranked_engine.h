// Engines over several ranks, which are threads here, and their expected outputs. For tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <regex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/transport/local_transport.h"
#include "engine/byte_tokenizer.h"
#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "engine/ranked_executor.h"
#include "models/test_session.h"

namespace moesaic::engine {

inline constexpr double kTimeLimit = 20;

/// Returns `options` with plans of experts at every step that accept small gains: experts move as often as
/// they can.
inline EngineOptions MovingOptions(EngineOptions options) {
  options.expert_load.window_s = 1e-9;
  options.balance = {.interval_s = 1e-6,
                     .redundant = 2,
                     .least_gain = 0.01,
                     .least_tokens_per_rank = 0,
                     .move_bytes_per_s = 1e30};
  return options;
}

struct RankedEngineOptions {
  int64_t dies_at_send = -1;  // number of the message instead of which `victim` dies; -1: none
  int victim = 1;
  bool experts_move = false;           // between ranks
  bool tolerates_failures = false;     // continues without ranks that die
  parallel::Placement placement = {};  // of experts; no layers: in order
  parallel::BatchSplitOptions split = {};
  bool virtual_time = false;  // messages take the time of equal links, and computation takes none
  // Replaces the transport of a rank; may be empty.
  std::function<std::unique_ptr<comm::Transport>(int rank, comm::LocalJob& job)> wrap = {};
  std::string dtype = "f32";  // of the weights
};

/// A model on the ranks of a layout: the engine in the calling thread, other ranks in threads. `checkpoint`
/// is a folder of tests/golden, or an absolute path.
class RankedEngine {
 public:
  RankedEngine(const std::string& checkpoint, const parallel::Degrees& degrees,
               const RankedEngineOptions& options = {})
      : path_(checkpoint.starts_with('/') ? checkpoint : models::SourcePath("tests/golden/" + checkpoint)),
        dtype_(options.dtype),
        layout_(LayoutOf(degrees, options)),
        topology_(comm::Topology::Flat(layout_.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10})),
        job_(layout_.ranks(), {.topology = options.virtual_time ? &topology_ : nullptr}),
        ended_(layout_.ranks()) {
    if (options.dies_at_send >= 0) job_.KillAtSend(options.victim, options.dies_at_send);
    for (int rank = 0; rank < layout_.ranks(); ++rank) {
      wrapped_.push_back(options.wrap ? options.wrap(rank, job_) : nullptr);
    }
    for (int rank = 1; rank < layout_.ranks(); ++rank) {
      ranks_.emplace_back([this, rank] {
        const auto threads = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
        auto model = Load(rank, *threads);
        if (model.ok()) {
          ended_[rank] = RunRank(**model, kernels_, *threads, EndOf(rank), layout_, kTimeLimit);
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
    // The rank with the largest part of a block decides.
    models::KvSpec kv = model_->info().kv;
    const int stages = layout_.degrees().pipeline;
    const std::vector<parallel::Range> layers = parallel::Divide(model_->info().layers, 1, stages);
    for (int stage = 0; stage < stages; ++stage) {
      const int modules = stage == stages - 1 ? model_->info().mtp_layers : 0;
      kv.layers = std::max(kv.layers, layers[stage].count + modules);
    }
    const int64_t bytes =
        LayoutFor(kv, tensor::DType::kF32, options.sparsity.key_summaries, options.sparsity.summary_kind)
            .total_bytes();
    options.kv_bytes = blocks * bytes;
    options.swap_bytes = swap_blocks * bytes;
    options.warm_bytes = warm_blocks * bytes;
    options.job = &EndOf(0);
    options.layout = layout_;
    options.rank_time_limit_s = kTimeLimit;
    auto engine = Engine::Create(*model_, kernels_, *threads_, options);
    if (!engine.ok()) return engine.status();
    engine_ = *std::move(engine);
    return OkStatus();
  }

  /// A cache of 8 blocks, and an executor of its own instead of an engine's.
  StatusOr<std::unique_ptr<RankedExecutor>> MakeExecutor(double limit_s = kTimeLimit) {
    const tensor::KvLayout layout = LayoutFor(model_->info().kv, tensor::DType::kF32, false, {});
    store_ = *cache::KvStore::Create({.layout = layout, .blocks = 8}, *threads_);
    return RankedExecutor::Create(
        std::make_unique<LocalExecutor>(*model_, kernels_, *threads_, *store_, /*first_sparse_layer=*/0),
        *threads_, model_->info(), job_.end(0), layout_, {.dtype = tensor::DType::kF32, .blocks = 8},
        limit_s);
  }

  Engine& engine() { return *engine_; }
  models::Model& model() { return *model_; }
  const models::ModelInfo& info() const { return model_->info(); }
  comm::LocalJob& job() { return job_; }

  /// Ends the engine and returns how the other ranks ended.
  const std::vector<Status>& End() {
    if (engine_ == nullptr) {
      for (int rank = 1; rank < layout_.ranks(); ++rank) job_.Kill(0);
    }
    engine_ = nullptr;
    if (!ranks_.empty()) job_.Leave(0);
    for (std::thread& rank : ranks_) rank.join();
    ranks_.clear();
    return ended_;
  }

 private:
  static parallel::Layout LayoutOf(const parallel::Degrees& degrees, const RankedEngineOptions& options) {
    parallel::Layout layout = *parallel::Layout::Create(degrees);
    if (options.experts_move) layout.LetExpertsMove();
    layout.SetBatchSplit(options.split);
    if (options.tolerates_failures) {
      EXPECT_TRUE(layout.TolerateFailures().ok());
    }
    if (!options.placement.layers.empty()) {
      EXPECT_TRUE(layout.PlaceExperts(std::make_shared<const parallel::Placement>(options.placement)).ok());
    }
    return layout;
  }
  comm::Transport& EndOf(int rank) { return wrapped_[rank] == nullptr ? job_.end(rank) : *wrapped_[rank]; }
  StatusOr<std::unique_ptr<models::Model>> Load(int rank, runtime::ThreadPool& threads) {
    ASSIGN_OR_RETURN(std::shared_ptr<parallel::RankGroups> groups,
                     parallel::RankGroups::Create(EndOf(rank), topology_, layout_, kTimeLimit));
    return models::Model::Load(path_, {.dtype = dtype_, .progress = nullptr, .groups = groups}, threads);
  }

  const std::string path_, dtype_;
  const parallel::Layout layout_;
  const comm::Topology topology_;
  comm::LocalJob job_;
  std::vector<std::unique_ptr<comm::Transport>> wrapped_;  // [ranks]; null: the job's
  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> threads_ = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  std::vector<Status> ended_;
  std::vector<std::thread> ranks_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<cache::KvStore> store_;
  std::unique_ptr<Engine> engine_;
};

/// Parameter of tests.
struct Case {
  const char* checkpoint;
  parallel::Degrees degrees;
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.checkpoint << " " << Name(c.degrees); }

inline constexpr int kTokens = 24;

/// Runs every prompt twice at once and compares the outputs with the oracle's as far as it is certain.
inline void ExpectOracle(Engine& engine, const std::string& checkpoint) {
  const std::vector<models::GoldenPrompt> golden =
      models::ReadGolden(models::SourcePath("tests/golden/" + checkpoint + "/golden.safetensors"));
  std::map<RequestId, const models::GoldenPrompt*> prompts;
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

/// Sizes of a cache, and the rows of a step.
struct Load {
  int blocks, batch_tokens, swap_blocks = 0, warm_blocks = 0;
};

/// Outputs are the oracle's with this load, also when prompts are in the prefix cache. `check` sees the
/// engine before it ends.
inline void ExpectOracleUnder(const Load& load, const Case& c,
                              const std::function<void(const EngineStats& stats)>& check = {}) {
  RankedEngine ranks(c.checkpoint, c.degrees);
  EngineOptions options;
  options.max_sequences = 8;
  options.max_batch_tokens = load.batch_tokens;
  options.warm_exact = true;
  const Status started = ranks.Start(options, load.blocks, load.swap_blocks, load.warm_blocks);
  ASSERT_TRUE(started.ok()) << Message(started);
  ExpectOracle(ranks.engine(), c.checkpoint);
  ExpectOracle(ranks.engine(), c.checkpoint);  // prompts are in the prefix caches now
  const EngineStats stats = ranks.engine().stats();
  EXPECT_GT(stats.cache_hits, 0);
  if (check) check(stats);
  for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
}

/// Outputs with drafts are the oracle's.
inline void ExpectOracleWithDrafts(const Case& c) {
  for (const std::string method : {"ngram", "mtp"}) {
    if (method == "mtp" && std::string_view(c.checkpoint).find("mtp") == std::string_view::npos) continue;
    RankedEngine ranks(c.checkpoint, c.degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = 64;
    options.speculative.method = method;
    options.speculative.adaptive = false;  // times of a busy machine do not decide
    const Status started = ranks.Start(options, 64);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), c.checkpoint);
    EXPECT_GT(ranks.engine().stats().speculation.draft_tokens, 0) << method;
  }
}

/// Cancelled requests free their blocks, and outputs after them are the oracle's.
inline void ExpectAbortsFreeBlocks(const Case& c) {
  RankedEngine ranks(c.checkpoint, c.degrees);
  EngineOptions options;
  options.max_sequences = 4;
  options.max_batch_tokens = 32;
  ASSERT_TRUE(ranks.Start(options, 32).ok());
  Engine& engine = ranks.engine();
  for (int i = 0; i < 60; ++i) {
    Request request;
    request.prompt.assign(1 + i * 7 % 90, 3 + i % 5);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 20;
    const auto id = engine.Add(request);
    ASSERT_TRUE(id.ok()) << Message(id.status());
    std::vector<TokenEvent> events;
    for (int steps = i % 4; steps > 0; --steps) ASSERT_TRUE(engine.Step(&events).ok());
    if (i % 3 != 0) engine.Cancel(*id);
  }
  std::vector<TokenEvent> events;
  while (!engine.idle()) ASSERT_TRUE(engine.Step(&events).ok());
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
  ASSERT_EQ(std::ssize(stats.replicas), c.degrees.data > 1 ? c.degrees.data : 0);
  for (const ReplicaStats& replica : stats.replicas) {
    EXPECT_EQ(replica.free_blocks + replica.cached_blocks, replica.total_blocks);
    EXPECT_GT(replica.prompt_tokens, 0);
  }
  ExpectOracle(engine, c.checkpoint);
}

/// Outputs follow their grammars, drawn or greedy, with drafts or without.
inline void ExpectGrammars(const Case& c) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  for (const std::string method : {"off", "ngram"}) {
    RankedEngine ranks(c.checkpoint, c.degrees);
    EngineOptions options;
    options.max_sequences = 4;
    options.max_batch_tokens = 40;
    options.eos_ids = {94};
    options.speculative.method = method;
    const Status started = ranks.Start(options, 64);
    ASSERT_TRUE(started.ok()) << Message(started);
    Engine& engine = ranks.engine();
    std::map<RequestId, std::string> patterns;
    for (int i = 0; i < 9; ++i) {
      Request request;
      request.prompt.assign(5 + 7 * i, 3 + i);
      request.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
      request.sampling.max_tokens = 80;
      const std::string pattern = i % 3 == 0 ? "[a-c]{30}x" : i % 3 == 1 ? "(no|yes)" : "[0-9]{1,40}";
      request.grammar =
          std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, pattern));
      const auto id = engine.Add(std::move(request));
      ASSERT_TRUE(id.ok()) << Message(id.status());
      patterns[*id] = pattern;
    }
    std::map<RequestId, std::string> said;
    std::map<RequestId, FinishReason> finished;
    while (!engine.idle()) {
      std::vector<TokenEvent> events;
      const Status status = engine.Step(&events);
      ASSERT_TRUE(status.ok()) << Message(status);
      for (const TokenEvent& event : events) {
        if (event.token && *event.token < 94) said[event.request] += static_cast<char>('!' + *event.token);
        finished[event.request] = event.finish;
      }
    }
    for (const auto& [id, pattern] : patterns) {
      EXPECT_TRUE(std::regex_match(said[id], std::regex(pattern))) << said[id] << " is not " << pattern;
      EXPECT_EQ(finished[id], FinishReason::kStop);
    }
  }
}

inline std::string NameOf(const testing::TestParamInfo<Case>& info) {
  std::string name = Name(info.param.degrees);
  std::erase(name, ' ');
  return models::TestName(info.param.checkpoint) + "_" + name;
}

}  // namespace moesaic::engine
