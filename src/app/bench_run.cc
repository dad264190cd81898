#include "app/bench_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

#include "app/interrupt.h"
#include "engine/kv_budget.h"
#include "engine/lockstep.h"
#include "engine/make_executor.h"
#include "models/pipeline_parts.h"

namespace moesaic::app {
namespace {

int TokensOf(const BenchCase& test) { return test.depth + std::max(test.prompt, test.generate); }

int64_t BlocksOf(const BenchCase& test) {
  return static_cast<int64_t>(test.sequences) * tensor::KvBlocksFor(TokensOf(test));
}

}  // namespace

double BenchResult::median() const {
  std::vector<double> sorted = tokens_per_second;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

double BenchResult::deviation() const {
  const auto count = static_cast<double>(tokens_per_second.size());
  if (count < 2) return 0;
  const double mean = std::accumulate(tokens_per_second.begin(), tokens_per_second.end(), 0.0) / count;
  double squares = 0;
  for (const double value : tokens_per_second) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / (count - 1));
}

Status BenchRunner::Check(const std::vector<BenchCase>& cases, const models::ModelInfo& info) {
  for (const BenchCase& test : cases) {
    if (TokensOf(test) > info.context_length) {
      return InvalidArgument("the model's context has {} tokens, but depth and test need {}",
                             info.context_length, TokensOf(test));
    }
  }
  return OkStatus();
}

StatusOr<std::unique_ptr<BenchRunner>> BenchRunner::Create(models::Model& model,
                                                           const kernels::KernelTable& kernels,
                                                           runtime::ThreadPool& threads,
                                                           const engine::EngineOptions& options,
                                                           const std::vector<BenchCase>& cases) {
  int64_t blocks = 1;
  for (const BenchCase& test : cases) blocks = std::max(blocks, BlocksOf(test));
  ASSIGN_OR_RETURN(const tensor::DType dtype, engine::KvDType(options.kv_dtype, model.info()));
  const tensor::KvLayout layout = engine::LayoutFor(model.info().kv, dtype, options.sparsity.key_summaries,
                                                    options.sparsity.summary_kind);
  const cache::KvStoreOptions sizes = {.layout = layout, .blocks = static_cast<int>(blocks)};
  ASSIGN_OR_RETURN(std::unique_ptr<cache::KvStore> store, cache::KvStore::Create(sizes, threads));
  std::unique_ptr<BenchRunner> runner(new BenchRunner(model, options.sparsity, std::move(store)));
  std::shared_ptr<engine::Lockstep> lockstep;
  if (options.layout.exchanges_tokens()) {
    lockstep = std::make_shared<engine::Lockstep>(
        options.layout.degrees().pipeline,
        models::ReadRows(model.info().experts, model.info().experts_per_token));
  }
  for (int replica = 0; replica < options.layout.degrees().data; ++replica) {
    cache::KvStore* const own = replica == 0 ? runner->store_.get() : nullptr;
    ASSIGN_OR_RETURN(std::unique_ptr<engine::Executor> executor,
                     engine::MakeExecutor(model, kernels, threads, sizes, own, options, replica));
    if (lockstep != nullptr) executor = engine::Lockstep::Add(lockstep, std::move(executor));
    runner->executors_.push_back(std::move(executor));
  }
  return runner;
}

BenchRunner::BenchRunner(models::Model& model, const engine::SparsityOptions& sparsity,
                         std::unique_ptr<cache::KvStore> store)
    : model_(model),
      store_(std::move(store)),
      pool_(store_->blocks()),
      options_(sparsity),
      sparsity_(engine::SparsitySettingsOf(sparsity.defaults, sparsity, 0)) {}

// Null where rows of that kind read all blocks: those of prompts choose with kAll only.
const kernels::SparsitySettings* BenchRunner::SparsityOf(engine::SparsityMode least) const {
  return options_.defaults.mode >= least ? &sparsity_ : nullptr;
}

double BenchRunner::StepBytes(const BenchResult& result, int sequences, int depth) const {
  const models::ModelInfo& info = model_.info();
  const tensor::KvLayout& layout = store_->layout();
  const auto expert_bytes = static_cast<double>(info.expert_bytes);
  const double routed = info.experts_per_token * info.moe_layers * expert_bytes;
  const double weights =
      static_cast<double>(info.active_weight_bytes) - routed + result.experts_per_step * expert_bytes;
  const double token_bytes =
      static_cast<double>(layout.keys_bytes() + layout.values_bytes() + layout.scales_bytes()) /
      tensor::kKvBlockTokens;
  const int layers = layout.layers - info.mtp_layers;
  if (result.blocks_per_step == 0) return weights + token_bytes * layers * depth * sequences;
  const int dense = std::min(options_.dense_layers, layers);
  // Rows that reuse a choice read no key summaries.
  const double scoring = 1.0 / options_.defaults.reuse;
  const double summaries =
      static_cast<double>(layout.summary_bytes) * (depth / tensor::kKvBlockTokens) * scoring;
  const double chosen = result.blocks_per_step * token_bytes * tensor::kKvBlockTokens / layout.heads;
  return weights + chosen + (token_bytes * dense * depth + summaries * (layers - dense)) * sequences;
}

std::vector<int32_t> BenchRunner::RandomTokens(int count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random_() % model_.info().vocab_size);
  return tokens;
}

