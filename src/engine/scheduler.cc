#include "engine/scheduler.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "base/check.h"
#include "engine/plan_scratch.h"
#include "engine/sampling.h"

namespace moesaic::engine {
namespace {

// Weight of a drawn token, relative to a computed prompt token (Sheng et al., "Fairness in serving large
// language models", OSDI 2024, section 4.2).
constexpr double kOutputWeight = 2;
// Maximum number of clients without requests whose service is remembered.
constexpr size_t kMaxClients = 4096;

void InsertByArrival(std::vector<std::unique_ptr<Sequence>>& sequences, std::unique_ptr<Sequence> sequence) {
  const auto after = std::upper_bound(sequences.begin(), sequences.end(), sequence,
                                      [](const auto& a, const auto& b) { return a->id < b->id; });
  sequences.insert(after, std::move(sequence));
}

std::unique_ptr<Sequence> TakeOut(std::vector<std::unique_ptr<Sequence>>& sequences, RequestId id) {
  const auto it =
      std::lower_bound(sequences.begin(), sequences.end(), id,
                       [](const auto& sequence, RequestId wanted) { return sequence->id < wanted; });
  if (it == sequences.end() || (*it)->id != id) return nullptr;
  std::unique_ptr<Sequence> sequence = std::move(*it);
  sequences.erase(it);
  return sequence;
}

}  // namespace

int StepPlan::ScheduledChunk::FirstLogits() const {
  const int last = count - 1;
  if (sequence->wants_prompt_logprobs()) {
    const int known = static_cast<int>(sequence->prompt_logprobs.size());
    return std::clamp(known - sequence->computed, 0, count);
  }
  return sequence->draws_after(count) ? last : count;
}

Scheduler::Scheduler(cache::BlockPool& pool, cache::RadixTree& tree, const std::vector<cache::KvTier*>& tiers,
                     const SchedulerOptions& options)
    : pool_(pool), tree_(tree), options_(options), tiers_(tiers) {
  MOESAIC_CHECK_LE(1, options.max_sequences);
  MOESAIC_CHECK_LE(options.max_sequences, options.max_batch_tokens);
  MOESAIC_CHECK_LE(1, options.max_scored_rows);
  tree_.SetEvictionCallback([this](int32_t block) {
    for (cache::KvTier* tier : tiers_) tier->OnEvict({.block = block, .discarded = discards_}, &ops_);
  });
}

Scheduler::~Scheduler() { tree_.SetEvictionCallback(nullptr); }

void Scheduler::Add(std::unique_ptr<Sequence> sequence) {
  MOESAIC_CHECK_LE(sequence->size(), sequence->limit);
  MOESAIC_CHECK_LE(tensor::KvBlocksFor(sequence->limit), pool_.total_blocks());
  for (const auto* others : {&waiting_, &running_}) {
    MOESAIC_CHECK(others->empty() || others->back()->id < sequence->id);
  }
  JoinClient(*sequence);
  waiting_.push_back(std::move(sequence));
}

// A client that is new or returns starts with the least service of all active clients, so that idle time
// gives no credit.
void Scheduler::JoinClient(Sequence& sequence) {
  if (shares_.size() > kMaxClients) {
    std::erase_if(shares_, [](const auto& entry) { return entry.second.sequences == 0; });
  }
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [name, share] : shares_) {
    if (share.sequences > 0) least = std::min(least, share.service);
  }
  ClientShare& share = shares_[sequence.request.client];
  if (share.sequences++ == 0 && least < std::numeric_limits<double>::infinity()) {
    share.service = std::max(share.service, least);
  }
  sequence.share = &share;
}

void Scheduler::LeaveClient(Sequence& sequence) {
  --sequence.share->sequences;
  if (empty()) shares_.clear();
}

bool Scheduler::Remove(RequestId id) {
  std::unique_ptr<Sequence> sequence = TakeOut(running_, id);
  if (sequence == nullptr) sequence = TakeOut(waiting_, id);
  if (sequence == nullptr) return false;
  if (sequence->fetching != nullptr) CancelFetch(*sequence);
  tree_.Touch(std::span(sequence->blocks).first(sequence->indexed_blocks), HintOf(sequence->request.session));
  const auto in_tree = static_cast<size_t>(sequence->indexed_blocks) * tensor::kKvBlockTokens;
  for (cache::KvTier* tier : tiers_) {
    tier->OnEnd(id, sequence->cache_namespace, std::span(sequence->tokens).first(in_tree));
  }
  if (sequence->sparsity && sequence->sparsity->reuse > 1) ended_.push_back(id);
  LeaveClient(*sequence);
  ChooseFront();
  return true;
}

