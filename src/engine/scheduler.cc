#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moesaic::engine {
namespace {

// Blocks that come back when `sequence` lets go: those that nobody else holds.
int ReleasableBlocks(const Sequence& sequence) {
  return static_cast<int>(std::count_if(sequence.blocks.begin(), sequence.blocks.end(),
                                        [](const cache::BlockRef& block) { return block.unique(); }));
}

// The scratch copy of what a step may spend.
class Draft {
 public:
  Draft(const cache::KvPool& pool, const SchedulerOptions& options,
        const std::vector<std::unique_ptr<Sequence>>& running)
      : free_blocks_(pool.free_blocks()),
        rows_(options.max_batch_tokens),
        scored_rows_(options.max_scored_rows),
        max_sequences_(static_cast<size_t>(options.max_sequences)) {
    for (const auto& sequence : running) running_.push_back(sequence.get());
  }

  // Every running sequence with one token left gets it, oldest first; the youngest pay with their blocks.
  void PlanDecodes() {
    for (size_t i = 0; i < running_.size(); ++i) {
      Sequence* sequence = running_[i];
      if (sequence->remaining() != 1) continue;
      const int needed = cache::BlocksFor(sequence->size()) - static_cast<int>(sequence->blocks.size());
      while (free_blocks_ < needed && running_.size() > i) PreemptYoungest();
      if (running_.size() <= i) return;  // it was the youngest itself
      free_blocks_ -= needed;
      Take(sequence, 1, needed);
    }
  }

  // What rows are left go to prompts, oldest first. Their blocks were taken at admission.
  void PlanPrefills() {
    for (Sequence* sequence : running_) {
      if (sequence->remaining() <= 1) continue;
      if (const int count = ChunkOf(*sequence); count > 0) Take(sequence, count, 0);
    }
  }

  void Admit(const std::deque<std::unique_ptr<Sequence>>& waiting) {
    if (!plan_.preempt.empty()) return;
    for (const auto& next : waiting) {
      if (running_.size() == max_sequences_) return;
      // A block to spare for each running sequence: none of them can need more within its next 64 tokens, so
      // an admission is not undone at once.
      const int spare = running_.empty() ? 0 : static_cast<int>(running_.size()) + 1;
      const int needed = cache::BlocksFor(next->size());
      const int count = ChunkOf(*next);
      if (free_blocks_ < needed + spare || count == 0) return;
      free_blocks_ -= needed;
      running_.push_back(next.get());
      plan_.admit.push_back(next.get());
      Take(next.get(), count, needed);
    }
  }

  StepPlan Finish() { return std::move(plan_); }

 private:
  int ChunkOf(const Sequence& sequence) const {
    const int count = std::min(sequence.remaining(), rows_);
    return sequence.wants_prompt_logprobs() ? std::min(count, scored_rows_) : count;
  }

  void Take(Sequence* sequence, int count, int new_blocks) {
    rows_ -= count;
    if (sequence->wants_prompt_logprobs()) scored_rows_ -= count;
    plan_.parts.push_back({sequence, count, new_blocks});
  }

  void PreemptYoungest() {
    Sequence* victim = running_.back();
    running_.pop_back();
    free_blocks_ += ReleasableBlocks(*victim);
    plan_.preempt.push_back(victim);
  }

  int free_blocks_;
  int rows_;
  int scored_rows_;
  size_t max_sequences_;
  std::vector<Sequence*> running_;  // by arrival
  StepPlan plan_;
};

}  // namespace

Scheduler::Scheduler(cache::KvPool& pool, const SchedulerOptions& options) : pool_(pool), options_(options) {
  MOESAIC_CHECK_LE(1, options.max_sequences);
  MOESAIC_CHECK_LE(options.max_sequences, options.max_batch_tokens);
  MOESAIC_CHECK_LE(1, options.max_scored_rows);
}

void Scheduler::Add(std::unique_ptr<Sequence> sequence) {
  MOESAIC_CHECK_LE(sequence->size(), sequence->limit);
  MOESAIC_CHECK_LE(cache::BlocksFor(sequence->limit), pool_.total_blocks());
  const Sequence* youngest = !waiting_.empty()   ? waiting_.back().get()
                             : !running_.empty() ? running_.back().get()
                                                 : nullptr;
  MOESAIC_CHECK(youngest == nullptr || youngest->id < sequence->id);
  waiting_.push_back(std::move(sequence));
}

bool Scheduler::Remove(RequestId id) {
  const auto is_it = [id](const std::unique_ptr<Sequence>& sequence) { return sequence->id == id; };
  return std::erase_if(running_, is_it) + std::erase_if(waiting_, is_it) > 0;
}

StepPlan Scheduler::Plan() const {
  Draft draft(pool_, options_, running_);
  draft.PlanDecodes();
  draft.PlanPrefills();
  draft.Admit(waiting_);
  return draft.Finish();
}

void Scheduler::Commit(const StepPlan& plan) {
  for (Sequence* victim : plan.preempt) {
    MOESAIC_CHECK(running_.back().get() == victim);
    victim->blocks.clear();
    victim->block_table.clear();
    victim->computed = 0;
    waiting_.push_front(std::move(running_.back()));
    running_.pop_back();
  }
  for (Sequence* next : plan.admit) {
    MOESAIC_CHECK(waiting_.front().get() == next);
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  for (const StepPlan::Part& part : plan.parts) {
    for (int i = 0; i < part.new_blocks; ++i) {
      auto block = pool_.Allocate();
      MOESAIC_CHECK(block.ok());  // the plan counted it
      part.sequence->block_table.push_back(block->index());
      part.sequence->blocks.push_back(*std::move(block));
    }
  }
}

}  // namespace moesaic::engine
