#include "engine/mtp_drafter.h"

#include <algorithm>
#include <cmath>

namespace moesaic::engine {
namespace {

using cache::kBlockTokens;

// Hidden states of this many tokens are kept for a sequence that is not drafted for, so that the module can
// begin again with some context: enough for the words around, and for DeepSeek-V3 3.7 MB.
constexpr int kKeptRows = 128;

// The greatest logit's token; -1 where one is not a number.
int32_t Greatest(std::span<const float> logits) {
  int32_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  return best;
}

}  // namespace

MtpDrafter::MtpDrafter(Executor& executor, const cache::KvPool& blocks, int hidden_size)
    : executor_(executor),
      hidden_size_(static_cast<size_t>(hidden_size)),
      origins_(blocks.total_blocks(), -1) {}

// The module's rows go on behind `computed`, from the next block's begin.
void MtpDrafter::Restart(Sequence& sequence, int computed) {
  sequence.draft.mtp_first = cache::BlocksFor(computed);
  sequence.draft.mtp_computed = computed;
  sequence.draft.hidden.clear();
}

// A further draft is a row behind those of the tokens, which must have its place in the blocks already.
int MtpDrafter::Limit(const Sequence& sequence, int most) {
  if (Rows(sequence) == 0) return 0;
  const int room = static_cast<int>(sequence.blocks.size()) * kBlockTokens - sequence.computed;
  return std::min(most, room + 1);
}

int MtpDrafter::Behind(const Sequence& sequence) const { return std::max(0, Rows(sequence) - 1); }

bool MtpDrafter::IsWhole(const Sequence& sequence) const {
  const DraftState& draft = sequence.draft;
  for (int i = draft.mtp_first; i < draft.mtp_computed / kBlockTokens; ++i) {
    if (origins_[sequence.block_table[i]] != draft.mtp_first) return false;
  }
  return true;
}

Status MtpDrafter::Draft(std::span<const DraftJob> jobs) {
  ASSIGN_OR_RETURN(std::vector<Chain> chains, TakeIn(jobs));
  while (!chains.empty()) {
    std::vector<MtpRows> batch;
    for (const Chain& chain : chains) {
      const DraftState& draft = chain.sequence->draft;
      const int position = chain.sequence->computed + static_cast<int>(draft.tokens.size()) - 1;
      batch.push_back({.tokens = std::span(draft.tokens).last(1),
                       .hidden = executor_.mtp_hidden().subspan(chain.row * hidden_size_, hidden_size_),
                       .block_table = std::span(chain.sequence->block_table).subspan(draft.mtp_first),
                       .start = position - draft.mtp_first * kBlockTokens,
                       .want_logits = true});
    }
    ASSIGN_OR_RETURN(const std::span<const float> logits, executor_.RunMtp(batch));
    for (size_t i = 0; i < chains.size(); ++i) chains[i].row = static_cast<int>(i);
    Append(chains, logits);
  }
  return OkStatus();
}

// Computes the rows of what the jobs' sequences have got since, and the first draft of each.
StatusOr<std::vector<MtpDrafter::Chain>> MtpDrafter::TakeIn(std::span<const DraftJob> jobs) {
  std::vector<MtpRows> batch;
  std::vector<Chain> chains;
  std::vector<Sequence*> taken;
  int rows = 0;
  for (const DraftJob& job : jobs) {
    Sequence& sequence = *job.sequence;
    const DraftState& draft = sequence.draft;
    if (!IsWhole(sequence)) Restart(sequence, sequence.computed);
    const int count = Rows(sequence);
    if (count == 0) continue;
    batch.push_back({.tokens = std::span(sequence.tokens).subspan(draft.mtp_computed + 1, count),
                     .hidden = draft.hidden,
                     .block_table = std::span(sequence.block_table).subspan(draft.mtp_first),
                     .start = draft.mtp_computed - draft.mtp_first * kBlockTokens,
                     .want_logits = job.depth > 0});
    rows += count;
    taken.push_back(&sequence);
    if (job.depth > 0) chains.push_back({.sequence = &sequence, .depth = job.depth, .row = rows - 1});
  }
  if (batch.empty()) return chains;
  ASSIGN_OR_RETURN(const std::span<const float> logits, executor_.RunMtp(batch));
  for (Sequence* sequence : taken) {
    DraftState& draft = sequence->draft;
    for (int i = draft.mtp_computed / kBlockTokens; i < sequence->computed / kBlockTokens; ++i) {
      origins_[sequence->block_table[i]] = draft.mtp_first;
    }
    draft.mtp_computed = sequence->computed;
    draft.hidden.clear();
  }
  Append(chains, logits);
  return chains;
}

// Gives each chain its likeliest token and lets go those that are deep enough. logits: [chains, vocab_size].
void MtpDrafter::Append(std::vector<Chain>& chains, std::span<const float> logits) const {
  if (chains.empty()) return;
  const size_t vocab = logits.size() / chains.size();
  for (size_t i = 0; i < chains.size(); ++i) {
    const int32_t token = Greatest(logits.subspan(i * vocab, vocab));
    if (token < 0) {
      chains[i].depth = 0;
    } else {
      chains[i].sequence->draft.tokens.push_back(token);
    }
  }
  std::erase_if(chains, [](const Chain& chain) {
    return static_cast<int>(chain.sequence->draft.tokens.size()) >= chain.depth;
  });
}

// What stands in the tree has the module's rows where all blocks from one origin on have them; their last row
// was made with the token that followed then, which is as good.
void MtpDrafter::Admitted(const StepPlan& plan) {
  for (const StepPlan::Admission& admission : plan.admit) {
    Sequence& sequence = *admission.sequence;
    const cache::PrefixMatch& prefix = admission.prefix;
    const int known = static_cast<int>(prefix.blocks.size());
    const int origin = known == 0 ? 0 : origins_[prefix.blocks.back().index()];
    bool whole = origin >= 0 && origin <= known && admission.tokens == prefix.tokens();
    for (int i = std::max(0, origin); i < known && whole; ++i) {
      whole = origins_[prefix.blocks[i].index()] == origin;
    }
    if (prefix.tail_tokens > 0) whole = whole && origins_[prefix.tail.index()] == origin;
    Restart(sequence, admission.tokens);
    if (whole) sequence.draft.mtp_first = origin;
  }
}

void MtpDrafter::Allocated(const StepPlan& plan) {
  for (const StepPlan::Part& part : plan.parts) {
    for (const int32_t block : std::span(part.sequence->block_table).last(part.new_blocks))
      origins_[block] = -1;
  }
}

void MtpDrafter::Computed(const StepPlan& plan, std::span<const float> hidden) {
  size_t row = 0;
  for (const StepPlan::Part& part : plan.parts) {
    Sequence& sequence = *part.sequence;
    DraftState& draft = sequence.draft;
    const int count = part.count + part.accepted, end = sequence.computed + count;
    if (sequence.limit - sequence.prompt_size() < 2) {  // nothing to draft, ever
      Restart(sequence, end);
    } else {
      const int skipped = std::clamp(draft.mtp_first * kBlockTokens - sequence.computed, 0, count);
      const auto kept = hidden.subspan((row + skipped) * hidden_size_, (count - skipped) * hidden_size_);
      if (skipped > 0) draft.mtp_computed = sequence.computed + skipped;
      draft.hidden.insert(draft.hidden.end(), kept.begin(), kept.end());
    }
    row += part.rows();
  }
}

void MtpDrafter::Skip(Sequence& sequence) {
  if (Rows(sequence) <= 2 * kKeptRows) return;
  DraftState& draft = sequence.draft;
  const int first = cache::BlocksFor(sequence.computed - kKeptRows);
  const int dropped = first * kBlockTokens - draft.mtp_computed;
  draft.hidden.erase(draft.hidden.begin(), draft.hidden.begin() + static_cast<int64_t>(dropped) *
                                                                      static_cast<int64_t>(hidden_size_));
  draft.mtp_first = first;
  draft.mtp_computed = first * kBlockTokens;
}

}  // namespace moesaic::engine
