// The swap tier: keeps the blocks of preempted requests until they are admitted again. Blocks that are in the
// radix tree are saved when the tree evicts them, others at once. docs/contracts/kv-tiers.md is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cache/kv_tier.h"

namespace moesaic::cache {

class SwapTier : public KvTier {
 public:
  /// As many slots as fit `bytes`; fails if none does. `pool` is borrowed. `attention_tokens`: position at
  /// which attention doubles the cost of a token.
  static StatusOr<std::unique_ptr<SwapTier>> Create(BlockPool& pool, const KvLayout& layout, int64_t bytes,
                                                    int64_t attention_tokens);

  int slots() const { return slots_.total(); }
  /// Sets the cost of copying one block out and back, in tokens computed at the start of a sequence. Until
  /// then copying costs nothing.
  void SetCopyTokens(double tokens) { copy_tokens_ = tokens; }

  TierHit Lookup(const TierQuery& query) const override;
  void OnEvict(const EvictedBlock& evicted, KvOps* ops) override;
  bool Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
             KvOps* ops) override;
  void OnPreempt(uint64_t request, std::span<const BlockRef> blocks, int tokens, KvOps* ops) override;
  void OnAdmit(uint64_t request) override { Forget(request); }
  void OnEnd(uint64_t request, std::string_view, std::span<const int32_t>) override { Forget(request); }
  void OnResult(const KvResult& result) override;
  void SetTokenSeconds(double seconds) override;
  void Clear() override {}  // it keeps blocks of waiting requests only
  void AddStats(TierStats* stats) const override;

 private:
  // A block of a preempted request: in the radix tree, in a slot, or lost.
  struct Parked {
    int32_t in_tree = -1;  // its number, or -1
    SlotRef slot = nullptr;
    bool inexact = false;
  };
  struct Request {
    std::vector<Parked> blocks;
    int tokens = 0;  // in them
  };

  SwapTier(BlockPool& pool, int slots, double copy_seconds, int64_t attention_tokens)
      : pool_(pool), slots_(slots), copy_seconds_(copy_seconds), attention_tokens_(attention_tokens) {}
  bool IsWorthCopying(int tokens) const;
  SlotRef Save(int32_t block, KvOps* ops);
  void Forget(uint64_t request);

  BlockPool& pool_;
  SlotPool slots_;
  double copy_seconds_;  // to copy a block one way
  const int64_t attention_tokens_;
  double copy_tokens_ = 0;
  absl::flat_hash_map<uint64_t, Request> requests_;
  // Requests that want a block of the tree back, and as which of their blocks.
  absl::flat_hash_map<int32_t, std::vector<std::pair<uint64_t, int>>> wanted_;
  SwapTierStats stats_;
};

}  // namespace moesaic::cache
