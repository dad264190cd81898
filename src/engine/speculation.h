// Speculative decoding of one engine: who drafts, how deep, and how it went. docs/contracts/scheduler.md, V1
// to V6, is the law.
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
  /// A drafter and how many tokens it drafts at most for a sequence and step.
  struct Source {
    std::unique_ptr<Drafter> drafter;
    int most = 0;
  };

  /// Drafts as many tokens as pay, or always the most unless `adaptive`. `lookup`, whose drafter may be null,
  /// is free and drafts instead where it finds something that promises more; unless `adaptive`, wherever it
  /// finds something.
  Speculation(Source main, Source lookup, bool adaptive)
      : drafter_(std::move(main.drafter)),
        lookup_(std::move(lookup.drafter)),
        most_(main.most),
        most_looked_up_(lookup.most),
        adaptive_(adaptive) {}

  /// Drafts for the next step, of at most `max_batch_tokens` rows. Where that fails, nothing is drafted, and
  /// the first time is logged: no request depends on it.
  void Draft(const std::vector<std::unique_ptr<Sequence>>& running, int max_batch_tokens);
  /// Around Scheduler::Commit.
  void Planned(const StepPlan& plan) { drafter_->Admitted(plan); }
  void Committed(const StepPlan& plan, cache::KvOps* ops) { drafter_->Allocated(plan, ops); }
  /// The step took so long without drafting; `hidden` as Drafter::Computed has it. The sequences' tokens end
  /// with the accepted drafts; Scheduler::Advance comes next.
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
  bool told_failure_ = false;
};

/// What `options`, which are resolved, ask for; null when that is nothing. `second`: of "draft", else null.
/// `executor` and `pool` are borrowed.
std::unique_ptr<Speculation> MakeSpeculation(const SpeculativeOptions& options, Executor& executor,
                                             const cache::BlockPool& pool, const models::ModelInfo& info,
                                             std::unique_ptr<ModelDrafter> second);

}  // namespace moesaic::engine
