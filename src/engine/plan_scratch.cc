#include "engine/plan_scratch.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>

namespace moesaic::engine {
namespace {

// Waiting sequences that one plan may pass by because their prefix is on its way: each costs a look into the
// tree, and more than a few are never admitted in one step anyway.
constexpr int kMostPassedBy = 16;

// Rank of a running sequence: the front, those that are due by arrival, all others by priority and arrival.
auto RankOf(const Sequence& sequence, RequestId front) {
  const int group = sequence.id == front ? 0 : sequence.due ? 1 : 2;
  return std::tuple(group, group == 2 ? sequence.request.priority : 0, sequence.id);
}

// Blocks that are kept for a sequence of `blocks` loaded ones, so that it can be admitted behind its load:
// for the rest of its tokens, and one to spare.
int ReservedFor(const Sequence& sequence, int blocks) {
  return tensor::KvBlocksFor(sequence.size()) - blocks + 1;
}

}  // namespace

PlanScratch::PlanScratch(const cache::KvPool& pool, const cache::RadixTree& tree, const ColdBlocks* cold,
                         const WarmBlocks* warm, const SchedulerOptions& options,
                         const std::vector<std::unique_ptr<Sequence>>& running,
                         const std::vector<std::unique_ptr<Sequence>>& waiting, RequestId front)
    : pool_(pool),
      tree_(tree),
      cold_(cold),
      warm_(warm),
      options_(options),
      rows_(options.max_batch_tokens),
      scored_rows_(options.max_scored_rows) {
  for (const auto& sequence : running) running_.push_back(sequence.get());
  std::sort(running_.begin(), running_.end(),
            [front](const Sequence* a, const Sequence* b) { return RankOf(*a, front) < RankOf(*b, front); });
  for (const auto& sequence : waiting) {
    if (!sequence->load) {
      waiting_.push_back(sequence.get());
      continue;
    }
    const auto blocks = static_cast<int>(sequence->blocks.size());
    loading_.push_back({sequence.get(), blocks});
    reserved_ += ReservedFor(*sequence, blocks);
  }
}

// Idle blocks are as good as free: Commit evicts what it needs.
int PlanScratch::FreeBlocks() const { return pool_.free_blocks() + pool_.idle_blocks() + given_ - taken_; }

int PlanScratch::ChunkOf(const Sequence& sequence, int computed) const {
  int count = std::min(sequence.size() - computed, rows_);
  if (sequence.wants_prompt_logprobs()) count = std::min(count, scored_rows_);
  if (sequence.kept_choices == nullptr) return count;
  // A chunk that begins inside a group reads what an earlier step chose. Its own choices would push that out,
  // and the step may have to be done again: it goes no further than the group. So chunks end with groups.
  const kernels::BlockSparsity& sparsity = *sequence.sparsity;
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
  plan_.parts.push_back({sequence, count, new_blocks});
}

void PlanScratch::PlanDecodes() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* sequence = running_[i];
    if (sequence->remaining() != 1 || sequence->waits_for_mask()) continue;
    // A draft that was refused may have left a block more than its tokens need.
    const int needed =
        std::max(0, tensor::KvBlocksFor(sequence->size()) - static_cast<int>(sequence->blocks.size()));
    while (FreeBlocks() < needed && !loading_.empty()) AbandonLoad();
    while (FreeBlocks() < needed && running_.size() > i) PreemptLast();
    if (running_.size() <= i) return;  // it was the last itself
    Take(sequence, 1, needed);
  }
}

void PlanScratch::GiveBack(const Sequence& sequence) {
  for (const cache::BlockRef& block : sequence.blocks) {
    const int left = block.references() - ++released_[block.index()];
    if (left == (pool_.cached(block.index()) ? 1 : 0)) ++given_;
  }
}

