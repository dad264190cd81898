// What is made of a step's rows of logits: the next tokens, and log-probabilities of prompts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/mask_worker.h"
#include "engine/sampling.h"
#include "engine/scheduler.h"
#include "runtime/thread_pool.h"

namespace moesaic::engine {

/// One row of a step's logits, or those of a draft, and what is wanted of them.
struct RowTask {
  StepPlan::ScheduledChunk* chunk;
  int prompt_index;               // >= 0: the entry of prompt_logprobs to make; -1: tokens are drawn
  int row;                        // of the step's logits; drafts' follow it
  int places;                     // at which a token may be drawn: one, and behind each draft with a mask
  Status status = OkStatus();     // of the grammar's first mask, then of the draws
  bool grammar_failed = false;    // the grammar is the reason of `status`
  std::vector<Drawn> drawn = {};  // all but the last are the draft's
};

/// Engine thread only. A step calls StartMasks, runs the model, and then calls WaitForMasks and Run.
class RowTasks {
 public:
  /// `threads` is borrowed. `eos_ids` are not drawn before a request's min_tokens.
  RowTasks(runtime::ThreadPool& threads, int vocab_size, std::vector<int32_t> eos_ids,
           double max_mask_seconds);

  /// Begins the masks of the tokens that the step draws. They depend on what was drawn before only, so they
  /// are made while the model runs.
  void StartMasks(const StepPlan& plan);
  /// Waits a short while for masks that are not ready yet, and marks the parts whose masks are late: they
  /// draw nothing in this step. From now on their sequences run only when their masks are ready.
  void CollectMasks(StepPlan& plan);
  /// Begins the mask of a sequence whose masks are slow, as soon as its last token is drawn.
  void StartSlowMask(Sequence& sequence);
  /// Waits until a mask is ready or a few milliseconds have passed.
  void WaitForAnyMask();
  /// Fails masks that have taken too long.
  void CancelOverdue() { masks_.CancelOverdue(); }
  /// Writes the sequences' prompt_logprobs and draws tokens: one for each that is due, and one more behind
  /// each draft as long as what is drawn is the draft. `logits`: [rows from FirstLogits on of all parts,
  /// vocab_size]. Histories and grammars take in what is drawn, tokens do not.
  std::vector<RowTask> Run(StepPlan& plan, std::span<const float> logits);
  /// Whether `token` ends `sequence`.
  bool Ends(const Sequence& sequence, int32_t token) const;

 private:
  std::vector<RowTask> TasksOf(StepPlan& plan);
  void StartMask(Sequence& sequence, std::span<const int32_t> drafts);
  void DrawAll(RowTask& task, std::span<const float> logits, DrawScratch& scratch) const;
  StatusOr<Drawn> DrawOne(Sequence& sequence, int place, std::span<const float> row,
                          DrawScratch& scratch) const;
  std::vector<int32_t> BannedIds(const Sequence& sequence, int place) const;

  runtime::ThreadPool& threads_;
  const size_t vocab_size_;
  const std::vector<int32_t> eos_ids_;
  MaskWorker masks_;
  std::vector<DrawScratch> scratch_;  // one a worker
};

}  // namespace moesaic::engine
