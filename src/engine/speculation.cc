#include "engine/speculation.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/mtp_drafter.h"
#include "engine/ngram_drafter.h"

namespace moesaic::engine {
namespace {

// An id that the grammar's tokenizer lacks is an error, which ends the grammar that is asked. So forks are
// asked, about fewer tokens until there is no such id.
size_t CountValid(const text::Grammar& grammar, std::span<const int32_t> tokens) {
  for (; !tokens.empty(); tokens = tokens.first(tokens.size() - 1)) {
    StatusOr<text::Grammar> ahead = grammar.Fork();
    if (!ahead.ok()) return 0;
    const StatusOr<size_t> valid = ahead->CountValid(tokens);
    if (valid.ok()) return std::min(tokens.size(), *valid);
  }
  return 0;
}

// What a grammar can't have next need not be verified.
void CutInvalid(Sequence& sequence) {
  const text::Grammar* grammar = sequence.request.grammar.get();
  std::vector<int32_t>& tokens = sequence.draft.tokens;
  if (grammar != nullptr && !tokens.empty()) tokens.resize(CountValid(*grammar, tokens));
}

}  // namespace

std::vector<int> Speculation::Depths(const std::vector<DepthPolicy::Candidate>& candidates, int decodes,
                                     int rows) {
  if (adaptive_) return policy_.Choose(candidates, decodes, rows);
  std::vector<int> depths;
  for (const DepthPolicy::Candidate& candidate : candidates) {
    depths.push_back(std::min(candidate.limit, rows));
    rows -= depths.back();
  }
  return depths;
}

std::vector<DraftJob> Speculation::Jobs(const std::vector<std::unique_ptr<Sequence>>& running,
                                        int max_batch_tokens) {
  std::vector<DraftJob> jobs;
  std::vector<DepthPolicy::Candidate> candidates;
  std::vector<Sequence*> decodes;
  const bool starts = !adaptive_ || policy_.WorthStarting();
  int rows = max_batch_tokens;
  for (const auto& owned : running) {
    Sequence& sequence = *owned;
    sequence.draft.tokens.clear();
    rows -= std::min(rows, sequence.remaining());
    if (sequence.remaining() > 1) {
      if (starts && drafter_->Behind(sequence) > 0) {
        jobs.push_back({&sequence, 0});
      } else {
        drafter_->Skip(sequence);
      }
      continue;
    }
    // A draft of the first output would be verified where MLA's choice may differ (kMostDrafts).
    const int most = sequence.outputs() == 0 ? 0 : std::min(most_, sequence.limit - sequence.size() - 1);
    const int limit = most > 0 ? drafter_->Limit(sequence, most) : 0;
    decodes.push_back(&sequence);
    candidates.push_back(
        {.record = &sequence.draft.record, .limit = limit, .behind = drafter_->Behind(sequence)});
  }
  const std::vector<int> depths = Depths(candidates, static_cast<int>(decodes.size()), rows);
  for (size_t i = 0; i < decodes.size(); ++i) {
    if (depths[i] > 0) {
      jobs.push_back({decodes[i], depths[i]});
    } else {
      drafter_->Skip(*decodes[i]);
    }
  }
  return jobs;
}

void Speculation::Draft(const std::vector<std::unique_ptr<Sequence>>& running, int max_batch_tokens) {
  drafter_->Keep(running);
  const std::vector<DraftJob> jobs = Jobs(running, max_batch_tokens);
  if (jobs.empty()) return;
  int passes = 0, behind = 0;
  for (const DraftJob& job : jobs) {
    passes = std::max(passes, job.depth);
    behind += drafter_->Behind(*job.sequence);
  }
  const Clock::time_point start = Clock::now();
  if (const Status drafted = drafter_->Draft(jobs); !drafted.ok()) {
    if (!std::exchange(told_failure_, true)) {
      spdlog::error("drafting failed, steps go on without: {}", Message(drafted));
    }
    for (const DraftJob& job : jobs) job.sequence->draft.tokens.clear();
    return;
  }
  for (const DraftJob& job : jobs) CutInvalid(*job.sequence);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  policy_.CountDrafts(static_cast<int>(jobs.size()), passes, behind, seconds);
}

void Speculation::Computed(const StepPlan& plan, std::span<const float> hidden, double seconds) {
  drafter_->Computed(plan, hidden);
  int rows = 0;
  bool decodes_only = true;
  for (const StepPlan::Part& part : plan.parts) {
    Sequence& sequence = *part.sequence;
    rows += part.rows();
    decodes_only &= part.is_decode();
    if (part.drafts == 0) continue;
    ++stats_.drafts;
    stats_.draft_tokens += part.drafts;
    stats_.accepted_tokens += part.accepted;
    for (int place = 0; place < part.accepted; ++place) ++stats_.accepted_at[place];
    policy_.CountOutcome(sequence.draft.record, part.drafts, part.accepted);
  }
  if (decodes_only) policy_.CountStep(rows, seconds);
}

std::unique_ptr<Speculation> MakeSpeculation(const SpeculativeOptions& options, Executor& executor,
                                             const cache::KvPool& blocks, const models::ModelInfo& info,
                                             std::unique_ptr<ModelDrafter> second) {
  std::unique_ptr<Drafter> drafter = std::move(second);
  if (options.method == "mtp") {
    drafter = std::make_unique<MtpDrafter>(executor, blocks, info.layers, info.hidden_size);
  }
  if (options.method == "ngram") {
    drafter = std::make_unique<NgramDrafter>(options.prompt_lookup_min, options.prompt_lookup_max);
  }
  if (drafter == nullptr) return nullptr;
  return std::make_unique<Speculation>(std::move(drafter), options.most_tokens, options.adaptive);
}

}  // namespace moesaic::engine
