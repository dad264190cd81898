// The scratch copy on which a step is planned: what it may still spend, and what it has decided.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <memory>
#include <vector>

#include "engine/scheduler.h"

namespace moesaic::engine {

class PlanScratch {
 public:
  PlanScratch(const cache::KvPool& pool, const cache::RadixTree& tree, const SchedulerOptions& options,
              const std::vector<std::unique_ptr<Sequence>>& running, RequestId front);

  /// Every running sequence with one token left gets it, in rank order; the last in rank pay with their
  /// blocks.
  void PlanDecodes();
  /// What rows are left go to prompts, in rank order. Their blocks were taken at admission.
  void PlanPrefills();
  /// Then those who wait, as far as slots, rows and blocks go.
  void PlanAdmissions(const std::vector<std::unique_ptr<Sequence>>& waiting);
  /// Rows and blocks that are left verify drafts of the planned decodes, in rank order.
  void PlanDrafts();
  StepPlan Finish() { return std::move(plan_); }

 private:
  int FreeBlocks() const;
  int ChunkOf(const Sequence& sequence, int computed) const;
  void Take(Sequence* sequence, int count, int new_blocks);
  void PreemptLast();
  bool Before(const Sequence& a, const Sequence& b) const;
  double ServiceOf(const Sequence& sequence) const;
  bool PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  cache::PrefixMatch PrefixOf(const Sequence& sequence) const;
  bool Fits(int needed) const;

  const cache::KvPool& pool_;
  const cache::RadixTree& tree_;
  const SchedulerOptions& options_;
  std::vector<Sequence*> running_;  // by rank
  int taken_ = 0;                   // blocks that the plan's parts take
  int given_ = 0;                   // blocks that preemptions give back
  int rows_, scored_rows_;
  absl::flat_hash_map<int32_t, int> released_;                // handles of a block that preemptions release
  absl::flat_hash_map<const ClientShare*, double> promised_;  // service that the plan's admissions get
  StepPlan plan_;
};

}  // namespace moesaic::engine
