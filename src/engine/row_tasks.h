// Draws tokens and computes prompt log-probabilities from a step's logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/executor.h"
#include "engine/mask_worker.h"
#include "engine/sampling.h"
#include "engine/scheduler.h"
#include "runtime/thread_pool.h"

namespace moesaic::engine {

/// Work for one row of a step's logits, or for the rows of a draft.
struct RowTask {
  StepPlan::ScheduledChunk* chunk;
  int prompt_index;  // >= 0: entry of prompt_logprobs to compute; -1: draw tokens
  int row;           // of the step's logits; rows of drafts follow it
  int places;        // number of tokens that may be drawn: one, and one after each draft with a mask
  Status status = OkStatus();     // of the grammar's first mask, then of the draws
  bool grammar_failed = false;    // the grammar is the reason of `status`
  bool needs_logits = false;      // the row after those drawn, or the row of a prompt_logprobs entry
  std::vector<Drawn> drawn = {};  // all but the last are accepted drafts
};

/// Draws the tokens of a step. The step calls StartMasks, runs the model, and then calls CollectMasks and
/// Run. Engine thread only.
class RowTasks {
 public:
  /// `threads` is borrowed. `eos_ids` are not drawn before a request's min_tokens.
  RowTasks(runtime::ThreadPool& threads, int vocab_size, std::vector<int32_t> eos_ids,
           double max_mask_seconds);

  /// Starts to compute the masks of the tokens that the step draws. They depend on earlier tokens only, so
  /// they are computed while the model runs.
  void StartMasks(const StepPlan& plan);
  /// Waits a short time for masks that are not ready, and marks chunks whose masks are late: they draw
  /// nothing in this step. Their sequences then run only when their masks are ready.
  void CollectMasks(StepPlan& plan);
  /// Starts the mask of a sequence with slow masks as soon as its last token is drawn.
  void StartSlowMask(Sequence& sequence);
  /// Waits until a mask is ready or a few milliseconds have passed.
  void WaitForAnyMask();
  /// Fails masks that exceed their CPU time.
  void CancelOverdue() { masks_.CancelOverdue(); }
  /// Writes prompt_logprobs and draws tokens: one per decode, and one more after each draft that equals the
  /// drawn token. `result` has rows from FirstLogits on of all chunks; logits that its summaries lack are
  /// fetched from `executor`. Histories and grammars are updated; tokens are not.
  StatusOr<std::vector<RowTask>> Run(StepPlan& plan, const StepResult& result, Executor& executor);
  /// Returns whether `token` ends `sequence`.
  bool Ends(const Sequence& sequence, int32_t token) const;

 private:
  std::vector<RowTask> TasksOf(StepPlan& plan);
  void StartMask(Sequence& sequence, std::span<const int32_t> drafts);
  // The logits or summaries of a task's rows from `first` on.
  struct TaskRows {
    int first = 0;
    std::span<const float> logits;          // or empty
    std::span<const RowSummary> summaries;  // or empty
  };
  void RunTasks(std::span<RowTask* const> tasks, std::span<const TaskRows> rows);
  void Compute(RowTask& task, const TaskRows& rows, DrawScratch& scratch) const;
  void DrawAll(RowTask& task, const TaskRows& rows, DrawScratch& scratch) const;
  StatusOr<Drawn> DrawOne(Sequence& sequence, int place, const TaskRows& rows, DrawScratch& scratch) const;
  std::vector<int32_t> BannedIds(const Sequence& sequence, int place) const;

  runtime::ThreadPool& threads_;
  const size_t vocab_size_;
  const std::vector<int32_t> eos_ids_;
  MaskWorker masks_;
  std::vector<DrawScratch> scratch_;  // [workers]
};

}  // namespace moesaic::engine