// The tree's time advances by one for each admission.
cache::SessionHint Scheduler::HintOf(const SessionNote& note) const {
  cache::SessionHint hint{.session = note.state, .tokens = note.tokens};
  if (note.returns_in > 0 && admissions_.seconds_between() > 0) {
    hint.returns_at = static_cast<double>(tree_.now()) + note.returns_in / admissions_.seconds_between();
  }
  return hint;
}

std::vector<RequestId> Scheduler::PastDeadline(Clock::time_point now) const {
  std::vector<RequestId> past;
  for (const auto* sequences : {&running_, &waiting_}) {
    for (const auto& sequence : *sequences) {
      if (sequence->request.deadline && *sequence->request.deadline <= now) past.push_back(sequence->id);
    }
  }
  return past;
}

StepPlan Scheduler::Plan(int most_rows) const {
  PlanScratch scratch(pool_, tree_, tiers_, options_, running_, waiting_, front_);
  const auto decodes = std::ranges::count_if(running_, [](const auto& s) { return s->remaining() == 1; });
  scratch.LimitRows(std::max(most_rows, static_cast<int>(decodes)));
  scratch.PlanDecodes();
  scratch.PlanPrefills();
  scratch.PlanAdmissions();
  scratch.PlanDrafts();
  return scratch.Finish();
}

StepBatch Scheduler::Commit(StepPlan& plan) {
  for (Sequence* sequence : plan.cancel) CancelFetch(*sequence);
  for (Sequence* victim : plan.preempt) Preempt(victim);
  for (StepPlan::Admission& admission : plan.admit) Admit(admission);
  TakeBlocks(plan);
  for (StepPlan::Admission& admission : plan.admit) {
    Sequence& sequence = *admission.sequence;
    if (admission.tier != nullptr) {
      admission.tier->Fetch(QueryOf(sequence, sequence.indexed_blocks), admission.hit, sequence.blocks,
                            &ops_);
    }
    for (cache::KvTier* tier : tiers_) tier->OnAdmit(sequence.id);
    if (admission.prefix.tail_tokens == 0) continue;
    ops_.push_back({.kind = cache::KvOpKind::kCopy,
                    .block = sequence.block_table[sequence.indexed_blocks],
                    .from = admission.prefix.tail.index(),
                    .tokens = admission.prefix.tail_tokens});
    admission.prefix.tail = cache::BlockRef();
  }
  for (StepPlan::Fetch& fetch : plan.fetches) StartFetch(fetch);
  ChooseFront();
  return BatchOf(plan);
}

StepBatch Scheduler::TakePending() {
  StepBatch batch;
  batch.ops_before = std::exchange(ops_, {});
  batch.ended = std::exchange(ended_, {});
  return batch;
}

StepBatch Scheduler::BatchOf(const StepPlan& plan) {
  StepBatch batch = TakePending();
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    const Sequence& sequence = *chunk.sequence;
    // Only the sequence may hold blocks that its rows are written to.
    for (int i = sequence.computed / tensor::kKvBlockTokens;
         i < tensor::KvBlocksFor(sequence.computed + chunk.rows()); ++i) {
      MOESAIC_CHECK(sequence.blocks[i].unique());
    }
    RowNeeds needs = NeedsOf(sequence.request.sampling);
    needs.normalizer |= sequence.request.prompt_logprobs;
    batch.AddRows({.sequence = sequence.id,
                   .start = sequence.computed,
                   .first_logits = chunk.FirstLogits(),
                   .needs = needs},
                  std::span(sequence.tokens).subspan(sequence.computed, chunk.count),
                  std::span(sequence.draft.tokens).first(chunk.drafts), sequence.block_table,
                  sequence.sparsity ? &*sequence.sparsity : nullptr);
  }
  return batch;
}

cache::TierQuery Scheduler::QueryOf(const Sequence& sequence, int indexed_blocks) const {
  return PlanScratch::QueryOf(sequence, indexed_blocks, int64_t{indexed_blocks} * tensor::kKvBlockTokens);
}

