// Blocks between the tree and the disk: those of requests that end are stored, those that waiting requests
// lack are loaded. docs/contracts/kv-tiers.md is the law.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/disk_tier.h"
#include "cache/kv_pool.h"
#include "cache/radix_tree.h"
#include "engine/lazy_blocks.h"
#include "engine/sequence.h"

namespace moesaic::engine {

/// Engine thread only.
class ColdBlocks {
 public:
  /// `pool` and `tree` are borrowed and must outlive this.
  /// `layers`: the decoder's, of the pool's. `step_bytes` are copied in one step at most: of blocks that are
  /// to be stored, and of digests; but one block's.
  ColdBlocks(const cache::KvPool& pool, cache::RadixTree& tree, std::unique_ptr<cache::DiskTier> tier,
             int layers, int64_t step_bytes)
      : pool_(pool),
        tree_(tree),
        tier_(std::move(tier)),
        lazy_(pool, *tier_, layers),
        step_bytes_(step_bytes) {}

  /// Remembers that those blocks of a sequence which stand in the tree are to be stored.
  void Keep(const Sequence& sequence);
  /// Copies some of what is to be stored, and that the tree still has, to where it is written from; logs what
  /// there is to tell. Once a step.
  void Pump();
  bool saving() const { return !pending_.empty() || tier_->writing(); }
  /// Returns when all is stored and on the medium, or soon after `stop` says true.
  void Flush(const std::function<bool()>& stop);
  /// Forgets what is stored and what is to be.
  void Clear();

  /// Leading blocks of `tokens` that can be loaded.
  int Find(std::string_view name, std::span<const int32_t> tokens) const { return tier_->Find(name, tokens); }
  /// Whether a request that chooses blocks in every row, and of which `blocks` would be loaded, does with
  /// their digests: where most of them would never be read, or it has done with some already.
  bool IsLazy(const Sequence& sequence, int blocks) const;
  /// Of `blocks`, those whose digests one step brings back.
  int LazyPart(int blocks) const;
  /// Begins to read what belongs into the blocks behind the known ones.
  void StartLoad(Sequence& sequence);
  /// Puts the digests of the blocks behind the known ones beside them; all else comes when it is asked for.
  void LoadDigests(Sequence& sequence);
  /// Whether rows that read the block need the disk first: it can't be copied.
  bool IsAbsent(int32_t block) const { return lazy_.Has(block); }
  kernels::ColdSource* source() { return &lazy_; }
  std::optional<int32_t> TakeFailure() { return lazy_.TakeFailure(); }
  /// The tree lets a block go.
  void Leaves(int32_t block) { lazy_.Forget(block); }
  void Abandon(cache::DiskTier::LoadId load) { tier_->Abandon(load); }
  std::vector<cache::DiskTier::Loaded> TakeLoaded() { return tier_->Poll(); }
  void Wait(std::chrono::milliseconds most) { tier_->Wait(most); }

  cache::DiskTierStats stats() const { return tier_->stats(); }
  /// Blocks that the tree let go before they were stored.
  int64_t lost_blocks() const { return lost_; }

 private:
  struct Pending {
    std::string name;
    std::vector<int32_t> tokens;  // of whole blocks
  };
  void DropFirst();

  const cache::KvPool& pool_;
  cache::RadixTree& tree_;
  const std::unique_ptr<cache::DiskTier> tier_;
  LazyBlocks lazy_;
  const int64_t step_bytes_;
  std::deque<Pending> pending_;
  size_t pending_tokens_ = 0;
  int64_t lost_ = 0;
};

}  // namespace moesaic::engine
