#include "engine/model_drafter.h"

#include <algorithm>
#include <utility>

#include "engine/sampling.h"
#include "kernels/kernel_table.h"

namespace moesaic::engine {

ModelDrafter::ModelDrafter(models::Model& model, const kernels::KernelTable& kernels,
                           runtime::ThreadPool& threads, std::unique_ptr<cache::KvStore> store, int max_rows)
    : context_(model.info().context_length),
      max_rows_(max_rows),
      store_(std::move(store)),
      pool_(store_->blocks()),
      executor_(model, kernels, threads, *store_, /*first_sparse_layer=*/0) {}

void ModelDrafter::Keep(const std::vector<std::unique_ptr<Sequence>>& running) {
  const auto runs = [&running](RequestId id) {
    const auto it =
        std::lower_bound(running.begin(), running.end(), id,
                         [](const auto& sequence, RequestId wanted) { return sequence->id < wanted; });
    return it != running.end() && (*it)->id == id;
  };
  absl::erase_if(states_, [&runs](const auto& entry) { return !runs(entry.first); });
}

// Returns the number of tokens that the second model reads: those computed so far during a prefill, then all.
int ModelDrafter::End(const Sequence& sequence) {
  return sequence.remaining() > 1 ? sequence.computed : sequence.size();
}

// Leading tokens that it has: refused drafts are not among them.
int ModelDrafter::Known(const State& state, const Sequence& sequence) {
  const auto [known, same] =
      std::mismatch(state.tokens.begin(), state.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
  return static_cast<int>(known - state.tokens.begin());
}

int ModelDrafter::Limit(const Sequence& sequence, int most) {
  return std::clamp(context_ - sequence.size() + 1, 0, most);
}

int ModelDrafter::PendingRows(const Sequence& sequence) const {
  const auto it = states_.find(sequence.id);
  const int known = it == states_.end() ? 0 : Known(*it->second, sequence);
  return std::max(0, std::min(End(sequence), context_) - known - 1);
}

// Blocks for so many tokens; false when there are too few, and then the sequence has none.
bool ModelDrafter::Reserve(State& state, int tokens) {
  const int missing = tensor::KvBlocksFor(tokens) - static_cast<int>(state.blocks.size());
  if (missing > pool_.free_blocks() || tokens > context_) {
    state = State();
    return false;
  }
  for (int i = 0; i < missing; ++i) {
    state.blocks.push_back(*pool_.Allocate());
    state.block_table.push_back(state.blocks.back().index());
  }
  return true;
}

Status ModelDrafter::Draft(std::span<const DraftJob> jobs) {
  std::vector<Chain> chains;
  for (const DraftJob& job : jobs) {
    std::unique_ptr<State>& state = states_[job.sequence->id];
    if (state == nullptr) state = std::make_unique<State>();
    const int end = End(*job.sequence);
    state->tokens.resize(std::min(Known(*state, *job.sequence), end - 1));
    if (!Reserve(*state, end + std::max(0, job.depth - 1))) continue;
    chains.push_back({.sequence = job.sequence, .state = state.get(), .depth = job.depth, .end = end});
  }
  RETURN_IF_ERROR(TakeIn(chains));
  while (!chains.empty()) RETURN_IF_ERROR(Append(chains));
  return OkStatus();
}

// Computes missing tokens of chains that need no drafts, or lack too many for the pass that drafts. All
// chains together get max_rows_ rows, so that a long cached prefix does not hold up other sequences; later
// steps compute the rest, before the first draft.
Status ModelDrafter::TakeIn(std::vector<Chain>& chains) {
  int rows = max_rows_;
  // Decodes gain at once, prompts only when they are read.
  std::stable_partition(chains.begin(), chains.end(), [](const Chain& chain) { return chain.depth > 0; });
  for (Chain& chain : chains) {
    std::vector<int32_t>& known = chain.state->tokens;
    const int start = static_cast<int>(known.size()), missing = chain.end - start;
    if (chain.depth > 0 && missing <= kMaxDrafts + 1) continue;  // tokens of the last step
    const int count = std::min(rows, missing);
    rows -= count;
    if (chain.depth > 0 && count == missing) continue;  // computed with the first draft
    chain.depth = 0;
    if (count == 0) continue;
    const auto tokens = std::span(chain.sequence->tokens).subspan(start, count);
    StepBatch batch;
    batch.AddRows({.sequence = chain.sequence->id, .start = start, .first_logits = count}, tokens, {},
                  chain.state->block_table);
    RETURN_IF_ERROR(executor_.Run(batch).status());
    known.insert(known.end(), tokens.begin(), tokens.end());
  }
  std::erase_if(chains, [](const Chain& chain) { return chain.depth == 0; });
  return OkStatus();
}

// Drafts one more token for each chain and removes chains that are deep enough.
Status ModelDrafter::Append(std::vector<Chain>& chains) {
  StepBatch batch;
  for (const Chain& chain : chains) {
    const std::vector<int32_t>& drafts = chain.sequence->draft.tokens;
    const size_t known = chain.state->tokens.size();
    const std::span<const int32_t> rows =
        drafts.empty() ? std::span(chain.sequence->tokens).subspan(known) : std::span(drafts).last(1);
    batch.AddRows({.sequence = chain.sequence->id,
                   .start = static_cast<int>(known),
                   .first_logits = static_cast<int>(rows.size()) - 1},
                  rows, {}, chain.state->block_table);
  }
  ASSIGN_OR_RETURN(const StepResult result, executor_.Run(batch));
  const std::span<const float> logits = result.logits;
  const size_t vocab = logits.size() / chains.size();
  for (size_t i = 0; i < chains.size(); ++i) {
    Chain& chain = chains[i];
    const auto rows = std::span(batch.tokens).subspan(batch.rows[i].first_token, batch.rows[i].count);
    chain.state->tokens.insert(chain.state->tokens.end(), rows.begin(), rows.end());
    const int32_t token = LikeliestToken(logits.subspan(i * vocab, vocab));
    if (token < 0) {
      chain.depth = 0;
    } else {
      chain.sequence->draft.tokens.push_back(token);
    }
  }
  std::erase_if(chains, [](const Chain& chain) {
    return static_cast<int>(chain.sequence->draft.tokens.size()) >= chain.depth;
  });
  return OkStatus();
}

}  // namespace moesaic::engine