void PlanScratch::AbandonLoad() {
  const Loading last = loading_.back();
  loading_.pop_back();
  reserved_ -= ReservedFor(*last.sequence, last.blocks);
  plan_.abandon.push_back(last.sequence);
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
  if (a.due != b.due) return a.due;
  if (a.due) return a.id < b.id;
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

// The last token is always computed: its logits, or its hidden state, are what the step is for.
cache::PrefixMatch PlanScratch::PrefixOf(const Sequence& sequence) const {
  if (!Shares(sequence)) return {};
  cache::PrefixMatch match = tree_.Find(sequence.cache_namespace, SharedTokens(sequence));
  // Rows that read what an earlier row chose need that row: none of them is copied without it.
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

// Whether a block that comes next in `sequence`, and that it could share, will soon have been computed by a
// running sequence, or come from the disk or the warm tier.
bool PlanScratch::PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const {
  if (sequence.due || !Shares(sequence)) return false;
  const size_t known = prefix.blocks.size() * tensor::kKvBlockTokens;
  const size_t wanted = known + tensor::kKvBlockTokens;
  if (sequence.tokens.size() <= wanted || static_cast<size_t>(sequence.shared_limit) < wanted) return false;
  const auto begins_alike = [&](const Sequence& other) {
    const int32_t *a = sequence.tokens.data(), *b = other.tokens.data();
    const auto same = [&](size_t from, size_t to) {
      return std::memcmp(a + from, b + from, (to - from) * sizeof(int32_t)) == 0;
    };
    return other.tokens.size() >= wanted && same(known, wanted) && same(0, known) &&
           other.cache_namespace == sequence.cache_namespace;
  };
  return std::ranges::any_of(running_,
                             [&](const Sequence* other) {
                               return other->computed < static_cast<int>(wanted) &&
                                      static_cast<size_t>(other->shared_limit) >= wanted &&
                                      begins_alike(*other);
                             }) ||
         std::ranges::any_of(loading_,
                             [&](const Loading& other) {
                               return static_cast<size_t>(other.blocks) * tensor::kKvBlockTokens >= wanted &&
                                      begins_alike(*other.sequence);
                             }) ||
         std::ranges::any_of(plan_.promotions, [&](const StepPlan::Promotion& other) {
           const size_t blocks = other.prefix.blocks.size() + other.warm.size();
           return blocks * tensor::kKvBlockTokens >= wanted && begins_alike(*other.sequence);
         });
}

// Those on disk that follow `prefix`. Who is due does not wait for a disk.
int PlanScratch::BlocksToLoad(const Sequence& sequence, const cache::PrefixMatch& prefix) const {
  if (cold_ == nullptr || sequence.due || sequence.tried_disk || !Shares(sequence)) return 0;
  const auto known = static_cast<int>(prefix.blocks.size());
  if (known < sequence.lazy_blocks) return 0;  // they went before it was admitted: not once more
  return std::max(0, cold_->Find(sequence.cache_namespace, SharedTokens(sequence)) - known);
}

// Of which one that went from the tree before its sequence was admitted is not brought back again.
std::vector<cache::SwapRef> PlanScratch::WarmBehind(const Sequence& sequence,
                                                    const cache::PrefixMatch& prefix) const {
  const auto known = static_cast<int>(prefix.blocks.size());
  if (warm_ == nullptr || known < sequence.promoted || !Shares(sequence)) return {};
  return warm_->Find(sequence.cache_namespace, SharedTokens(sequence), known);
}

void PlanScratch::PlanPromotion(Sequence* sequence, cache::PrefixMatch prefix,
                                std::vector<cache::SwapRef> warm) {
  const auto blocks = static_cast<int>(warm.size());
  taken_ += blocks;
  reserved_ += ReservedFor(*sequence, static_cast<int>(prefix.blocks.size()) + blocks);
  plan_.promotions.push_back({sequence, std::move(prefix), std::move(warm)});
}

void PlanScratch::PlanLoad(Sequence* sequence, cache::PrefixMatch prefix, int blocks) {
  const bool lazy = cold_->IsLazy(*sequence, blocks);
  const int part = lazy ? cold_->LazyPart(blocks) : blocks;
  const int whole = static_cast<int>(prefix.blocks.size()) + part;
  taken_ += part;
  reserved_ += ReservedFor(*sequence, whole);
  loading_.push_back({sequence, whole});
  plan_.loads.push_back({sequence, std::move(prefix), part, lazy, part < blocks});
}

// A block to spare for each running sequence: none of them can need more within its next 64 tokens, so an
// admission is not undone at once.
bool PlanScratch::Fits(int needed) const {
  const int spare = running_.empty() ? 0 : static_cast<int>(running_.size()) + 1;
  return FreeBlocks() >= needed + spare + reserved_;
}

void PlanScratch::PlanAdmissions() {
  if (!plan_.preempt.empty() || !plan_.abandon.empty()) return;
  std::vector<Sequence*> line = waiting_;
  int passed_by = 0;
  while (!line.empty() && passed_by <= kMostPassedBy) {
    if (static_cast<int>(running_.size() + loading_.size()) >= options_.max_sequences) return;
    const auto first = std::min_element(
        line.begin(), line.end(), [this](const Sequence* a, const Sequence* b) { return Before(*a, *b); });
    Sequence* next = *first;
    const bool due_loads = std::ranges::any_of(loading_, [&](const Loading& other) {
      return other.sequence->due && Before(*other.sequence, *next);
    });
    if (due_loads) return;  // it became due after its load began
    line.erase(first);
    cache::PrefixMatch prefix = PrefixOf(*next);
    if (PrefixIsOnItsWay(*next, prefix)) {
      ++passed_by;
      continue;
    }
    const int needed = tensor::KvBlocksFor(next->size()) - static_cast<int>(prefix.blocks.size());
    const int kept = ParkedBlocks::Tokens(*next, static_cast<int>(prefix.blocks.size()));
    const bool restores = kept > static_cast<int>(prefix.tokens());
    std::vector<cache::SwapRef> warm;
    if (!restores) warm = WarmBehind(*next, prefix);
    if (!warm.empty() && !plan_.promotions.empty()) {  // one a step, which may be of the same blocks
      if (next->due) return;
      ++passed_by;
      continue;
    }
    if (!warm.empty()) {
      prefix.DropTail();
      if (!Fits(needed)) return;
      PlanPromotion(next, std::move(prefix), std::move(warm));
      if (next->due) return;
      continue;
    }
    if (const int blocks = restores ? 0 : BlocksToLoad(*next, prefix); blocks > 0) {
      prefix.DropTail();  // what is loaded begins with its block, which may be missing
      if (!Fits(needed)) return;
      PlanLoad(next, std::move(prefix), blocks);
      continue;
    }
    const bool absent = prefix.tail && cold_ != nullptr && cold_->IsAbsent(prefix.tail.index());
    if (prefix.tail && (restores || absent || !Fits(needed))) {  // the block to copy from may be missing
      prefix.DropTail();
    }
    const int computed = restores ? kept : static_cast<int>(prefix.tokens());
    const int count = ChunkOf(*next, computed);
    if (count == 0 || !Fits(needed)) return;
    running_.push_back(next);
    promised_[next->share] += next->size() - computed;
    plan_.admit.push_back({next, std::move(prefix), computed, !next->times.started});
    Take(next, count, needed);
  }
}

void PlanScratch::PlanDrafts() {
  for (StepPlan::Part& part : plan_.parts) {
    const Sequence& sequence = *part.sequence;
    if (rows_ == 0 || sequence.remaining() != 1) continue;
    const int blocks = static_cast<int>(sequence.blocks.size()) + part.new_blocks;
    int drafts = std::min(static_cast<int>(sequence.draft.tokens.size()), rows_);
    int more = std::max(0, tensor::KvBlocksFor(sequence.size() + drafts) - blocks);
    if (more > 0 && !Fits(more)) {
      more = 0;
      drafts = std::min(drafts, blocks * tensor::kKvBlockTokens - sequence.size());
    }
    part.drafts = drafts;
    part.new_blocks += more;
    rows_ -= drafts;
    taken_ += more;
  }
}

}  // namespace moesaic::engine
