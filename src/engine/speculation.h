// Speculative decoding of one engine: choice of drafter and depth, and statistics.
// docs/contracts/scheduler.md, V1 to V6, is normative.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/draft_depth.h"
#include "engine/drafter.h"
#include "engine/executor.h"
#include "engine/model_drafter.h"
#include "engine/speculative.h"

namespace moesaic::engine {

/// Engine thread only.
class Speculation {
 public:
  /// A drafter and its maximum number of tokens per sequence and step.
  struct Source {
    std::unique_ptr<Drafter> drafter;
    int most = 0;
  };

  /// If `adaptive`, DepthPolicy chooses the number of drafts, and `lookup` drafts instead of `main` if its
  /// expected tokens per second are higher. Otherwise drafts are as long as possible, and `lookup` drafts
  /// whenever it finds tokens. The drafter of `lookup` is free, and may be null.
  Speculation(Source main, Source lookup, bool adaptive)
      : drafter_(std::move(main.drafter)),
        lookup_(std::move(lookup.drafter)),
        most_(main.most),
        most_looked_up_(lookup.most),
        adaptive_(adaptive) {}

  /// Drafts for the next step, of at most `max_batch_tokens` rows. If a drafter fails, the step has no
  /// drafts. The first failure is logged; no result depends on it.
  void Draft(const std::vector<std::unique_ptr<Sequence>>& running, int max_batch_tokens);
  /// Called before and after Scheduler::Commit.
  void Planned(const StepPlan& plan) { drafter_->Admitted(plan); }
  void Committed(const StepPlan& plan, cache::KvOps* ops) { drafter_->Allocated(plan, ops); }
  /// Called after a step that took `seconds` without drafting, before Scheduler::Advance; the sequences'
  /// tokens end with the accepted drafts. `hidden` as in Drafter::Computed.
  void Computed(const StepPlan& plan, std::span<const float> hidden, double seconds);

  bool wants_hidden() const { return drafter_->wants_hidden(); }
  const SpeculationStats& stats() const { return stats_; }

 private:
  struct Jobs {
    std::vector<DraftJob> main, lookup;
  };
  Jobs MakeJobs(const std::vector<std::unique_ptr<Sequence>>& running, int max_batch_tokens);
  void DraftWith(Drafter* drafter, std::span<const DraftJob> jobs);
  DepthPolicy::Candidate ChooseSource(Sequence& sequence);
  void KeepFound(Sequence& sequence) const;
  void JudgeFound(Sequence& sequence);
  std::vector<int> Depths(const std::vector<DepthPolicy::Candidate>& candidates, int decodes, int rows);

  const std::unique_ptr<Drafter> drafter_, lookup_;
  const int most_, most_looked_up_;
  const bool adaptive_;
  DepthPolicy policy_;
  SpeculationStats stats_;
  bool failure_logged_ = false;
};

/// Creates the drafters of `options`, which are resolved; null: none. `second`: the drafter of method
/// "draft", else null. `executor` and `pool` are borrowed.
std::unique_ptr<Speculation> MakeSpeculation(const SpeculativeOptions& options, Executor& executor,
                                             const cache::BlockPool& pool, const models::ModelInfo& info,
                                             std::unique_ptr<ModelDrafter> second);

}  // namespace moesaic::engine
