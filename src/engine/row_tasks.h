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

/// One row of a step's logits and what is wanted of it.
struct RowTask {
  Sequence* sequence;
  int prompt_index;    // >= 0: the entry of prompt_logprobs to make; -1: the next token is drawn
  Status mask_status;  // of the grammar's mask, when one is needed
  StatusOr<Drawn> drawn = Drawn{};
};

/// The first row of `part` whose logits are wanted; all behind it are, too.
int FirstLogits(const StepPlan::Part& part);

/// Engine thread only. A step calls StartMasks, runs the model, and then calls WaitForMasks and Run.
class RowTasks {
 public:
  /// `threads` is borrowed. `eos_ids` are not drawn before a request's min_tokens.
  RowTasks(runtime::ThreadPool& threads, int vocab_size, std::vector<int32_t> eos_ids);

  /// Begins the masks of the tokens that the step draws. They depend on what was drawn before only, so they
  /// are made while the model runs.
  void StartMasks(const StepPlan& plan);
  /// The masks are made; also where the model failed.
  void WaitForMasks() { made_ = masks_.Wait(); }
  /// Draws tokens and writes the sequences' prompt_logprobs. `logits`: [rows from FirstLogits on of all
  /// parts, vocab_size], and so are the tasks.
  std::vector<RowTask> Run(const StepPlan& plan, std::span<const float> logits);

 private:
  std::vector<RowTask> TasksOf(const StepPlan& plan);
  void DrawNext(RowTask& task, std::span<const float> logits, DrawScratch& scratch) const;
  std::vector<int32_t> BannedIds(const Sequence& sequence) const;

  runtime::ThreadPool& threads_;
  const size_t vocab_size_;
  const std::vector<int32_t> eos_ids_;
  MaskWorker masks_;
  std::vector<MaskWorker::Job> made_;  // in the order of the sequences that draw under a grammar
  std::vector<DrawScratch> scratch_;   // one a worker
};

}  // namespace moesaic::engine
