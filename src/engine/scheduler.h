// Decides what runs in the next step. A plan is made on a scratch copy of the pool's capacity and changes
// nothing; Commit then pays for it and cannot fail. docs/contracts/scheduler.md is the law.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "cache/kv_pool.h"
#include "engine/sequence.h"

namespace moesaic::engine {

struct SchedulerOptions {
  int max_sequences = 0;
  int max_batch_tokens = 0;  // >= max_sequences
  int max_scored_rows = 0;   // rows of one step whose prompt logprobs are wanted; >= 1
};

/// One step: who leaves, who enters, and how many tokens of whom are computed, in batch order.
/// Valid until the scheduler changes.
struct StepPlan {
  struct Part {
    Sequence* sequence;
    int count;       // tokens from `computed` on
    int new_blocks;  // to take for them
  };
  std::vector<Sequence*> preempt;  // youngest first
  std::vector<Sequence*> admit;    // oldest first
  std::vector<Part> parts;
};

/// First come, first served, with continuous batching, chunked prefill and preemption by recomputation.
/// Every running sequence is older than every waiting one.
class Scheduler {
 public:
  /// `pool` is borrowed and must outlive the scheduler.
  Scheduler(cache::KvPool& pool, const SchedulerOptions& options);

  /// Takes in a sequence that is younger than all others and that fits into the whole pool (limit).
  void Add(std::unique_ptr<Sequence> sequence);
  /// Takes a sequence out; its blocks are free when this returns. False when there is none of that id.
  bool Remove(RequestId id);

  StepPlan Plan() const;
  void Commit(const StepPlan& plan);

  bool empty() const { return running_.empty() && waiting_.empty(); }
  const std::vector<std::unique_ptr<Sequence>>& running() const { return running_; }
  const std::deque<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }

 private:
  cache::KvPool& pool_;
  const SchedulerOptions options_;
  std::vector<std::unique_ptr<Sequence>> running_;  // by arrival
  std::deque<std::unique_ptr<Sequence>> waiting_;   // by arrival
};

}  // namespace moesaic::engine
