// Who proposes the tokens that a step verifies behind a decode: the n-gram lookup, the model's own MTP module
// or a second model. What is proposed never changes what is said, only how many steps it takes.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/scheduler.h"

namespace moesaic::engine {

/// What one running sequence is to get before the next step.
struct DraftJob {
  Sequence* sequence;
  int depth;  // tokens wanted, at most Limit's; 0: the drafter only takes in what is new
};

/// Engine thread only. In each step: Limit and Draft, Admitted and Allocated around Commit, Computed after
/// the draws.
class Drafter {
 public:
  virtual ~Drafter() = default;
  /// `running` are all there are, by id; of others nothing need be kept. Before Limit.
  virtual void Keep(const std::vector<std::unique_ptr<Sequence>>&) {}
  /// Tokens that it could draft behind those of `sequence`, a decode, now; at most `most`.
  virtual int Limit(const Sequence& sequence, int most) = 0;
  /// Rows that it has to compute for `sequence` before its first draft; 0: none.
  virtual int Behind(const Sequence& sequence) const = 0;
  /// What Limit has found for `sequence` already, where that is how it drafts; until the next Keep.
  virtual std::span<const int32_t> Found(const Sequence&) const { return {}; }
  /// Whether its drafts cost nothing that is worth counting.
  virtual bool is_free() const { return false; }
  /// Appends up to `depth` tokens to each job's draft.tokens, which are empty.
  virtual Status Draft(std::span<const DraftJob> jobs) = 0;
  /// Whether Computed wants final hidden states.
  virtual bool wants_hidden() const { return false; }
  /// The plan's admissions still hold what they were promised.
  virtual void Admitted(const StepPlan&) {}
  /// Commit has taken the plan's new blocks. `ops` are applied before the step's rows.
  virtual void Allocated(const StepPlan&, cache::KvOps*) {}
  /// The step is computed: `hidden` [all rows, hidden_size], when wanted. Scheduler::Advance comes next.
  virtual void Computed(const StepPlan&, std::span<const float>) {}
  /// `sequence` is not worth drafting for now: what is kept for it may be forgotten.
  virtual void Skip(Sequence&) {}
};

}  // namespace moesaic::engine
