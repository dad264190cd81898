// The engine of one model and one executor: continuous batching over the blocks of one KV cache.
#pragma once

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_store.h"
#include "cache/kv_tiers.h"
#include "cache/radix_tree.h"
#include "engine/engine.h"
#include "engine/even_steps.h"
#include "engine/event_limit.h"
#include "engine/executor.h"
#include "engine/model_drafter.h"
#include "engine/row_tasks.h"
#include "engine/scheduler.h"
#include "engine/speculation.h"

namespace moesaic::engine {

/// The cache of an engine: block numbers, the radix tree, tiers and the store of this rank.
struct KvCache {
  cache::KvStoreOptions sizes;  // of the stores of all ranks
  std::unique_ptr<cache::BlockPool> pool;
  // Bytes of the blocks. The disk tier may write to the store until `tiers` is destroyed. Null: all ranks are
  // remote.
  std::unique_ptr<cache::KvStore> store;
  std::unique_ptr<cache::RadixTree> tree;
  std::unique_ptr<cache::KvTiers> tiers;
};

/// Time of an engine's steps so far.
struct StepSeconds {
  double prefill = 0, decode = 0;
};

/// One thread, like Engine.
class ContinuousEngine : public Engine {
 public:
  /// `threads` is borrowed. `options` are resolved.
  ContinuousEngine(const models::ModelInfo& info, runtime::ThreadPool& threads, KvCache kv,
                   std::unique_ptr<Executor> executor, std::unique_ptr<ModelDrafter> drafter,
                   const EngineOptions& options, int max_context);

  ~ContinuousEngine() override;

  void BindCaller() override { executor_->BindCaller(); }
  Status Check(const Request& request) const override;
  StatusOr<RequestId> Add(Request request) override;
  /// Like Add, with an id that is greater than those of all earlier requests.
  Status AddAs(RequestId id, Request request);
  /// Returns the number of leading prompt tokens whose whole blocks are in the radix tree. Changes nothing.
  int64_t CachedTokens(const Request& request) const;
  /// Returns the tokens still to be computed for all requests, with at most kExpectedOutputs output tokens of
  /// each.
  int64_t PendingTokens() const;
  /// Returns the tokens for which the KV cache would lack blocks if the request were added, with at most
  /// kExpectedOutputs output tokens of each request: they wait until others end, or preempt them. Idle blocks
  /// of the prefix cache count as free. `cached` is CachedTokens() of the request.
  int64_t MissingTokens(const Request& request, int64_t cached) const;
  /// Returns how many of the request's tokens the whole KV cache cannot hold, with at most kExpectedOutputs
  /// output tokens: the answer would end before them.
  int64_t CutTokens(const Request& request) const;
  /// Returns the rows that the next step could have.
  StepDemand Demand() const;
  /// Returns the tokens that this engine's rows sent to each expert. Called only between steps.
  StatusOr<models::ExpertLoad> FetchExpertLoad() { return executor_->FetchExpertLoad(); }
  Executor& executor() { return *executor_; }
  /// Limits the rows of the next step; decodes are not delayed.
  void LimitRows(int rows) { most_rows_ = rows; }
  StepSeconds seconds() const { return {.prefill = stats_.prefill_seconds, .decode = stats_.decode_seconds}; }
  void Cancel(RequestId id) override;
  Status Step(std::vector<TokenEvent>* events) override;
  /// Plans steps, commits the plans and starts their batches, until max_in_flight() of the executor are in
  /// flight, or no sequence can run before a step has finished. Finish() must be the next call. If no work is
  /// left, or if moving blocks fails, no batch is started.
  void Begin();
  /// Ends the oldest step like Step().
  Status Finish(std::vector<TokenEvent>* events);
  /// Ends all requests with an error and returns their number. The engine must not be used afterwards.
  int64_t Abort(const Status& why, std::vector<TokenEvent>* events);
  Status CheckRanks() override { return executor_->CheckPeers(); }
  void ClearCache() override;
  bool saving() const override {
    return std::ranges::any_of(kv_.tiers->all(), [](const cache::KvTier* tier) { return tier->saving(); });
  }
  void SaveCache(const std::function<bool()>& stop) override;
  bool idle() const override { return scheduler_.empty() && ended_.empty() && steps_.empty(); }
  EngineStats stats() const override;
  const models::ModelInfo& model() const override { return info_; }
  int max_context() const override { return std::min(max_context_, pool_tokens()); }
  const SpeculativeOptions& speculative() const override { return options_.speculative; }
  const SparsityOptions& sparsity() const override { return options_.sparsity; }
  Status Score(std::span<const int32_t> ids,
               const std::function<Status(int64_t first_row, std::span<const float> rows)>& sink,
               models::RouteTap* routes) override;

 private:
  // A step that has started. Its plan lacks the chunks that have advanced.
  struct StepState {
    StepPlan plan = {};
    StepBatch batch = {};
    Clock::time_point begin = {}, drafted = {};
    bool masks_are_late = false;
    bool embeds = false;  // a request wants its prompt's last hidden state
    bool moves = false;   // operations have an outcome that the next plan depends on
    int advanced_rows = 0;
  };
  int pool_tokens() const { return kv_.pool->total_blocks() * tensor::kKvBlockTokens; }
  Status CheckIds(std::span<const int32_t> ids) const;
  Status ApplyOps(cache::KvOps ops);
  Status MoveBlocks();
  void WaitForTiers();
  void TakeResult(const StepResult& result);
  Status TakeOutcome();
  void SetSparsity(Sequence& sequence);
  void End(RequestId id, FinishReason reason);
  Status RecordLoad();
  bool StartStep();
  void Follow(StepState& step);
  Status FinishMoves(StepState& step);
  Status FinishRows(StepState& step, std::vector<TokenEvent>* events);
  void DropSteps();
  static void Land(const StepPlan& plan);
  void KeepHidden(const StepPlan& plan, std::span<const float> hidden);
  static void Accept(std::span<RowTask> tasks);
  void CountAdmissions(const StepPlan& plan);
  void CountPrompts(const StepPlan& plan);
  void ReportFirst(Sequence& sequence, TokenEvent& event) const;
  void Emit(RowTask& task, std::vector<TokenEvent>* events);
  void EmitPromptOnly(std::vector<TokenEvent>* events);
  void CountTime(const StepState& step, double seconds);
  void LogSlowStep(const StepState& step, double seconds, int rows, int prefill);

  const models::ModelInfo info_;
  KvCache kv_;
  EngineOptions options_;
  const int max_context_;
  const int scored_rows_;
  const int max_in_flight_;  // steps
  Scheduler scheduler_;
  const std::unique_ptr<Executor> executor_;
  RowTasks rows_;
  std::unique_ptr<Speculation> speculation_;  // or null
  std::vector<TokenEvent> ended_;             // ends that the next Step reports
  RequestId last_id_ = 0;
  int most_rows_ = std::numeric_limits<int>::max();  // of the next step
  Status failure_;                                   // of the last Begin, before a batch started
  std::deque<StepState> steps_;                      // in flight, the oldest first
  Clock::time_point last_end_;                       // of a step
  EventLimit preempted_, slow_;                      // lines about preempted requests and slow steps
  int64_t prefilled_ = 0;                            // prefill rows computed in prefill_seconds
  EngineStats stats_;
  std::unique_ptr<ExpertLoadRecorder> load_;  // null: not recorded, or by the engine of all replicas
};

}  // namespace moesaic::engine
