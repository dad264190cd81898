// Runs the steps of an engine on the ranks that hold its weights and KV blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/step_batch.h"

namespace moesaic::engine {

/// The engine decides, executors act: an executor holds the bytes and applies batches in order. One thread.
class Executor {
 public:
  virtual ~Executor() = default;

  /// Starts a batch, which is borrowed until its Finish(). Sends it to other ranks, may compute the part of
  /// this process, and does not wait for results of others. Finish() returns the error of a start that
  /// failed.
  virtual void Start(const StepBatch& batch) = 0;
  /// Ends the oldest batch that was started: applies ops_before, computes the rows, applies ops_after. When
  /// the model fails, or a block that is paged in is damaged (KvResult::damaged_block), the rows count as not
  /// computed: ops_before stay applied, ops_after are not, and the same rows may be run again.
  virtual StatusOr<StepResult> Finish() = 0;
  /// Batches that may have started and not finished. If it is more than 1, a batch that fails is final: every
  /// later one fails, too.
  virtual int max_in_flight() const { return 1; }
  /// Starts a batch and finishes it. No other batch may be in flight.
  StatusOr<StepResult> Run(const StepBatch& batch) {
    Start(batch);
    return Finish();
  }
  /// Returns logits [rows.size(), vocab_size] of the batch that finished last, whose result has summaries.
  /// `rows` are indices among the batch's rows that need logits. Valid until the next call of Start or
  /// FetchLogits.
  virtual StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t> rows) = 0;
  /// Returns an error if a rank has died. Called while no batch is in flight.
  virtual Status CheckPeers() { return OkStatus(); }
  /// Returns the tokens that the routers of all layers sent to each expert, counted over this executor's
  /// rows. Waits for other ranks' parts of the batches in flight.
  virtual StatusOr<models::ExpertLoad> FetchExpertLoad() { return models::ExpertLoad{}; }
  /// Starts a move of experts on all ranks. DropExpertMove() cancels it. Ranks report the state of the move
  /// with later batches.
  virtual Status BeginExpertMove(const models::ExpertMoveOrder&) {
    return Unimplemented("experts can't move");
  }
  virtual Status DropExpertMove() { return OkStatus(); }
  /// State of the move on each rank, as reported with the last batch.
  virtual std::vector<models::ExpertMoveReport> move_reports() const { return {}; }
  /// Continues without exactly these ranks of the job. Called between batches, on the executors of all
  /// replicas that are left.
  virtual Status ExcludeRanks(std::span<const int>) { return Unimplemented("all ranks are needed"); }
  /// Marks the ranks of this executor as dead: batches in flight and all later ones end with `why`.
  virtual void Lose(const Status& /*why*/) {}
  /// Returns whether this executor can't reach its ranks any more, so that every later batch fails.
  virtual bool lost() const { return false; }
  /// Returns the work of all ranks so far; empty: this process is the only rank.
  virtual std::vector<RankStats> ranks() const { return {}; }
  /// Binds the calling thread, which calls Finish, to its core.
  virtual void BindCaller() {}
};

}  // namespace moesaic::engine