// A sequence that waits holds the blocks of its fetch like those of a running one: first those that the tree
// has, then fresh ones.
void Scheduler::StartFetch(StepPlan::Fetch& fetch) {
  Sequence& sequence = *fetch.sequence;
  const auto known = static_cast<int>(fetch.prefix.blocks.size());
  std::vector<cache::BlockRef> blocks =
      WithFresh(std::move(fetch.prefix.blocks), fetch.hit.blocks, &fetch.taken);
  const bool filled = fetch.tier->Fetch(QueryOf(sequence, known), fetch.hit, blocks, &ops_);
  if (!filled) {
    sequence.indexed_blocks = known;
    sequence.blocks = std::move(blocks);
    sequence.fetching = fetch.tier;
    return;
  }
  if (fetch.hit.summaries_only) sequence.sparsity->audit_every = 0;  // an audit would read all blocks
  Index(sequence, blocks, known);
  if (!fetch.hit.summaries_only) return;
  // The tier has attached these very blocks, since the plan found no more of the sequence in the tree.
  for (size_t i = 0; i < fetch.taken.size(); ++i) {
    MOESAIC_CHECK_EQ(blocks[known + i].index(), fetch.taken[i]);
  }
}

// Inserts `blocks`, of which the first `known` are in the tree, as the sequence's first ones.
void Scheduler::Index(const Sequence& sequence, std::span<cache::BlockRef> blocks, int known) {
  tree_.Insert(sequence.cache_namespace, tensor::KvTokensOf(sequence.tokens, blocks.size()), blocks, known);
}

// `blocks`, followed by `count` fresh ones, whose numbers are appended to `taken`.
std::vector<cache::BlockRef> Scheduler::WithFresh(std::vector<cache::BlockRef> blocks, int count,
                                                  std::vector<int32_t>* taken) {
  MakeFree(count);
  for (int i = 0; i < count; ++i) {
    auto block = pool_.Allocate();
    MOESAIC_CHECK(block.ok());
    taken->push_back(block->index());
    blocks.push_back(*std::move(block));
  }
  return blocks;
}

void Scheduler::OnDamage(int32_t block) {
  std::vector<Sequence*> holders;
  for (const auto& sequence : running_) {
    if (std::ranges::find(sequence->block_table, block) != sequence->block_table.end()) {
      holders.push_back(sequence.get());
    }
  }
  spdlog::warn("KV block {} cannot be read: preempting {} requests and clearing the prefix cache", block,
               holders.size());
  for (Sequence* holder : holders) Preempt(holder);
  for (const auto& sequence : waiting_) {
    if (sequence->fetching != nullptr) CancelFetch(*sequence);
  }
  ClearTree();
  ChooseFront();
}

void Scheduler::ClearTree() {
  discards_ = true;
  tree_.Clear();
  discards_ = false;
}

void Scheduler::ReleaseBlocks(Sequence& sequence) {
  sequence.blocks.clear();
  sequence.indexed_blocks = 0;
  sequence.fetching = nullptr;
}

void Scheduler::CancelFetch(Sequence& sequence) {
  sequence.fetching->Cancel(sequence.id, &ops_);
  ReleaseBlocks(sequence);
}

void Scheduler::BeginStep() {
  for (cache::KvTier* tier : tiers_) {
    for (const cache::FinishedFetch& finished : tier->TakeFinished()) {
      const auto it = std::ranges::find(waiting_, finished.request, &Sequence::id);
      MOESAIC_CHECK(it != waiting_.end());
      Sequence& sequence = **it;
      const int whole = sequence.indexed_blocks + finished.blocks;
      Index(sequence, std::span(sequence.blocks).first(whole), sequence.indexed_blocks);
      ReleaseBlocks(sequence);
    }
    tier->BeginStep(&ops_);
  }
}

bool Scheduler::fetching() const {
  return std::ranges::any_of(waiting_, [](const auto& sequence) { return sequence->fetching != nullptr; });
}

void Scheduler::Preempt(Sequence* victim) {
  spdlog::debug("engine request {}: preempted with {} of {} tokens computed", victim->id, victim->computed,
                victim->size());
  for (cache::KvTier* tier : tiers_) tier->OnPreempt(victim->id, victim->blocks, victim->computed, &ops_);
  ReleaseBlocks(*victim);
  victim->block_table.clear();
  victim->computed = 0;
  victim->draft.Drop();
  victim->draft.hidden.clear();
  victim->aged = true;
  InsertByArrival(waiting_, TakeOut(running_, victim->id));
}

