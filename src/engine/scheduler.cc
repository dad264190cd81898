#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "engine/plan_scratch.h"

namespace moesaic::engine {
namespace {

// What a drawn token counts beside a prompt token that is computed (Sheng et al., "Fairness in serving large
// language models", OSDI 2024, section 4.2).
constexpr double kOutputWeight = 2;
// Clients that have nothing here are forgotten when there are more: what they had is then forgiven.
constexpr size_t kMostClients = 4096;

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

Scheduler::Scheduler(cache::KvPool& pool, cache::RadixTree& tree, cache::SwapSpace* swap,
                     const SchedulerOptions& options)
    : pool_(pool), tree_(tree), options_(options), parked_(pool, swap) {
  MOESAIC_CHECK_LE(1, options.max_sequences);
  MOESAIC_CHECK_LE(options.max_sequences, options.max_batch_tokens);
  MOESAIC_CHECK_LE(1, options.max_scored_rows);
  tree_.SetEvictionCallback([this](int32_t block) {
    // With a swap space no block is absent (engine.cc), so that it need not know.
    if (parked_.keeps()) parked_.Leaves(block);
    if (warm_ != nullptr) warm_->Leaves(block, cold_ != nullptr && cold_->IsAbsent(block));
    if (cold_ != nullptr) cold_->Leaves(block);
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

// A client that comes back, or is new, starts level with the one that had least: time away is not saved up.
void Scheduler::JoinClient(Sequence& sequence) {
  if (shares_.size() > kMostClients) {
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
  parked_.Forget(*sequence);
  if (sequence->load) AbandonLoad(*sequence);
  tree_.Touch(std::span(sequence->blocks).first(sequence->known_blocks), HintOf(sequence->request.session));
  if (cold_ != nullptr) cold_->Keep(*sequence);
  LeaveClient(*sequence);
  ChooseFront();
  return true;
}

// The tree's time goes on by one for each request that is admitted.
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

StepPlan Scheduler::Plan() const {
  PlanScratch scratch(pool_, tree_, cold_, warm_, options_, running_, waiting_, front_);
  scratch.PlanDecodes();
  scratch.PlanPrefills();
  scratch.PlanAdmissions();
  scratch.PlanDrafts();
  return scratch.Finish();
}

void Scheduler::Commit(StepPlan& plan) {
  if (warm_ != nullptr) warm_->StartStep();
  for (Sequence* sequence : plan.abandon) AbandonLoad(*sequence);
  for (Sequence* victim : plan.preempt) Preempt(victim);
  for (StepPlan::Admission& admission : plan.admit) Admit(admission);
  TakeBlocks(plan);
  for (StepPlan::Admission& admission : plan.admit) {
    Sequence& sequence = *admission.sequence;
    const bool copies = admission.prefix.tail_tokens > 0;
    if (!copies) parked_.Restore(sequence, sequence.known_blocks, admission.tokens);
    parked_.Forget(sequence);
    if (!copies) continue;
    pool_.CopyTokens(admission.prefix.tail, sequence.blocks[sequence.known_blocks],
                     admission.prefix.tail_tokens);
    admission.prefix.tail = cache::BlockRef();
  }
  for (StepPlan::Promotion& promotion : plan.promotions) Promote(promotion);
  for (StepPlan::Load& load : plan.loads) StartLoad(load);
  ChooseFront();
}

// A sequence that waits holds the blocks of its load as it would hold those that it runs with: what the tree
// has of it, and behind that what is nobody else's yet.
void Scheduler::StartLoad(StepPlan::Load& load) {
  Sequence& sequence = *load.sequence;
  sequence.known_blocks = static_cast<int>(load.prefix.blocks.size());
  sequence.blocks = WithFresh(std::move(load.prefix.blocks), load.blocks, &load.taken);
  if (!load.lazy) return cold_->StartLoad(sequence);
  cold_->LoadDigests(sequence);
  const auto whole = static_cast<int>(sequence.blocks.size());
  LetGo(sequence);
  if (!load.more) return;
  sequence.tried_disk = false;
  sequence.lazy_blocks = whole;
}

// `blocks`, and behind them `count` that are nobody else's, whose numbers go to `taken`.
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

// Blocks of the warm tier enter the tree; the sequence waits on, holding none.
void Scheduler::Promote(StepPlan::Promotion& promotion) {
  Sequence& sequence = *promotion.sequence;
  const auto known = static_cast<int>(promotion.prefix.blocks.size());
  std::vector<cache::BlockRef> blocks = WithFresh(std::move(promotion.prefix.blocks),
                                                  static_cast<int>(promotion.warm.size()), &promotion.taken);
  const auto tokens = std::span(sequence.tokens).first(blocks.size() * tensor::kKvBlockTokens);
  warm_->Restore(sequence.cache_namespace, tokens, promotion.warm, blocks);
  tree_.Insert(sequence.cache_namespace, tokens, blocks, known);
  sequence.promoted = static_cast<int>(blocks.size());
}

void Scheduler::Damaged(int32_t block) {
  std::vector<Sequence*> holders;
  for (const auto& sequence : running_) {
    if (std::ranges::find(sequence->block_table, block) != sequence->block_table.end()) {
      holders.push_back(sequence.get());
    }
  }
  for (Sequence* holder : holders) Preempt(holder);
  for (const auto& sequence : waiting_) {
    if (sequence->load) AbandonLoad(*sequence);
  }
  ClearTree();
  ChooseFront();
}

void Scheduler::ClearTree() {
  if (warm_ == nullptr) return tree_.Clear();
  warm_->WithoutKeeping([this] { tree_.Clear(); });
}

void Scheduler::LetGo(Sequence& sequence) {
  sequence.blocks.clear();
  sequence.known_blocks = 0;
  sequence.load.reset();
  sequence.tried_disk = true;
  sequence.lazy_blocks = 0;
}

void Scheduler::AbandonLoad(Sequence& sequence) {
  cold_->Abandon(*sequence.load);
  LetGo(sequence);
}

void Scheduler::TakeLoaded() {
  for (const cache::DiskTier::Loaded& loaded : cold_->TakeLoaded()) {
    const auto it = std::ranges::find_if(
        waiting_, [&](const auto& sequence) { return sequence->load && *sequence->load == loaded.load; });
    MOESAIC_CHECK(it != waiting_.end());
    Sequence& sequence = **it;
    const int whole = sequence.known_blocks + loaded.blocks;
    tree_.Insert(sequence.cache_namespace,
                 std::span(sequence.tokens).first(static_cast<size_t>(whole) * tensor::kKvBlockTokens),
                 std::span(sequence.blocks).first(whole), sequence.known_blocks);
    LetGo(sequence);
  }
}

bool Scheduler::loading() const {
  return std::ranges::any_of(waiting_, [](const auto& sequence) { return sequence->load.has_value(); });
}

void Scheduler::Preempt(Sequence* victim) {
  parked_.Park(*victim);
  victim->blocks.clear();
  victim->block_table.clear();
  victim->computed = 0;
  victim->known_blocks = 0;
  victim->draft.tokens.clear();
  victim->draft.hidden.clear();
  victim->due = true;
  victim->tried_disk = false;
  victim->promoted = 0;
  victim->lazy_blocks = 0;
  InsertByArrival(waiting_, TakeOut(running_, victim->id));
}

void Scheduler::Admit(StepPlan::Admission& admission) {
  Sequence& sequence = *admission.sequence;
  cache::PrefixMatch& prefix = admission.prefix;
  tree_.Use(prefix.blocks);
  admissions_.Count(Clock::now());
  sequence.computed = admission.tokens;
  sequence.known_blocks = static_cast<int>(prefix.blocks.size());
  for (const cache::BlockRef& block : prefix.blocks) sequence.block_table.push_back(block.index());
  const bool restored = admission.tokens > prefix.tokens();
  sequence.blocks = std::move(prefix.blocks);
  const int lossy_from = FirstLossy(sequence, prefix.tail);
  // What comes from the swap space is what it was.
  sequence.lossy_from = restored ? std::min(sequence.lossy_from, lossy_from) : lossy_from;
  InsertByArrival(running_, TakeOut(waiting_, sequence.id));
  if (admission.first) {
    sequence.times.started = Clock::now();
    sequence.cached_tokens = sequence.computed;
    sequence.share->service += sequence.remaining();
  }
  for (const auto& other : waiting_) {
    if (other->id > sequence.id) break;
    other->due |= ++other->overtaken >= options_.max_overtakes;
  }
}

// The first block of a sequence that is lossy, or will be, since it begins with rows of `tail`.
int Scheduler::FirstLossy(const Sequence& sequence, const cache::BlockRef& tail) const {
  for (int i = 0; i < sequence.known_blocks; ++i) {
    if (pool_.lossy(sequence.block_table[i])) return i;
  }
  return tail && pool_.lossy(tail.index()) ? sequence.known_blocks : std::numeric_limits<int>::max();
}

void Scheduler::MakeFree(int blocks) {
  if (const int missing = blocks - pool_.free_blocks(); missing > 0) {
    if (warm_ != nullptr) warm_->Expect(missing);
    MOESAIC_CHECK_EQ(tree_.Evict(missing), missing);  // the plan counted them
  }
}

void Scheduler::TakeBlocks(const StepPlan& plan) {
  int needed = 0;
  for (const StepPlan::Part& part : plan.parts) needed += part.new_blocks;
  MakeFree(needed);
  for (const StepPlan::Part& part : plan.parts) {
    for (int i = 0; i < part.new_blocks; ++i) {
      auto block = pool_.Allocate();
      MOESAIC_CHECK(block.ok());
      part.sequence->block_table.push_back(block->index());
      part.sequence->blocks.push_back(*std::move(block));
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
  for (const StepPlan::Part& part : plan.parts) {
    Sequence& sequence = *part.sequence;
    sequence.share->service += kOutputWeight * (part.accepted + (part.is_decode() && !part.late ? 1 : 0));
    sequence.computed += part.kept();
    const int whole = std::min(sequence.computed, sequence.shared_limit) / tensor::kKvBlockTokens;
    if (!options_.prefix_cache || whole == sequence.known_blocks) continue;
    for (int i = std::max(sequence.known_blocks, sequence.lossy_from); i < whole; ++i) {
      pool_.SetLossy(sequence.blocks[i]);
    }
    tree_.Insert(sequence.cache_namespace,
                 std::span(sequence.tokens).first(static_cast<size_t>(whole) * tensor::kKvBlockTokens),
                 std::span(sequence.blocks).first(whole), sequence.known_blocks);
    for (int i = sequence.known_blocks; i < whole; ++i) {
      sequence.block_table[i] = sequence.blocks[i].index();
      if (pool_.lossy(sequence.block_table[i])) sequence.lossy_from = std::min(sequence.lossy_from, i);
    }
    sequence.known_blocks = whole;
  }
}

}  // namespace moesaic::engine
