#include "cache/warm_tier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

int StepBlocks(const KvLayout& layout, int64_t bytes) {
  return static_cast<int>(
      std::clamp<int64_t>(bytes / layout.total_bytes(), 1, std::numeric_limits<int>::max()));
}

}  // namespace

StatusOr<int> WarmTier::SlotsFor(const KvLayout& layout, const WarmTierOptions& options) {
  const WarmCodec codec(layout, options.exact);
  const int64_t each = codec.block_bytes() + kNodeBytes;
  const int64_t room = options.bytes - RootBytes("");
  if (room < each) {
    return ResourceExhausted(
        "the memory for warm KV blocks must be at least {} bytes, one block of {} tokens; found {}",
        each + RootBytes(""), kKvBlockTokens, options.bytes);
  }
  return static_cast<int>(std::min<int64_t>(room / each, std::numeric_limits<int>::max()));
}

WarmTier::WarmTier(BlockPool& pool, const RadixTree* tree, const KvLayout& layout,
                   const WarmTierOptions& options, int slots)
    : pool_(pool),
      tree_(tree),
      codec_(layout, options.exact),
      has_summaries_(layout.summary_bytes > 0),
      slots_(slots),
      bytes_(options.bytes),
      step_blocks_(StepBlocks(layout, options.step_bytes)),
      left_(step_blocks_) {
  stats_.capacity_blocks = slots;
}

void WarmTier::BeginStep(KvOps* /*ops*/) {
  if (stored_in_step_ > 0) {
    spdlog::debug("warm tier: stored {} evicted blocks in the last step, {} of {} slots are used",
                  stored_in_step_, slots_.used(), slots_.total());
  }
  stored_in_step_ = 0;
  left_ = step_blocks_;
}

TierHit WarmTier::Lookup(const TierQuery& query) const {
  // A block that was evicted again before its request was admitted is not fetched twice.
  const auto fetched = fetched_.find(query.request);
  if (fetched != fetched_.end() && query.indexed_blocks < fetched->second) return {};
  TierHit hit = {.exclusive = true};
  hit.slots =
      Find(query.name, query.tokens, query.indexed_blocks, std::min(step_blocks_, pool_.total_blocks()));
  hit.blocks = static_cast<int>(hit.slots.size());
  hit.tokens = (query.indexed_blocks + hit.blocks) * kKvBlockTokens;
  return hit;
}

void WarmTier::OnEvict(const EvictedBlock& evicted, KvOps* ops) {
  expected_ = std::max(0, expected_ - 1);
  const size_t before = path_.blocks.size();
  const bool follows = before > 1 && path_.blocks[before - 2] == evicted.block;
  if (evicted.discarded || pool_.absent(evicted.block)) {
    path_.blocks.clear();
    return;
  }
  if (follows) {
    path_.blocks.pop_back();
    chain_.pop_back();
  } else {
    path_ = tree_->PathOf(evicted.block);
    chain_.clear();
    for (const int32_t each : path_.blocks) chain_.push_back(tree_->TokensOf(each));
  }
  Put(path_.name, chain_, evicted.block, ops, {.before_last = follows, .more = expected_});
}

bool WarmTier::Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
                     KvOps* ops) {
  const std::span<const BlockRef> to = blocks.last(hit.slots.size());
  for (size_t i = 0; i < to.size(); ++i) {
    MOESAIC_CHECK(to[i].unique());
    ops->push_back({.kind = KvOpKind::kRestore,
                    .area = KvArea::kWarm,
                    .block = to[i].index(),
                    .slot = hit.slots[i]->index()});
    if (!exact()) pool_.SetInexact(to[i]);
  }
  stats_.restored_blocks += std::ssize(to);
  spdlog::debug("warm tier: engine request {}: restoring {} blocks", query.request, to.size());
  Touch(query.name, query.tokens, static_cast<int>(blocks.size()));
  fetched_[query.request] = static_cast<int>(blocks.size());
  if (exact() || !has_summaries_) return true;
  for (const BlockRef& block : to) {
    ops->push_back({.kind = KvOpKind::kBuildSummary, .block = block.index()});
  }
  return true;
}

void WarmTier::OnResult(const KvResult& result) {
  stats_.store_seconds += result.warm_save_seconds;
  stats_.restore_seconds += result.warm_restore_seconds;
  for (const int32_t slot : result.rejected_slots) {
    int32_t id = index_.oldest();
    while (id >= 0 && index_.payload(id)->index() != slot) id = index_.newer(id);
    if (id < 0) continue;  // it was evicted, or forgotten, in the same step
    ++stats_.refused_blocks;
    --stats_.stored_blocks;
    Drop(id);
  }
}

// The name is stored in the root and as its key.
int64_t WarmTier::RootBytes(std::string_view name) {
  return kNodeBytes + 2 * static_cast<int64_t>(name.size());
}

int64_t WarmTier::UsedBytes() const {
  return index_.listed_blocks() * codec_.block_bytes() + index_.blocks() * kNodeBytes + root_bytes_;
}

std::vector<SlotRef> WarmTier::Find(std::string_view name, std::span<const int32_t> tokens, int first,
                                    int max) const {
  std::vector<SlotRef> found;
  int count = 0;
  bool whole = true;
  const size_t wanted = std::min(tokens.size() / kKvBlockTokens, static_cast<size_t>(first + max));
  index_.Walk(name, tensor::KvTokensOf(tokens, wanted), [&](int32_t id) {
    const SlotRef& slot = index_.payload(id);
    if (count++ < first) return;
    whole = whole && slot != nullptr;
    if (whole) found.push_back(slot);
  });
  return found;
}

