#include "cache/swap_tier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace moesaic::cache {

StatusOr<int> SwapTier::SlotsFor(const KvLayout& layout, int64_t bytes) {
  const int64_t slots = std::min<int64_t>(bytes / layout.total_bytes(), std::numeric_limits<int>::max());
  if (slots < 1) {
    return ResourceExhausted("the swap space needs at least {} bytes, one KV block; it has {}",
                             layout.total_bytes(), bytes);
  }
  return static_cast<int>(slots);
}

SwapTier::SwapTier(BlockPool& pool, const KvLayout& layout, int slots, int64_t attention_tokens)
    : pool_(pool),
      slots_(slots),
      copy_seconds_(static_cast<double>(layout.total_bytes()) / kAssumedSwapBytesPerSecond),
      attention_tokens_(attention_tokens) {}

void SwapTier::OnResult(const KvResult& result) {
  if (result.swap_copy_seconds > 0) copy_seconds_ = result.swap_copy_seconds;
}

void SwapTier::SetTokenSeconds(double seconds) { SetCopyTokens(2 * copy_seconds_ / seconds); }

bool SwapTier::IsWorthCopying(int tokens) const {
  const auto count = static_cast<double>(tokens);
  const double compute = count * (1 + count / (2 * static_cast<double>(attention_tokens_)));
  return compute > copy_tokens_ * KvBlocksFor(tokens);
}

// Takes a slot and lists the copy to it; null: no slot is free.
SlotRef SwapTier::Save(int32_t block, KvOps* ops) {
  SlotRef slot = slots_.Take();
  if (slot == nullptr) return nullptr;
  ops->push_back({.kind = KvOpKind::kSave, .area = KvArea::kSwap, .block = block, .slot = slot->index()});
  ++stats_.saved_blocks;
  return slot;
}

void SwapTier::OnPreempt(uint64_t request, std::span<const BlockRef> blocks, int tokens, KvOps* ops) {
  MOESAIC_CHECK(!requests_.contains(request));
  if (!IsWorthCopying(tokens)) {
    spdlog::debug("swap: engine request {}: computing {} tokens again is faster than copying them", request,
                  tokens);
    return;
  }
  Request& kept = requests_[request];
  kept.tokens = tokens;
  kept.blocks.resize(KvBlocksFor(tokens));
  for (size_t i = 0; i < kept.blocks.size(); ++i) {
    const int32_t block = blocks[i].index();
    Parked& parked = kept.blocks[i];
    parked.inexact = pool_.inexact(block);
    if (pool_.cached(block)) {
      parked.in_tree = block;
      wanted_[block].emplace_back(request, static_cast<int>(i));
    } else {
      parked.slot = Save(block, ops);
    }
  }
  spdlog::debug("swap: engine request {}: parked {} blocks, {} of {} slots are used", request,
                kept.blocks.size(), slots_.used(), slots_.total());
}

void SwapTier::OnEvict(const EvictedBlock& evicted, KvOps* ops) {
  const auto it = wanted_.find(evicted.block);
  if (it == wanted_.end()) return;
  const SlotRef slot = Save(evicted.block, ops);
  for (const auto& [request, i] : it->second) {
    Parked& parked = requests_.at(request).blocks[i];
    parked.in_tree = -1;
    parked.slot = slot;
  }
  wanted_.erase(it);
}

TierHit SwapTier::Lookup(const TierQuery& query) const {
  const auto it = requests_.find(query.request);
  if (it == requests_.end()) return {};
  const std::vector<Parked>& blocks = it->second.blocks;
  const auto begin = blocks.begin() + std::min<int64_t>(query.indexed_blocks, std::ssize(blocks));
  const auto end =
      std::find_if(begin, blocks.end(), [](const Parked& parked) { return parked.slot == nullptr; });
  if (begin == end) return {};
  const int tokens = std::min(it->second.tokens, static_cast<int>(end - blocks.begin()) * kKvBlockTokens);
  if (tokens <= query.indexed_tokens) return {};
  return {.blocks = KvBlocksFor(tokens) - query.indexed_blocks, .tokens = tokens, .with_admission = true};
}

bool SwapTier::Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
                     KvOps* ops) {
  const Request& kept = requests_.at(query.request);
  for (int i = query.indexed_blocks; i < query.indexed_blocks + hit.blocks; ++i) {
    MOESAIC_CHECK(blocks[i].unique());
    ops->push_back({.kind = KvOpKind::kRestore,
                    .area = KvArea::kSwap,
                    .block = blocks[i].index(),
                    .slot = kept.blocks[i].slot->index()});
    if (kept.blocks[i].inexact) pool_.SetInexact(blocks[i]);
    ++stats_.restored_blocks;
  }
  spdlog::debug("swap: engine request {}: restoring {} blocks", query.request, hit.blocks);
  return true;
}

void SwapTier::Forget(uint64_t request) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  for (const Parked& parked : it->second.blocks) {
    if (parked.in_tree < 0) continue;
    const auto want = wanted_.find(parked.in_tree);
    std::erase_if(want->second, [request](const auto& entry) { return entry.first == request; });
    if (want->second.empty()) wanted_.erase(want);
  }
  requests_.erase(it);
}

void SwapTier::AddStats(TierStats* stats) const {
  stats->swap = stats_;
  stats->swap.blocks = slots_.used();
  stats->swap.capacity_blocks = slots_.total();
}

}  // namespace moesaic::cache
