// The disk tier: stores the blocks of requests that end, and loads those that waiting requests lack.
// docs/contracts/kv-tiers.md, K1 to K21, is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

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

#include "cache/disk_store.h"
#include "cache/kv_tier.h"
#include "cache/radix_tree.h"

namespace moesaic::cache {

struct DiskTierOptions {
  /// Maximum bytes of blocks stored, and of key summaries fetched, in one step. One block is always allowed.
  int64_t step_bytes = 16 << 20;
  /// Layers of long prefixes are read on demand, for requests whose rows choose blocks.
  bool attaches = true;
};

class DiskTier : public KvTier {
 public:
  /// `pool` and `tree` are borrowed.
  DiskTier(BlockPool& pool, const RadixTree& tree, std::unique_ptr<DiskStore> store, const KvLayout& layout,
           const DiskTierOptions& options)
      : pool_(pool), tree_(tree), store_(std::move(store)), layout_(layout), options_(options) {}
  ~DiskTier() override;

  TierHit Lookup(const TierQuery& query) const override;
  void OnEvict(const EvictedBlock& evicted, KvOps* ops) override;
  bool Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
             KvOps* ops) override;
  void Cancel(uint64_t request, KvOps* ops) override;
  std::vector<FinishedFetch> TakeFinished() override;
  void OnPreempt(uint64_t request, std::span<const BlockRef>, int, KvOps*) override {
    requests_.erase(request);
  }
  void OnEnd(uint64_t request, std::string_view name, std::span<const int32_t> tokens) override;
  /// Appends a `store` operation for each block that waits to be stored and is still in the tree.
  void BeginStep(KvOps* ops) override;
  void OnResult(const KvResult& result) override;
  bool saving() const override { return !pending_.empty() || store_->writing(); }
  void Wait(std::chrono::milliseconds timeout) override { store_->Wait(timeout); }
  void Flush(const std::function<bool()>& stop, const std::function<void(KvOps)>& apply) override;
  void Clear() override;
  void AddStats(TierStats* stats) const override;

 private:
  // Blocks that wait to be stored.
  struct Pending {
    std::string name;
    std::vector<int32_t> tokens;
  };
  // State of a waiting request since it last began to wait.
  struct Request {
    std::optional<DiskStore::LoadId> load;  // load in progress
    bool tried = false;                     // true once its blocks have been fetched
    // Number of leading blocks in the tree after a part of them was attached, while more parts follow.
    int attached = 0;
  };
  // Leading blocks of a request that the tree has and that may be stored.
  struct Storable {
    int blocks = 0;
    bool inexact = false;  // the block after them is not stored, because it is inexact
  };

  bool IsAttached(const TierQuery& query, int blocks, int attached_before) const;
  Storable CountStorable(const Pending& pending, const PrefixMatch& match) const;
  void DropFirst();
  bool Release(int32_t block);
  void LogMessages();

  BlockPool& pool_;
  const RadixTree& tree_;
  const std::unique_ptr<DiskStore> store_;
  const KvLayout layout_;
  const DiskTierOptions options_;
  std::deque<Pending> pending_;
  size_t pending_tokens_ = 0;
  int64_t lost_ = 0;
  absl::flat_hash_map<uint64_t, Request> requests_;
  absl::flat_hash_map<DiskStore::LoadId, uint64_t> loading_;  // requests by their load
  absl::flat_hash_map<int32_t, uint64_t> attached_;           // records by block, pinned
};

}  // namespace moesaic::cache