void WarmTier::Touch(std::string_view name, std::span<const int32_t> tokens, int count) {
  std::vector<int32_t> chain;
  index_.Walk(name, tensor::KvTokensOf(tokens, count), [&](int32_t id) { chain.push_back(id); });
  for (; !chain.empty(); chain.pop_back()) {
    if (index_.listed(chain.back())) index_.MoveToNewest(chain.back());
  }
}

// Finds the longest known beginning of `chain`.
void WarmTier::Locate(std::string_view name, Chain chain, bool before_last) {
  if (before_last) {
    if (reached_depth_ <= chain.size()) return;
    reached_ = index_.Parent(reached_);
    --reached_depth_;
    MOESAIC_CHECK_EQ(reached_depth_, chain.size());
    return;
  }
  reached_ = -1;
  reached_depth_ = 0;
  Index::Position at = {.node = index_.FindRoot(name)};
  for (; at.node != nullptr && reached_depth_ < chain.size(); ++reached_depth_) {
    at = index_.Next(at, chain[reached_depth_]);
    if (!at) return;
    reached_ = index_.IdAt(at);
  }
}

// Adds the blocks of `chain`, which was located, that are missing; the last block.
int32_t WarmTier::Reach(std::string_view name, Chain chain) {
  if (index_.FindRoot(name) == nullptr) root_bytes_ += RootBytes(name);
  Index::Position at =
      reached_ < 0 ? Index::Position{.node = &index_.AddRoot(name)} : index_.position(reached_);
  for (; reached_depth_ < chain.size(); ++reached_depth_) {
    reached_ = index_.NewId();
    at = index_.Append(at, reached_, chain[reached_depth_], {}, /*extend=*/true);
  }
  return reached_;
}

// Takes a slot for the end of `chain`, which was located. Null: every slot is held by a reader, or the
// names of the chain do not fit.
SlotRef WarmTier::TakeSlot(std::string_view name, Chain chain) {
  if (codec_.block_bytes() + std::ssize(chain) * kNodeBytes + RootBytes(name) > bytes_) return nullptr;
  for (int32_t id = index_.oldest();;) {
    const int64_t missing = static_cast<int64_t>(chain.size() - reached_depth_) * kNodeBytes +
                            (index_.FindRoot(name) == nullptr ? RootBytes(name) : 0);
    if (UsedBytes() + codec_.block_bytes() + missing <= bytes_) {
      if (SlotRef slot = slots_.Take()) return slot;
    }
    while (id >= 0 && index_.payload(id).use_count() > 1) id = index_.newer(id);
    if (id < 0) return nullptr;
    Drop(std::exchange(id, index_.newer(id)));
    ++stats_.evicted_blocks;
  }
}

void WarmTier::Drop(int32_t id) {
  index_.Unlist(id);
  index_.payload(id) = nullptr;
  Prune(id);
}

// Removes `id` and blocks before it as long as they have no slot and no block follows them.
void WarmTier::Prune(int32_t id) {
  while (id >= 0 && index_.payload(id) == nullptr && index_.Follower(id) < 0) {
    const int32_t parent = index_.Parent(id);
    if (reached_ == id) {
      reached_ = parent;
      --reached_depth_;
    }
    const std::string name(parent < 0 ? index_.NameOf(id) : "");
    index_.Remove(id);
    if (parent < 0 && index_.FindRoot(name) == nullptr) root_bytes_ -= RootBytes(name);
    id = parent;
  }
}

void WarmTier::Put(std::string_view name, Chain chain, int32_t block, KvOps* ops, WarmRun run) {
  Locate(name, chain, run.before_last);
  if (reached_depth_ == chain.size() && index_.listed(reached_)) {
    index_.MoveToNewest(reached_);
    return;
  }
  if (left_ <= run.more) {
    ++stats_.dropped_blocks;
    return;
  }
  --left_;
  SlotRef slot = TakeSlot(name, chain);
  if (slot == nullptr) {
    ++stats_.refused_blocks;
    return;
  }
  ops->push_back({.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = block, .slot = slot->index()});
  const int32_t id = Reach(name, chain);
  index_.payload(id) = std::move(slot);
  index_.MoveToNewest(id);
  ++stats_.stored_blocks;
  ++stored_in_step_;
}

void WarmTier::Clear() {
  index_.Clear();
  root_bytes_ = 0;
  reached_ = -1;
  reached_depth_ = 0;
  path_.blocks.clear();
}

WarmTierStats WarmTier::stats() const {
  WarmTierStats stats = stats_;
  stats.blocks = index_.listed_blocks();
  stats.bytes = stats.blocks * codec_.block_bytes();
  return stats;
}

void WarmTier::CheckStructure() const {
  index_.CheckStructure();
  int64_t root_bytes = 0;
  for (const auto& [name, root] : index_.roots()) root_bytes += RootBytes(name);
  MOESAIC_CHECK_EQ(root_bytes, root_bytes_);
  for (int32_t id = index_.oldest(); id >= 0; id = index_.newer(id)) {
    MOESAIC_CHECK(index_.payload(id) != nullptr);
  }
  MOESAIC_CHECK_LE(index_.listed_blocks(), stats_.capacity_blocks);
  MOESAIC_CHECK_LE(UsedBytes(), bytes_);
  MOESAIC_CHECK(reached_ < 0 ? reached_depth_ == 0 : index_.contains(reached_));
}

}  // namespace moesaic::cache
