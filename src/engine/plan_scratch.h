// The scratch copy on which a step is planned: what it may still spend, and what it has decided.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <memory>
#include <vector>

#include "engine/scheduler.h"

namespace moesaic::engine {

class PlanScratch {
 public:
  /// `cold` and `warm` may be null.
  PlanScratch(const cache::KvPool& pool, const cache::RadixTree& tree, const ColdBlocks* cold,
              const WarmBlocks* warm, const SchedulerOptions& options,
              const std::vector<std::unique_ptr<Sequence>>& running,
              const std::vector<std::unique_ptr<Sequence>>& waiting, RequestId front);

  /// Every running sequence with one token left gets it, in rank order; loads, then the last in rank pay
  /// with their blocks.
  void PlanDecodes();
  /// What rows are left go to prompts, in rank order. Their blocks were taken at admission.
  void PlanPrefills();
  /// Then those who wait, as far as slots, rows and blocks go; where the warm tier or the disk has
  /// more of one, that comes first.
  void PlanAdmissions();
  /// Rows and blocks that are left verify drafts of the planned decodes, in rank order.
  void PlanDrafts();
  StepPlan Finish() { return std::move(plan_); }

 private:
  int FreeBlocks() const;
  int ChunkOf(const Sequence& sequence, int computed) const;
  void Take(Sequence* sequence, int count, int new_blocks);
  void GiveBack(const Sequence& sequence);
  void AbandonLoad();
  void PreemptLast();
  bool Before(const Sequence& a, const Sequence& b) const;
  double ServiceOf(const Sequence& sequence) const;
  bool PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  bool Shares(const Sequence& sequence) const;
  static std::span<const int32_t> SharedTokens(const Sequence& sequence);
  cache::PrefixMatch PrefixOf(const Sequence& sequence) const;
  int BlocksToLoad(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  std::vector<cache::SwapRef> WarmBehind(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  void PlanPromotion(Sequence* sequence, cache::PrefixMatch prefix, std::vector<cache::SwapRef> warm);
  void PlanLoad(Sequence* sequence, cache::PrefixMatch prefix, int blocks);
  bool Fits(int needed) const;

  const cache::KvPool& pool_;
  const cache::RadixTree& tree_;
  const ColdBlocks* const cold_;
  const WarmBlocks* const warm_;
  const SchedulerOptions& options_;
  struct Loading {
    Sequence* sequence;
    int blocks;  // that it will hold when its load has ended
  };
  std::vector<Sequence*> running_;  // by rank
  std::vector<Sequence*> waiting_;  // but for those whose load is under way
  std::vector<Loading> loading_;    // by arrival, then those of this plan
  int reserved_ = 0;                // blocks that sequences whose load is under way will need beyond it
  int taken_ = 0;                   // blocks that the plan's parts take
  int given_ = 0;                   // blocks that preemptions give back
  int rows_, scored_rows_;
  absl::flat_hash_map<int32_t, int> released_;                // handles of a block that preemptions release
  absl::flat_hash_map<const ClientShare*, double> promised_;  // service that the plan's admissions get
  StepPlan plan_;
};

}  // namespace moesaic::engine