int BenchRunner::max_in_flight() const { return executors_.front()->max_in_flight(); }

// Starts a step on every replica like an engine: as many as there are pipeline stages are in flight.
Status BenchRunner::Start(engine::StepBatch step) {
  if (std::ssize(steps_) == max_in_flight()) RETURN_IF_ERROR(FinishOldest());
  const engine::StepBatch& started = steps_.emplace_back(std::move(step));
  for (auto executor = executors_.rbegin(); executor != executors_.rend(); ++executor)
    (*executor)->Start(started);
  return OkStatus();
}

// The result is that of replica 0.
Status BenchRunner::FinishOldest() {
  const StatusOr<engine::StepResult> result = executors_.front()->Finish();
  Status others;
  for (const auto& executor : std::span(executors_).subspan(1)) others.Update(executor->Finish().status());
  steps_.pop_front();
  RETURN_IF_ERROR(result.status());
  RETURN_IF_ERROR(others);
  experts_read_ += result->experts_read;
  blocks_read_ = result->sparsity.blocks_read;
  return OkStatus();
}

Status BenchRunner::FinishAll() {
  while (!steps_.empty()) RETURN_IF_ERROR(FinishOldest());
  return OkStatus();
}

Status BenchRunner::Prefill(int sequence, int start, int count, int batch) {
  const std::vector<int32_t> tokens = RandomTokens(count);
  for (int done = 0; done < count; done += batch) {
    if (Interrupted()) return Cancelled("interrupted");
    const int rows = std::min(batch, count - done);
    const bool last = done + rows == count;
    engine::StepBatch step = {.divides = rows == count || max_in_flight() == 1};
    step.AddRows({.sequence = first_sequence_ + sequence,
                  .start = start + done,
                  .first_logits = last ? rows - 1 : rows},
                 std::span(tokens).subspan(done, rows), {}, tables_[sequence],
                 SparsityOf(engine::SparsityMode::kAll));
    RETURN_IF_ERROR(Start(std::move(step)));
  }
  return OkStatus();
}

// Pipeline stages work on different parts of the sequences at the same time. A part's next step starts after
// its last one has ended, since it needs that one's token.
Status BenchRunner::Decode(int sequences, int start, int count) {
  const std::vector<parallel::Range> parts =
      parallel::Divide(sequences, 1, std::min(sequences, max_in_flight()));
  for (int i = 0; i < count; ++i) {
    if (Interrupted()) return Cancelled("interrupted");
    for (const parallel::Range& part : parts) {
      if (std::ssize(steps_) == std::ssize(parts)) RETURN_IF_ERROR(FinishOldest());
      const std::vector<int32_t> tokens = RandomTokens(part.count);
      engine::StepBatch step = {.count_experts = true, .divides = parts.size() == 1};
      for (int s = part.first; s < part.end(); ++s) {
        step.AddRows({.sequence = first_sequence_ + s, .start = start + i, .first_logits = 0},
                     std::span(tokens).subspan(s - part.first, 1), {}, tables_[s],
                     SparsityOf(engine::SparsityMode::kDecode));
      }
      RETURN_IF_ERROR(Start(std::move(step)));
    }
  }
  return OkStatus();
}

Status BenchRunner::RunOnce(const BenchCase& test) {
  if (test.generate > 0) {
    RETURN_IF_ERROR(Decode(test.sequences, test.depth, test.generate));
    return FinishAll();
  }
  for (int s = 0; s < test.sequences; ++s) {
    RETURN_IF_ERROR(Prefill(s, test.depth, test.prompt, test.batch));
  }
  return FinishAll();
}

StatusOr<BenchResult> BenchRunner::Run(const BenchCase& test, int repetitions) {
  held_.assign(test.sequences, {});
  tables_.assign(test.sequences, {});
  for (int s = 0; s < test.sequences; ++s) {
    for (int i = 0; i < tensor::KvBlocksFor(TokensOf(test)); ++i) {
      ASSIGN_OR_RETURN(cache::BlockRef block, pool_.Allocate());
      tables_[s].push_back(block.index());
      held_[s].push_back(std::move(block));
    }
    if (test.depth > 0) RETURN_IF_ERROR(Prefill(s, 0, test.depth, test.batch));
  }
  RETURN_IF_ERROR(FinishAll());
  BenchResult result;
  int64_t blocks_before = 0;
  for (int i = 0; i <= repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(RunOnce(test));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const int tokens = static_cast<int>(executors_.size()) * test.sequences *
                       (test.generate > 0 ? test.generate : test.prompt);
    if (i > 0) {
      result.tokens_per_second.push_back(tokens / seconds);
    } else {
      experts_read_ = 0;
      blocks_before = blocks_read_;
    }
  }
  const double steps = static_cast<double>(repetitions) * test.generate;
  if (steps > 0) {
    result.experts_per_step = static_cast<double>(experts_read_) / steps;
    result.blocks_per_step = static_cast<double>(blocks_read_ - blocks_before) / steps;
  }
  held_.clear();
  engine::StepBatch last;  // releases the state of the sequences
  for (int s = 0; s < test.sequences; ++s) last.ended.push_back(first_sequence_ + s);
  first_sequence_ += test.sequences;
  RETURN_IF_ERROR(Start(std::move(last)));
  RETURN_IF_ERROR(FinishAll());
  return result;
}

}  // namespace moesaic::app
