// The swap tier: keeps the blocks of preempted requests until they are admitted again. Blocks that are in the
// radix tree are saved when the tree evicts them, others at once. docs/contracts/kv-tiers.md is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cache/kv_tier.h"

namespace moesaic::cache {

class SwapTier : public KvTier {
 public:
  /// Returns the number of slots that fit `bytes`. ResourceExhausted if not even one fits.
  static StatusOr<int> SlotsFor(const KvLayout& layout, int64_t bytes);

  /// `pool` is borrowed. `attention_tokens` is the position at which attention doubles the cost of computing
  /// a token.
  SwapTier(BlockPool& pool, const KvLayout& layout, int slots, int64_t attention_tokens);

  int slots() const { return slots_.total(); }
  /// Sets the cost of copying one block out and back, in units of computing a token at the start of a
  /// sequence. Blocks are saved only if computing them again would cost more. The initial cost is 0.
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
  // A block of a preempted request. It is in the radix tree, or in a slot, or in neither and must be computed
  // again.
  struct Parked {
    int32_t in_tree = -1;  // block number if it is in the tree, otherwise -1
    SlotRef slot = nullptr;
    bool inexact = false;
  };
  struct Request {
    std::vector<Parked> blocks;
    int tokens = 0;  // number of computed tokens in `blocks`
  };

  bool IsWorthCopying(int tokens) const;
  SlotRef Save(int32_t block, KvOps* ops);
  void Forget(uint64_t request);

  BlockPool& pool_;
  SlotPool slots_;
  double copy_seconds_;  // time to copy one block in one direction
  const int64_t attention_tokens_;
  double copy_tokens_ = 0;
  absl::flat_hash_map<uint64_t, Request> requests_;
  // By number of a block in the tree: preempted requests that need it, and its index in Request::blocks.
  absl::flat_hash_map<int32_t, std::vector<std::pair<uint64_t, int>>> wanted_;
  SwapTierStats stats_;
};

}  // namespace moesaic::cache
