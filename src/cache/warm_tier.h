// The warm tier: keeps evicted blocks in RAM outside the cache, usually in fewer bytes, and finds them by
// their tokens. docs/contracts/kv-tiers.md, W1 to W9, is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "cache/kv_tier.h"
#include "cache/radix_tree.h"
#include "cache/warm_codec.h"
#include "prefix/prefix_index.h"

namespace moesaic::cache {

struct WarmTierOptions {
  int64_t bytes = 0;       ///< memory for blocks and for the tokens that identify them
  bool exact = false;      ///< blocks are kept as they are
  int64_t step_bytes = 0;  ///< bytes of the cache that one step keeps; at least one block
};

/// Hints for Put when a run of adjacent blocks is evicted.
struct WarmRun {
  bool before_last = false;  ///< The chain is that of the last Put without its end: no search is needed.
  int more = 0;              ///< Number of blocks that follow in this step and are worth more.
};

class WarmTier : public KvTier {
 public:
  /// Returns the number of slots that fit `options.bytes`. ResourceExhausted if not even one fits.
  static StatusOr<int> SlotsFor(const KvLayout& layout, const WarmTierOptions& options);

  /// `pool` and `tree` are borrowed; `tree` may be null in tests that call Put themselves.
  WarmTier(BlockPool& pool, const RadixTree* tree, const KvLayout& layout, const WarmTierOptions& options,
           int slots);

  /// Returns whether restored blocks are bit-identical to those that were kept.
  bool exact() const { return codec_.exact(); }
  int slots() const { return slots_.total(); }

  TierHit Lookup(const TierQuery& query) const override;
  void OnEvict(const EvictedBlock& evicted, KvOps* ops) override;
  bool Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
             KvOps* ops) override;
  void OnPreempt(uint64_t request, std::span<const BlockRef>, int, KvOps*) override {
    fetched_.erase(request);
  }
  void OnEnd(uint64_t request, std::string_view, std::span<const int32_t>) override {
    fetched_.erase(request);
  }
  void BeginStep(KvOps*) override;
  void ExpectEvictions(int blocks) override { expected_ = blocks; }
  void OnResult(const KvResult& result) override;
  void Clear() override;
  void AddStats(TierStats* stats) const override { stats->warm = this->stats(); }

  /// Blocks [first ..) of `tokens` in namespace `name` that are here without a gap, at most `max`. A block
  /// can be restored while a reference to its slot exists.
  std::vector<SlotRef> Find(std::string_view name, std::span<const int32_t> tokens, int first, int max) const;
  /// Marks the first `count` blocks of `tokens` as the last used. Of these, later ones are evicted first.
  void Touch(std::string_view name, std::span<const int32_t> tokens, int count);
  /// Keeps `block`, the last of `chain`, whose spans are the tokens [kKvBlockTokens] of all blocks from the
  /// first of namespace `name` on. Does nothing if it is kept already.
  void Put(std::string_view name, std::span<const std::span<const int32_t>> chain, int32_t block, KvOps* ops,
           WarmRun run = {});

  WarmTierStats stats() const;
  void CheckStructure() const;  ///< For tests.

 private:
  // A block has a slot and is listed in the order of use, or it has neither: then blocks that have a slot
  // follow it.
  using Index = prefix::PrefixIndex<SlotRef, prefix::NoNodeState, kKvBlockTokens>;
  using Chain = std::span<const std::span<const int32_t>>;

  // Bytes of one block in the index, with its tokens.
  static constexpr int64_t kNodeBytes = kKvBlockTokens * int64_t{sizeof(int32_t)} + 192;

  static int64_t RootBytes(std::string_view name);
  int64_t UsedBytes() const;
  void Locate(std::string_view name, Chain chain, bool before_last);
  int32_t Reach(std::string_view name, Chain chain);
  SlotRef TakeSlot(std::string_view name, Chain chain);
  void Drop(int32_t id);
  void Prune(int32_t id);

  BlockPool& pool_;
  const RadixTree* const tree_;
  const WarmCodec codec_;
  const bool has_summaries_;
  SlotPool slots_;
  Index index_{kKvBlockTokens};
  const int64_t bytes_;
  int64_t root_bytes_ = 0;  // of all namespaces
  const int step_blocks_;
  int left_;  // blocks that this step may keep
  int stored_in_step_ = 0;
  int expected_ = 0;  // evictions that the tree has announced
  // The longest known beginning of the chain of the last Put: its last block (-1: it is empty) and length.
  int32_t reached_ = -1;
  size_t reached_depth_ = 0;
  // Path of the block that was evicted last, if it was kept; and the tokens of its blocks, in the tree, whose
  // earlier blocks stay until they are evicted.
  BlockPath path_;
  std::vector<std::span<const int32_t>> chain_;
  // By request: leading blocks that the tree had after the request's last fetch, until it is preempted.
  absl::flat_hash_map<uint64_t, int> fetched_;
  WarmTierStats stats_;
};

}  // namespace moesaic::cache
