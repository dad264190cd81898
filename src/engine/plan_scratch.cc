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

}  // namespace

PlanScratch::PlanScratch(const cache::KvPool& pool, const cache::RadixTree& tree,
                         const SchedulerOptions& options,
                         const std::vector<std::unique_ptr<Sequence>>& running, RequestId front)
    : pool_(pool),
      tree_(tree),
      options_(options),
      rows_(options.max_batch_tokens),
      scored_rows_(options.max_scored_rows) {
  for (const auto& sequence : running) running_.push_back(sequence.get());
  std::sort(running_.begin(), running_.end(),
            [front](const Sequence* a, const Sequence* b) { return RankOf(*a, front) < RankOf(*b, front); });
}

// Idle blocks are as good as free: Commit evicts what it needs.
int PlanScratch::FreeBlocks() const { return pool_.free_blocks() + pool_.idle_blocks() + given_ - taken_; }

int PlanScratch::ChunkOf(const Sequence& sequence, int computed) const {
  const int count = std::min(sequence.size() - computed, rows_);
  return sequence.wants_prompt_logprobs() ? std::min(count, scored_rows_) : count;
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
    if (sequence->remaining() != 1) continue;
    // A draft that was refused may have left a block more than its tokens need.
    const int needed =
        std::max(0, cache::BlocksFor(sequence->size()) - static_cast<int>(sequence->blocks.size()));
    while (FreeBlocks() < needed && running_.size() > i) PreemptLast();
    if (running_.size() <= i) return;  // it was the last itself
    Take(sequence, 1, needed);
  }
}

void PlanScratch::PreemptLast() {
  Sequence* victim = running_.back();
  running_.pop_back();
  plan_.preempt.push_back(victim);
  for (const cache::BlockRef& block : victim->blocks) {
    const int left = block.references() - ++released_[block.index()];
    if (left == (pool_.cached(block.index()) ? 1 : 0)) ++given_;
  }
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
  if (!options_.prefix_cache || sequence.wants_prompt_logprobs()) return {};
  const size_t shared = std::min(sequence.tokens.size() - 1, static_cast<size_t>(sequence.shared_limit));
  return tree_.Find(sequence.cache_namespace, std::span(sequence.tokens).first(shared));
}

// Whether a running sequence will soon have computed a block that comes next in `sequence`.
bool PlanScratch::PrefixIsOnItsWay(const Sequence& sequence, const cache::PrefixMatch& prefix) const {
  if (!options_.prefix_cache || sequence.due || sequence.wants_prompt_logprobs()) return false;
  const size_t known = prefix.blocks.size() * cache::kBlockTokens;
  const size_t wanted = known + cache::kBlockTokens;
  if (sequence.tokens.size() <= wanted || static_cast<size_t>(sequence.shared_limit) < wanted) return false;
  return std::any_of(running_.begin(), running_.end(), [&](const Sequence* other) {
    const int32_t *a = sequence.tokens.data(), *b = other->tokens.data();
    const auto same = [&](size_t from, size_t to) {
      return std::memcmp(a + from, b + from, (to - from) * sizeof(int32_t)) == 0;
    };
    return other->tokens.size() >= wanted && other->computed < static_cast<int>(wanted) &&
           static_cast<size_t>(other->shared_limit) >= wanted && same(known, wanted) && same(0, known) &&
           other->cache_namespace == sequence.cache_namespace;
  });
}

// A block to spare for each running sequence: none of them can need more within its next 64 tokens, so an
// admission is not undone at once.
bool PlanScratch::Fits(int needed) const {
  const int spare = running_.empty() ? 0 : static_cast<int>(running_.size()) + 1;
  return FreeBlocks() >= needed + spare;
}

void PlanScratch::PlanAdmissions(const std::vector<std::unique_ptr<Sequence>>& waiting) {
  if (!plan_.preempt.empty()) return;
  std::vector<Sequence*> line;
  line.reserve(waiting.size());
  for (const auto& sequence : waiting) line.push_back(sequence.get());
  int passed_by = 0;
  while (!line.empty() && passed_by <= kMostPassedBy) {
    if (static_cast<int>(running_.size()) == options_.max_sequences) return;
    const auto first = std::min_element(
        line.begin(), line.end(), [this](const Sequence* a, const Sequence* b) { return Before(*a, *b); });
    Sequence* next = *first;
    line.erase(first);
    cache::PrefixMatch prefix = PrefixOf(*next);
    if (PrefixIsOnItsWay(*next, prefix)) {
      ++passed_by;
      continue;
    }
    const int needed = cache::BlocksFor(next->size()) - static_cast<int>(prefix.blocks.size());
    const int kept = ParkedBlocks::Tokens(*next, static_cast<int>(prefix.blocks.size()));
    const bool restores = kept > static_cast<int>(prefix.tokens());
    if (prefix.tail && (restores || !Fits(needed))) {  // the block to copy from may be what is missing
      prefix.tail = cache::BlockRef();
      prefix.tail_tokens = 0;
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
    int more = std::max(0, cache::BlocksFor(sequence.size() + drafts) - blocks);
    if (more > 0 && !Fits(more)) {
      more = 0;
      drafts = std::min(drafts, blocks * cache::kBlockTokens - sequence.size());
    }
    part.drafts = drafts;
    part.new_blocks += more;
    rows_ -= drafts;
    taken_ += more;
  }
}

}  // namespace moesaic::engine
