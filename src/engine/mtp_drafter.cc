#include "engine/mtp_drafter.h"

#include <algorithm>

#include "engine/sampling.h"

namespace moesaic::engine {
namespace {

using tensor::kKvBlockTokens;

// Number of last tokens whose hidden states are kept for a sequence without drafts, so that the module can
// restart with some context. They are cut to this number at twice as many: for DeepSeek-V3 at most 256
// tokens, 7.3 MB.
constexpr int kKeptRows = 128;

}  // namespace

MtpDrafter::MtpDrafter(Executor& executor, int blocks, int layer, int hidden_size)
    : executor_(executor),
      layer_(layer),
      hidden_size_(static_cast<size_t>(hidden_size)),
      origins_(blocks, -1) {}

// Restarts the module's rows with the block that holds the next token. Zeros in the place of missing rows get
// little attention weight and contribute nothing.
void MtpDrafter::Restart(Sequence& sequence, cache::KvOps* ops) const {
  DraftState& draft = sequence.draft;
  draft.mtp_first = sequence.computed / kKvBlockTokens;
  draft.mtp_computed = sequence.computed;
  draft.hidden.clear();
  NoteLastBlock(sequence);
  if (sequence.computed % kKvBlockTokens == 0) return;
  ops->push_back(
      {.kind = cache::KvOpKind::kClear, .block = sequence.block_table[draft.mtp_first], .layer = layer_});
}

// Records the block of the module's last rows unless it is full: a full block may have been replaced by an
// equal one of the tree.
void MtpDrafter::NoteLastBlock(Sequence& sequence) {
  DraftState& draft = sequence.draft;
  const bool full = draft.mtp_computed % kKvBlockTokens == 0;
  draft.mtp_block = full ? -1 : sequence.block_table[draft.mtp_computed / kKvBlockTokens];
}

// Each further draft needs a row after those of the tokens, for which the blocks must have room already.
int MtpDrafter::Limit(const Sequence& sequence, int most) {
  if (Rows(sequence) == 0) return 0;
  const int room = static_cast<int>(sequence.blocks.size()) * kKvBlockTokens - sequence.computed;
  return std::min(most, room + 1);
}

int MtpDrafter::PendingRows(const Sequence& sequence) const { return std::max(0, Rows(sequence) - 1); }

bool MtpDrafter::IsWhole(const Sequence& sequence) const {
  const DraftState& draft = sequence.draft;
  for (int i = draft.mtp_first; i < draft.mtp_computed / kKvBlockTokens; ++i) {
    if (origins_[sequence.block_table[i]] != draft.mtp_first) return false;
  }
  return draft.mtp_block < 0 || sequence.block_table[draft.mtp_computed / kKvBlockTokens] == draft.mtp_block;
}

Status MtpDrafter::Draft(std::span<const DraftJob> jobs) {
  StepResult result;
  ASSIGN_OR_RETURN(std::vector<Chain> chains, TakeIn(jobs, &result));
  while (!chains.empty()) {
    StepBatch batch = {.kind = StepKind::kMtp, .candidates = 1};
    for (const Chain& chain : chains) {
      const DraftState& draft = chain.sequence->draft;
      const int position = chain.sequence->computed + static_cast<int>(draft.tokens.size()) - 1;
      const auto hidden = result.hidden.subspan(chain.row * hidden_size_, hidden_size_);
      batch.hidden.insert(batch.hidden.end(), hidden.begin(), hidden.end());
      batch.AddRows({.sequence = chain.sequence->id,
                     .start = position - draft.mtp_first * kKvBlockTokens,
                     .first_logits = 0},
                    std::span(draft.tokens).last(1), {},
                    std::span(chain.sequence->block_table).subspan(draft.mtp_first));
    }
    ASSIGN_OR_RETURN(result, executor_.Run(batch));
    for (size_t i = 0; i < chains.size(); ++i) chains[i].row = static_cast<int>(i);
    Append(chains, result);
  }
  return OkStatus();
}

// Computes the module's rows of the tokens that each sequence got since its last draft, and its first draft.
StatusOr<std::vector<MtpDrafter::Chain>> MtpDrafter::TakeIn(std::span<const DraftJob> jobs,
                                                            StepResult* result) {
  StepBatch batch = {.kind = StepKind::kMtp, .candidates = 1};
  std::vector<Chain> chains;
  std::vector<Sequence*> taken;
  int rows = 0;
  for (const DraftJob& job : jobs) {
    Sequence& sequence = *job.sequence;
    const DraftState& draft = sequence.draft;
    if (!IsWhole(sequence)) Restart(sequence, &batch.ops_before);
    const int count = Rows(sequence);
    if (count == 0) continue;
    batch.hidden.insert(batch.hidden.end(), draft.hidden.begin(), draft.hidden.end());
    batch.AddRows({.sequence = sequence.id,
                   .start = draft.mtp_computed - draft.mtp_first * kKvBlockTokens,
                   .first_logits = job.depth > 0 ? count - 1 : count},
                  std::span(sequence.tokens).subspan(draft.mtp_computed + 1, count), {},
                  std::span(sequence.block_table).subspan(draft.mtp_first));
    rows += count;
    taken.push_back(&sequence);
    if (job.depth > 0) chains.push_back({.sequence = &sequence, .depth = job.depth, .row = rows - 1});
  }
  if (batch.rows.empty() && batch.ops_before.empty()) return chains;
  ASSIGN_OR_RETURN(*result, executor_.Run(batch));
  for (Sequence* sequence : taken) {
    DraftState& draft = sequence->draft;
    for (int i = draft.mtp_computed / kKvBlockTokens; i < sequence->computed / kKvBlockTokens; ++i) {
      origins_[sequence->block_table[i]] = draft.mtp_first;
    }
    draft.mtp_computed = sequence->computed;
    NoteLastBlock(*sequence);
    draft.hidden.clear();
  }
  Append(chains, *result);
  return chains;
}

// Appends the most likely token to each chain and removes chains that are deep enough. The result has the
// logits of one row per chain.
void MtpDrafter::Append(std::vector<Chain>& chains, const StepResult& result) const {
  if (chains.empty()) return;
  const size_t vocab = result.logits.size() / chains.size();
  for (size_t i = 0; i < chains.size(); ++i) {
    const int32_t token = result.summaries.empty() ? LikeliestToken(result.logits.subspan(i * vocab, vocab))
                                                   : LikeliestToken(result.summaries[i]);
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

// A cached prefix has the module's rows if all blocks from one origin on have them. Their last row was
// computed with the token that followed then, which serves as well.
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
    sequence.draft.mtp_first = whole ? origin : -1;
    sequence.draft.mtp_computed = admission.tokens;
    sequence.draft.mtp_block = -1;
    sequence.draft.hidden.clear();
  }
}

void MtpDrafter::Allocated(const StepPlan& plan, cache::KvOps* ops) {
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    for (const int32_t block : std::span(sequence.block_table).last(chunk.new_blocks)) origins_[block] = -1;
    if (sequence.draft.mtp_first < 0) {
      Restart(sequence, ops);
    } else if (sequence.draft.mtp_block < 0) {
      NoteLastBlock(sequence);  // the copy of a prefix's tail
    }
  }
  // Blocks from a tier may contain rows of the module, but tiers do not record this.
  for (const StepPlan::Fetch& fetch : plan.fetches) {
    for (const int32_t block : fetch.taken) origins_[block] = -1;
  }
}

void MtpDrafter::Computed(const StepPlan& plan, std::span<const float> hidden) {
  size_t row = 0;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    if (sequence.limit - sequence.prompt_size() > 1) {  // else nothing is drafted, ever
      const size_t count = chunk.kept();
      const auto kept = hidden.subspan(row * hidden_size_, count * hidden_size_);
      sequence.draft.hidden.insert(sequence.draft.hidden.end(), kept.begin(), kept.end());
    }
    row += chunk.rows();
  }
}

void MtpDrafter::Skip(Sequence& sequence) {
  if (Rows(sequence) <= 2 * kKeptRows) return;
  DraftState& draft = sequence.draft;
  const int first = tensor::KvBlocksFor(sequence.computed - kKeptRows);
  const int dropped = first * kKvBlockTokens - draft.mtp_computed;
  draft.hidden.erase(draft.hidden.begin(), draft.hidden.begin() + static_cast<int64_t>(dropped) *
                                                                      static_cast<int64_t>(hidden_size_));
  draft.mtp_first = first;
  draft.mtp_computed = first * kKvBlockTokens;
  draft.mtp_block = -1;
}

}  // namespace moesaic::engine
