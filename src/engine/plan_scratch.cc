#include "engine/plan_scratch.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>

#include "base/round.h"

namespace moesaic::engine {
namespace {

// Number of different blocks, being computed or fetched, whose waiting sequences one plan passes by: each
// costs a look-up in the tree, and a step rarely admits more than a few.
constexpr int kMaxPassedBy = 16;

// Rank of a running sequence: the front; aged ones by arrival; all others by priority and arrival.
auto RankOf(const Sequence& sequence, RequestId front) {
  const int group = sequence.id == front ? 0 : sequence.aged ? 1 : 2;
  return std::tuple(group, group == 2 ? sequence.request.priority : 0, sequence.id);
}

// Blocks reserved for a sequence after a fetch to `blocks` blocks, so that it can be admitted then: for the
// rest of its tokens, and a spare one.
int ReservedFor(const Sequence& sequence, int blocks) {
  return tensor::KvBlocksFor(sequence.size()) - blocks + 1;
}

// Tokens up to the end of the first block after `prefix`.
size_t EndOfNext(const cache::PrefixMatch& prefix) {
  return (prefix.blocks.size() + 1) * tensor::kKvBlockTokens;
}

// Returns whether both can share the blocks of their first `count` tokens. Different requests often begin
// alike, so the last block is compared first.
bool BeginAlike(const Sequence& a, const Sequence& b, size_t count) {
  const auto same = [&](size_t from, size_t to) {
    return std::memcmp(a.tokens.data() + from, b.tokens.data() + from, (to - from) * sizeof(int32_t)) == 0;
  };
  const size_t last = count - tensor::kKvBlockTokens;
  return a.tokens.size() >= count && b.tokens.size() >= count && same(last, count) && same(0, last) &&
         a.cache_namespace == b.cache_namespace;
}

}  // namespace

PlanScratch::PlanScratch(const cache::BlockPool& pool, const cache::RadixTree& tree,
                         std::span<cache::KvTier* const> tiers, const SchedulerOptions& options,
                         const std::vector<std::unique_ptr<Sequence>>& running,
                         const std::vector<std::unique_ptr<Sequence>>& waiting, RequestId front)
    : pool_(pool),
      tree_(tree),
      tiers_(tiers),
      options_(options),
      rows_(options.max_batch_tokens),
      scored_rows_(options.max_scored_rows) {
  for (const auto& sequence : running) {
    (sequence->in_flight ? in_flight_ : running_).push_back(sequence.get());
  }
  std::sort(running_.begin(), running_.end(),
            [front](const Sequence* a, const Sequence* b) { return RankOf(*a, front) < RankOf(*b, front); });
  for (const auto& sequence : waiting) {
    if (sequence->fetching == nullptr) {
      waiting_.push_back(sequence.get());
      continue;
    }
    const auto blocks = static_cast<int>(sequence->blocks.size());
    fetching_.push_back({sequence.get(), blocks});
    reserved_ += ReservedFor(*sequence, blocks);
  }
}

// Idle blocks count as free, because Commit evicts as many as it needs.
int PlanScratch::FreeBlocks() const { return pool_.free_blocks() + pool_.idle_blocks() + given_ - taken_; }

int PlanScratch::ChunkOf(const Sequence& sequence, int computed) const {
  int count = std::min(sequence.size() - computed, rows_);
  if (sequence.wants_prompt_logprobs()) count = std::min(count, scored_rows_);
  if (!sequence.sparsity || sequence.sparsity->reuse == 1) return count;
  // A chunk that begins inside a group reads the choice of an earlier step. New choices would evict that one,
  // and a failed step must be repeatable, so the chunk ends with the group. Other chunks end with groups too.
  const kernels::SparsitySettings& sparsity = *sequence.sparsity;
  if (sparsity.ChooserOf(computed) < computed) {
    return std::min(count, sparsity.GroupEnd(computed) - computed);
  }
  const int end = computed + count, chooser = sparsity.ChooserOf(end);
  return end == sequence.size() || chooser <= computed ? count : std::min(count, chooser - computed);
}

void PlanScratch::Take(Sequence* sequence, int count, int new_blocks) {
  rows_ -= count;
  taken_ += new_blocks;
  if (sequence->wants_prompt_logprobs()) scored_rows_ -= count;
  plan_.chunks.push_back({sequence, count, new_blocks});
}

// Sequences in flight draw a token: they are decodes of the next steps.
int PlanScratch::DecodesOfStep() const {
  const auto decodes = std::ranges::count_if(running_, [](const Sequence* sequence) {
    return sequence->remaining() == 1 && !sequence->waits_for_mask();
  });
  return base::CeilDiv(static_cast<int>(decodes + std::ssize(in_flight_)), options_.max_in_flight);
}

void PlanScratch::PlanDecodes() {
  int left = DecodesOfStep();
  for (size_t i = 0; i < running_.size() && left > 0; ++i) {
    Sequence* sequence = running_[i];
    if (sequence->remaining() != 1 || sequence->waits_for_mask()) continue;
    // A draft that was refused may have left a block more than its tokens need.
    const int needed =
        std::max(0, tensor::KvBlocksFor(sequence->size()) - static_cast<int>(sequence->blocks.size()));
    if (FreeBlocks() < needed && !in_flight_.empty()) return;
    while (FreeBlocks() < needed && !fetching_.empty()) CancelLastFetch();
    while (FreeBlocks() < needed && running_.size() > i) PreemptLast();
    if (running_.size() <= i) return;  // it was the last itself
    Take(sequence, 1, needed);
    --left;
  }
}

void PlanScratch::GiveBack(const Sequence& sequence) {
  for (const cache::BlockRef& block : sequence.blocks) {
    const int left = block.references() - ++released_[block.index()];
    if (left == (pool_.cached(block.index()) ? 1 : 0)) ++given_;
  }
}

void PlanScratch::CancelLastFetch() {
  const Fetching last = fetching_.back();
  fetching_.pop_back();
  reserved_ -= ReservedFor(*last.sequence, last.blocks);
  plan_.cancel.push_back(last.sequence);
  GiveBack(*last.sequence);
}

void PlanScratch::PreemptLast() {
  Sequence* victim = running_.back();
  running_.pop_back();
  plan_.preempt.push_back(victim);
  GiveBack(*victim);
}

void PlanScratch::PlanPrefills() {
  for (Sequence* sequence : running_) {
    if (sequence->remaining() <= 1) continue;
    if (const int count = ChunkOf(*sequence, sequence->computed); count > 0) Take(sequence, count, 0);
  }
}

// Whether `a` is admitted before `b`.
bool PlanScratch::Before(const Sequence& a, const Sequence& b) const {
  if (a.aged != b.aged) return a.aged;
  if (a.aged) return a.id < b.id;
  constexpr auto kNever = Clock::time_point::max();
  const auto key = [&](const Sequence& sequence) {
    return std::tuple(sequence.request.priority, ServiceOf(sequence),
                      std::string_view(sequence.request.client), sequence.request.deadline.value_or(kNever),
                      sequence.id);
  };
  return key(a) < key(b);
}

double PlanScratch::ServiceOf(const Sequence& sequence) const {
  const auto promised = promised_.find(sequence.share);
  return sequence.share->service + (promised == promised_.end() ? 0 : promised->second);
}

// The last token is always computed, because the step needs its logits or its hidden state.
cache::PrefixMatch PlanScratch::PrefixOf(const Sequence& sequence) const {
  if (!Shares(sequence)) return {};
  cache::PrefixMatch match = tree_.Find(sequence.cache_namespace, SharedTokens(sequence));
  // A row that shares the choice of an earlier row needs that row, so it is not copied without it.
  if (sequence.sparsity && match.tokens() > sequence.sparsity->first_sparse()) {
    match.tail_tokens -= match.tail_tokens % sequence.sparsity->reuse;
  }
  if (match.tail_tokens == 0) match.tail = cache::BlockRef();
  return match;
}

bool PlanScratch::Shares(const Sequence& sequence) const {
  return options_.prefix_cache && !sequence.wants_prompt_logprobs();
}

std::span<const int32_t> PlanScratch::SharedTokens(const Sequence& sequence) {
  return std::span(sequence.tokens)
      .first(std::min(sequence.tokens.size() - 1, static_cast<size_t>(sequence.shared_limit)));
}

// Returns whether `sequence` waits for a block that ends after `end` tokens if it is on its way.
bool PlanScratch::CanAwait(const Sequence& sequence, size_t end) const {
  return !sequence.aged && Shares(sequence) && sequence.tokens.size() > end &&
         static_cast<size_t>(sequence.shared_limit) >= end;
}

// Returns whether the next block of `sequence` is one that it can share and that will soon be computed by a
// running sequence, or restored from the disk tier or the warm tier.
bool PlanScratch::PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const {
  const size_t wanted = EndOfNext(prefix);
  if (!CanAwait(sequence, wanted)) return false;
  const auto computes = [&](const Sequence* other) {
    return other->computed < static_cast<int>(wanted) && static_cast<size_t>(other->shared_limit) >= wanted &&
           BeginAlike(*other, sequence, wanted);
  };
  return std::ranges::any_of(running_, computes) || std::ranges::any_of(in_flight_, computes) ||
         std::ranges::any_of(fetching_,
                             [&](const Fetching& other) {
                               return static_cast<size_t>(other.blocks) * tensor::kKvBlockTokens >= wanted &&
                                      BeginAlike(*other.sequence, sequence, wanted);
                             }) ||
         std::ranges::any_of(plan_.fetches, [&](const StepPlan::Fetch& other) {
           const size_t blocks = other.prefix.blocks.size() + static_cast<size_t>(other.hit.blocks);
           return blocks * tensor::kKvBlockTokens >= wanted && BeginAlike(*other.sequence, sequence, wanted);
         });
}

// Removes the sequences that wait for the same block as `first`, whose prefix in the tree is `prefix`. They
// need no look-up, so any number of requests with one prompt count as one.
void PlanScratch::PassByAllLike(const Sequence& first, const cache::PrefixMatch& prefix,
                                std::vector<Sequence*>* line) const {
  const size_t wanted = EndOfNext(prefix);
  std::erase_if(*line, [&](const Sequence* other) {
    return CanAwait(*other, wanted) && BeginAlike(*other, first, wanted);
  });
}

cache::TierQuery PlanScratch::QueryOf(const Sequence& sequence, int indexed_blocks, int64_t indexed_tokens) {
  // Blocks of other requests may be read whole by rows that do not choose.
  const bool chooses = sequence.sparsity && sequence.sparsity->first_position == 0;
  return {.request = sequence.id,
          .name = sequence.cache_namespace,
          .tokens = SharedTokens(sequence),
          .indexed_blocks = indexed_blocks,
          .indexed_tokens = indexed_tokens,
          .aged = sequence.aged,
          .budget_blocks = chooses ? sequence.sparsity->budget_blocks : 0};
}

// The first tier that has blocks after `prefix`.
PlanScratch::Found PlanScratch::Lookup(const Sequence& sequence, const cache::PrefixMatch& prefix) const {
  cache::TierQuery query = QueryOf(sequence, static_cast<int>(prefix.blocks.size()), prefix.tokens());
  if (!Shares(sequence)) query.tokens = {};
  for (cache::KvTier* tier : tiers_) {
    if (cache::TierHit hit = tier->Lookup(query)) return {tier, std::move(hit)};
  }
  return {};
}

void PlanScratch::PlanFetch(Sequence* sequence, cache::PrefixMatch prefix, Found found) {
  const int blocks = found.hit.blocks, whole = static_cast<int>(prefix.blocks.size()) + blocks;
  taken_ += blocks;
  reserved_ += ReservedFor(*sequence, whole);
  if (!found.hit.exclusive) fetching_.push_back({sequence, whole});
  plan_.fetches.push_back({sequence, std::move(prefix), found.tier, std::move(found.hit)});
}

// A block to spare for each running sequence: none of them can need more within its next 64 tokens, so an
// admission is not undone at once.
bool PlanScratch::Fits(int needed) const {
  const auto active = static_cast<int>(running_.size() + in_flight_.size());
  const int spare = active == 0 ? 0 : active + 1;
  return FreeBlocks() >= needed + spare + reserved_;
}

void PlanScratch::PlanAdmissions() {
  if (!plan_.preempt.empty() || !plan_.cancel.empty()) return;
  std::vector<Sequence*> line = waiting_;
  int passed_by = 0;
  while (!line.empty() && passed_by <= kMaxPassedBy) {
    if (std::ssize(running_) + std::ssize(in_flight_) + std::ssize(fetching_) >= options_.max_sequences)
      return;
    const auto first = std::min_element(
        line.begin(), line.end(), [this](const Sequence* a, const Sequence* b) { return Before(*a, *b); });
    Sequence* next = *first;
    const bool aged_fetches = std::ranges::any_of(fetching_, [&](const Fetching& other) {
      return other.sequence->aged && Before(*other.sequence, *next);
    });
    if (aged_fetches) return;  // it became aged after its fetch began
    line.erase(first);
    cache::PrefixMatch prefix = PrefixOf(*next);
    if (PrefixIsOnItsWay(*next, prefix)) {
      PassByAllLike(*next, prefix, &line);
      ++passed_by;
      continue;
    }
    const int needed = tensor::KvBlocksFor(next->size()) - static_cast<int>(prefix.blocks.size());
    Found found = Lookup(*next, prefix);
    if (found.hit && !found.hit.with_admission) {
      const bool another = std::ranges::any_of(
          plan_.fetches, [](const StepPlan::Fetch& fetch) { return fetch.hit.exclusive; });
      if (found.hit.exclusive && another) {  // which may be of the same blocks
        if (next->aged) return;
        ++passed_by;
        continue;
      }
      prefix.DropTail();  // the fetch begins with its block, which may be missing
      if (!Fits(needed)) return;
      PlanFetch(next, std::move(prefix), std::move(found));
      if (next->aged) return;
      continue;
    }
    // The block to copy from may be evicted for this admission, or be partial.
    const bool partial = prefix.tail && pool_.absent(prefix.tail.index());
    if (prefix.tail && (found.hit || partial || !Fits(needed))) prefix.DropTail();
    const int computed = found.hit ? found.hit.tokens : static_cast<int>(prefix.tokens());
    const int count = ChunkOf(*next, computed);
    if (count == 0 || !Fits(needed)) return;
    running_.push_back(next);
    promised_[next->share] += next->size() - computed;
    plan_.admit.push_back(
        {next, std::move(prefix), found.tier, std::move(found.hit), computed, !next->times.started});
    Take(next, count, needed);
  }
}

void PlanScratch::PlanDrafts() {
  for (StepPlan::ScheduledChunk& chunk : plan_.chunks) {
    const Sequence& sequence = *chunk.sequence;
    if (rows_ == 0 || sequence.remaining() != 1) continue;
    const int blocks = static_cast<int>(sequence.blocks.size()) + chunk.new_blocks;
    int drafts = std::min(static_cast<int>(sequence.draft.tokens.size()), rows_);
    int more = std::max(0, tensor::KvBlocksFor(sequence.size() + drafts) - blocks);
    if (more > 0 && !Fits(more)) {
      more = 0;
      drafts = std::min(drafts, blocks * tensor::kKvBlockTokens - sequence.size());
    }
    chunk.drafts = drafts;
    chunk.new_blocks += more;
    rows_ -= drafts;
    taken_ += more;
  }
}

}  // namespace moesaic::engine