void Scheduler::Admit(StepPlan::Admission& admission) {
  Sequence& sequence = *admission.sequence;
  cache::PrefixMatch& prefix = admission.prefix;
  tree_.Use(prefix.blocks);
  admissions_.Count(Clock::now());
  sequence.computed = admission.tokens;
  sequence.indexed_blocks = static_cast<int>(prefix.blocks.size());
  for (const cache::BlockRef& block : prefix.blocks) sequence.block_table.push_back(block.index());
  sequence.blocks = std::move(prefix.blocks);
  const int first_inexact = FirstInexact(sequence, prefix.tail);
  // The swap tier returns the sequence's own blocks.
  const bool restored = admission.tier != nullptr;
  sequence.first_inexact_block =
      restored ? std::min(sequence.first_inexact_block, first_inexact) : first_inexact;
  spdlog::debug("engine request {}: {} with {} of {} tokens cached, {} still wait", sequence.id,
                admission.first ? "admitted" : "resumed", sequence.computed, sequence.size(),
                waiting_.size() - 1);
  InsertByArrival(running_, TakeOut(waiting_, sequence.id));
  if (admission.first) {
    sequence.times.started = Clock::now();
    sequence.cached_tokens = sequence.computed;
    sequence.share->service += sequence.remaining();
  }
  for (const auto& other : waiting_) {
    if (other->id > sequence.id) break;
    other->aged |= ++other->overtaken >= options_.max_overtakes;
  }
}

// The first block that is inexact, or will be because it begins with rows of `tail`.
int Scheduler::FirstInexact(const Sequence& sequence, const cache::BlockRef& tail) const {
  for (int i = 0; i < sequence.indexed_blocks; ++i) {
    if (pool_.inexact(sequence.block_table[i])) return i;
  }
  return tail && pool_.inexact(tail.index()) ? sequence.indexed_blocks : std::numeric_limits<int>::max();
}

void Scheduler::MakeFree(int blocks) {
  if (const int missing = blocks - pool_.free_blocks(); missing > 0) {
    for (cache::KvTier* tier : tiers_) tier->ExpectEvictions(missing);
    MOESAIC_CHECK_EQ(tree_.Evict(missing), missing);  // the plan counted them
    spdlog::debug("evicted {} blocks of the prefix cache, {} are idle", missing, pool_.idle_blocks());
  }
}

void Scheduler::TakeBlocks(const StepPlan& plan) {
  int needed = 0;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) needed += chunk.new_blocks;
  MakeFree(needed);
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    for (int i = 0; i < chunk.new_blocks; ++i) {
      auto block = pool_.Allocate();
      MOESAIC_CHECK(block.ok());
      sequence.block_table.push_back(block->index());
      sequence.blocks.push_back(*std::move(block));
    }
  }
}

// The front stays until it ends; then the oldest running sequence is next.
void Scheduler::ChooseFront() {
  const bool runs = std::any_of(running_.begin(), running_.end(),
                                [this](const auto& sequence) { return sequence->id == front_; });
  if (!runs) front_ = running_.empty() ? 0 : running_.front()->id;
}

void Scheduler::Advance(const StepPlan& plan) {
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    sequence.share->service += kOutputWeight * (chunk.accepted + (chunk.is_decode() && !chunk.late ? 1 : 0));
    sequence.computed += chunk.kept();
    const int whole = std::min(sequence.computed, sequence.shared_limit) / tensor::kKvBlockTokens;
    if (!options_.prefix_cache || whole == sequence.indexed_blocks) continue;
    for (int i = std::max(sequence.indexed_blocks, sequence.first_inexact_block); i < whole; ++i) {
      pool_.SetInexact(sequence.blocks[i]);
    }
    Index(sequence, std::span(sequence.blocks).first(whole), sequence.indexed_blocks);
    for (int i = sequence.indexed_blocks; i < whole; ++i) {
      sequence.block_table[i] = sequence.blocks[i].index();
      if (pool_.inexact(sequence.block_table[i])) {
        sequence.first_inexact_block = std::min(sequence.first_inexact_block, i);
      }
    }
    sequence.indexed_blocks = whole;
  }
}

}  // namespace moesaic::engine
