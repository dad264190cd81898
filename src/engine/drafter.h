// The interface of drafters, which propose the tokens that a step verifies after a decode: n-gram look-up,
// the model's own MTP module, or a second model. Proposals change the number of steps, never the result.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/scheduler.h"

namespace moesaic::engine {

/// A running sequence to draft for before the next step.
struct DraftJob {
  Sequence* sequence;
  int depth;  // number of tokens to draft, at most Limit's; 0: only process new tokens
};

/// Each step calls Limit and Draft, Admitted and Allocated around Commit, and Computed after the draws.
/// Engine thread only.
class Drafter {
 public:
  virtual ~Drafter() = default;
  /// Forgets all sequences but `running`, which are ordered by id. Called before Limit.
  virtual void Keep(const std::vector<std::unique_ptr<Sequence>>&) {}
  /// Returns the number of tokens, at most `most`, that it could draft now for `sequence`, a decode.
  virtual int Limit(const Sequence& sequence, int most) = 0;
  /// Returns the number of rows that it must compute for `sequence` before the first draft.
  virtual int PendingRows(const Sequence& sequence) const = 0;
  /// Returns the tokens that Limit found for `sequence`, if this drafter looks tokens up. Valid until the
  /// next Keep.
  virtual std::span<const int32_t> Found(const Sequence&) const { return {}; }
  /// Returns whether the cost of its drafts is negligible.
  virtual bool is_free() const { return false; }
  /// Appends up to `depth` tokens to each job's draft.tokens, which are empty.
  virtual Status Draft(std::span<const DraftJob> jobs) = 0;
  /// Returns whether Computed needs final hidden states.
  virtual bool wants_hidden() const { return false; }
  /// Called before Commit: the plan's admissions still have their prefixes.
  virtual void Admitted(const StepPlan&) {}
  /// Called after Commit allocated the plan's blocks. `ops` are applied before the step's rows.
  virtual void Allocated(const StepPlan&, cache::KvOps*) {}
  /// Called after the step, before Scheduler::Advance. hidden: [all rows, hidden_size] if needed.
  virtual void Computed(const StepPlan&, std::span<const float>) {}
  /// Called for a sequence whose drafts do not pay at present. The drafter may drop its state of the
  /// sequence.
  virtual void Skip(Sequence&) {}
};

}  // namespace moesaic::engine
