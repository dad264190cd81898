// The scratch copy on which the scheduler plans a step: remaining rows and blocks, and the decisions so far.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "engine/scheduler.h"

namespace moesaic::engine {

class PlanScratch {
 public:
  PlanScratch(const cache::BlockPool& pool, const cache::RadixTree& tree,
              std::span<cache::KvTier* const> tiers, const SchedulerOptions& options,
              const std::vector<std::unique_ptr<Sequence>>& running,
              const std::vector<std::unique_ptr<Sequence>>& waiting, RequestId front);

  /// Returns the query that tiers get for a sequence. The radix tree has `indexed_blocks` blocks and
  /// `indexed_tokens` tokens of it.
  static cache::TierQuery QueryOf(const Sequence& sequence, int indexed_blocks, int64_t indexed_tokens);

  /// Limits the rows of the plan further than the options do.
  void LimitRows(int rows) { rows_ = std::min(rows_, rows); }
  /// Plans running sequences with one remaining token, in rank order: all, or with several steps in flight an
  /// equal part of them. Cancels fetches, then preempts the last in rank, if blocks are missing.
  void PlanDecodes();
  /// Plans chunks of prompts with the remaining rows, in rank order. Their blocks were allocated at
  /// admission.
  void PlanPrefills();
  /// Admits waiting sequences as far as slots, rows and blocks go. If a tier has more blocks of one, they are
  /// fetched first.
  void PlanAdmissions();
  /// Plans drafts of the planned decodes with the remaining rows and blocks, in rank order.
  void PlanDrafts();
  StepPlan Finish() { return std::move(plan_); }

 private:
  int FreeBlocks() const;
  int DecodesOfStep() const;
  int ChunkOf(const Sequence& sequence, int computed) const;
  void Take(Sequence* sequence, int count, int new_blocks);
  void GiveBack(const Sequence& sequence);
  void CancelLastFetch();
  void PreemptLast();
  bool Before(const Sequence& a, const Sequence& b) const;
  double ServiceOf(const Sequence& sequence) const;
  bool CanAwait(const Sequence& sequence, size_t end) const;
  bool PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  void PassByAllLike(const Sequence& first, const cache::PrefixMatch& prefix,
                     std::vector<Sequence*>* line) const;
  bool Shares(const Sequence& sequence) const;
  static std::span<const int32_t> SharedTokens(const Sequence& sequence);
  cache::PrefixMatch PrefixOf(const Sequence& sequence) const;
  // A tier and its blocks of a sequence; null: no tier has any.
  struct Found {
    cache::KvTier* tier = nullptr;
    cache::TierHit hit;
  };
  Found Lookup(const Sequence& sequence, const cache::PrefixMatch& prefix) const;
  void PlanFetch(Sequence* sequence, cache::PrefixMatch prefix, Found found);
  bool Fits(int needed) const;

  const cache::BlockPool& pool_;
  const cache::RadixTree& tree_;
  const std::span<cache::KvTier* const> tiers_;
  const SchedulerOptions& options_;
  struct Fetching {
    Sequence* sequence;
    int blocks;  // blocks that the sequence holds when its fetch has ended
  };
  std::vector<Sequence*> running_;    // by rank, without those in flight
  std::vector<Sequence*> in_flight_;  // running ones that this plan leaves alone
  std::vector<Sequence*> waiting_;    // without those whose fetch is under way
  std::vector<Fetching> fetching_;    // by arrival, then those of this plan, without exclusive ones
  int reserved_ = 0;                  // blocks that fetching sequences will need after their fetch
  int taken_ = 0;                     // blocks that the plan's chunks allocate
  int given_ = 0;                     // blocks that preemptions release
  int rows_, scored_rows_;
  absl::flat_hash_map<int32_t, int> released_;  // handles of a block that preemptions release
  absl::flat_hash_map<const ClientShare*, double>
      promised_;  // service that the plan's admissions will receive
  StepPlan plan_;
};

}  // namespace moesaic::engine
