#include "engine/speculation.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/mtp_drafter.h"
#include "engine/ngram_drafter.h"

namespace moesaic::engine {
namespace {

// An id that the grammar's tokenizer lacks is an error that ends the grammar. So forks are queried, with
// fewer tokens until there is no such id.
size_t CountValid(const text::Grammar& grammar, std::span<const int32_t> tokens) {
  for (; !tokens.empty(); tokens = tokens.first(tokens.size() - 1)) {
    StatusOr<text::Grammar> ahead = grammar.Fork();
    if (!ahead.ok()) return 0;
    const StatusOr<size_t> valid = ahead->CountValid(tokens);
    if (valid.ok()) return std::min(tokens.size(), *valid);
  }
  return 0;
}

// Cuts draft tokens that the grammar cannot accept, which need not be verified.
void CutInvalid(Sequence& sequence) {
  const text::Grammar* grammar = sequence.request.grammar.get();
  std::vector<int32_t>& tokens = sequence.draft.tokens;
  if (grammar == nullptr || tokens.empty()) return;
  const size_t drafted = tokens.size();
  tokens.resize(CountValid(*grammar, tokens));
  sequence.draft.cut = tokens.size() < drafted;
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

void Speculation::KeepFound(Sequence& sequence) const {
  const std::span<const int32_t> found = (lookup_ != nullptr ? *lookup_ : *drafter_).Found(sequence);
  sequence.draft.found.assign(found.begin(), found.end());
  sequence.draft.found_at = sequence.size();
}

// Look-up results exist whether they are drafted or not. Results that no step verified are compared with the
// tokens drawn since, so that look-up is used again once it is right again.
void Speculation::JudgeFound(Sequence& sequence) {
  DraftState& draft = sequence.draft;
  if (draft.found.empty()) return;
  const std::span<const int32_t> said = std::span(sequence.tokens).subspan(draft.found_at);
  const auto known = std::span(draft.found).first(std::min(draft.found.size(), said.size()));
  const auto right = std::ranges::mismatch(known, said).in1 - known.begin();
  if (!known.empty()) {
    policy_.CountUnused(lookup_ != nullptr ? draft.lookup_record : draft.record,
                        static_cast<int>(known.size()), static_cast<int>(right));
  }
  draft.found.clear();
}

// Chooses the drafter for a decode.
DepthPolicy::Candidate Speculation::ChooseSource(Sequence& sequence) {
  DraftState& draft = sequence.draft;
  draft.looked_up = false;
  // A draft of the first output would be verified where MLA's choice may differ (kMaxDrafts).
  const int room = sequence.outputs() == 0 ? 0 : sequence.limit - sequence.size() - 1;
  const auto limit = [&](Drafter& drafter, int most) {
    return room > 0 ? drafter.Limit(sequence, std::min(most, room)) : 0;
  };
  const DepthPolicy::Candidate main = {.record = &draft.record,
                                       .limit = limit(*drafter_, most_),
                                       .pending_rows = drafter_->PendingRows(sequence),
                                       .is_free = drafter_->is_free()};
  if (lookup_ == nullptr) return main;
  const DepthPolicy::Candidate lookup = {.record = &draft.lookup_record,
                                         .limit = limit(*lookup_, most_looked_up_),
                                         .pending_rows = 0,
                                         .is_free = true};
  if (lookup.limit == 0 || (adaptive_ && policy_.Rate(lookup) <= policy_.Rate(main))) return main;
  draft.looked_up = true;
  return lookup;
}

Speculation::Jobs Speculation::MakeJobs(const std::vector<std::unique_ptr<Sequence>>& running,
                                        int max_batch_tokens) {
  Jobs jobs;
  std::vector<DepthPolicy::Candidate> candidates;
  std::vector<Sequence*> decodes;
  const bool starts = !adaptive_ || policy_.WorthStarting();
  int rows = max_batch_tokens;
  for (const auto& owned : running) {
    Sequence& sequence = *owned;
    sequence.draft.Drop();
    rows -= std::min(rows, sequence.remaining());
    if (sequence.remaining() > 1) {
      if (starts && drafter_->PendingRows(sequence) > 0) {
        jobs.main.push_back({&sequence, 0});
      } else {
        drafter_->Skip(sequence);
      }
      continue;
    }
    if (sequence.slow_masks || sequence.waits_for_mask()) {  // the mask's thread may hold the grammar
      drafter_->Skip(sequence);
      continue;
    }
    decodes.push_back(&sequence);
    JudgeFound(sequence);
    candidates.push_back(ChooseSource(sequence));
    KeepFound(sequence);
  }
  const std::vector<int> depths = Depths(candidates, static_cast<int>(decodes.size()), rows);
  for (size_t i = 0; i < decodes.size(); ++i) {
    const bool looked_up = decodes[i]->draft.looked_up;
    if (depths[i] > 0) (looked_up ? jobs.lookup : jobs.main).push_back({decodes[i], depths[i]});
    if (depths[i] == 0 || looked_up) drafter_->Skip(*decodes[i]);
  }
  return jobs;
}

void Speculation::Draft(const std::vector<std::unique_ptr<Sequence>>& running, int max_batch_tokens) {
  drafter_->Keep(running);
  if (lookup_ != nullptr) lookup_->Keep(running);
  const Jobs jobs = MakeJobs(running, max_batch_tokens);
  DraftWith(lookup_.get(), jobs.lookup);
  DraftWith(drafter_.get(), jobs.main);
}

void Speculation::DraftWith(Drafter* drafter, std::span<const DraftJob> jobs) {
  if (jobs.empty()) return;
  std::vector<int> pending;
  for (const DraftJob& job : jobs) pending.push_back(drafter->PendingRows(*job.sequence));
  const Clock::time_point start = Clock::now();
  if (const Status drafted = drafter->Draft(jobs); !drafted.ok()) {
    if (!std::exchange(failure_logged_, true)) {
      spdlog::error("drafting failed: {}; steps continue without drafts", Message(drafted));
    }
    for (const DraftJob& job : jobs) job.sequence->draft.Drop();
    return;
  }
  int passes = 0, pending_rows = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Sequence& sequence = *jobs[i].sequence;
    // Drafters may defer a job, or lack the memory for it.
    passes = std::max(passes, static_cast<int>(sequence.draft.tokens.size()));
    pending_rows += std::max(0, pending[i] - drafter->PendingRows(sequence));
    CutInvalid(sequence);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (!drafter->is_free()) policy_.CountDrafts(static_cast<int>(jobs.size()), passes, pending_rows, seconds);
}

void Speculation::Computed(const StepPlan& plan, std::span<const float> hidden, double seconds) {
  drafter_->Computed(plan, hidden);
  int rows = 0;
  bool decodes_only = true;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    rows += chunk.rows();
    decodes_only &= chunk.is_decode();
    if (chunk.late) continue;
    DraftState& draft = sequence.draft;
    const bool is_free = draft.looked_up || drafter_->is_free();
    if (chunk.drafts > 0) {
      ++stats_.drafts;
      stats_.draft_tokens += chunk.drafts;
      stats_.accepted_tokens += chunk.accepted;
      for (int place = 0; place < chunk.accepted; ++place) ++stats_.accepted_at[place];
    }
    // The token that the grammar cut off after a whole draft was drafted and is wrong.
    const bool wrong_end = draft.cut && chunk.drafts == static_cast<int>(draft.tokens.size());
    const int judged = chunk.drafts + (wrong_end ? 1 : 0);
    // Nothing was drafted, or JudgeFound() counts the look-up, which was not verified.
    if (judged == 0 || (is_free && chunk.drafts == 0)) continue;
    policy_.CountOutcome(draft.looked_up ? draft.lookup_record : draft.record, is_free, judged,
                         chunk.accepted);
    if (is_free) draft.found.clear();
  }
  if (decodes_only) policy_.CountStep(rows, seconds);
}

std::unique_ptr<Speculation> MakeSpeculation(const SpeculativeOptions& options, Executor& executor,
                                             const cache::BlockPool& pool, const models::ModelInfo& info,
                                             std::unique_ptr<ModelDrafter> second) {
  const auto look_up = [&] {
    return std::make_unique<NgramDrafter>(options.prompt_lookup_min, options.prompt_lookup_max);
  };
  Speculation::Source main{.drafter = std::move(second), .most = options.most_tokens}, lookup;
  if (UsesMtp(options.method)) {
    main.drafter = std::make_unique<MtpDrafter>(executor, pool.total_blocks(), info.layers, info.hidden_size);
  }
  if (options.method == "mtp+ngram") {
    main.most = std::min(main.most, kMtpTokens);
    lookup = {.drafter = look_up(), .most = options.most_tokens};
  }
  if (options.method == "ngram") main.drafter = look_up();
  if (main.drafter == nullptr) return nullptr;
  return std::make_unique<Speculation>(std::move(main), std::move(lookup), options.adaptive);
}

}  // namespace moesaic::engine
