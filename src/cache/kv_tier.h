// The interface of the tiers that keep KV blocks outside the cache: the swap area, the warm area and the
// disk. docs/contracts/kv-tiers.md is normative.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_op.h"
#include "cache/slot_pool.h"
#include "cache/tier_stats.h"

namespace moesaic::cache {

/// A waiting request whose prefix is looked up.
struct TierQuery {
  uint64_t request = 0;
  std::string_view name = {};            // namespace of its blocks
  std::span<const int32_t> tokens = {};  // leading tokens whose blocks it may share
  int indexed_blocks = 0;                // leading blocks that the radix tree has
  int64_t indexed_tokens = 0;            // leading tokens that it has, those of a partial block included
  bool aged = false;                     // the request must not wait
  int budget_blocks = 0;                 // blocks that each row reads at most; 0: rows may read all blocks
};

/// Blocks that a tier has for a request, after those that the radix tree has.
struct TierHit {
  int blocks = 0;  // blocks that Fetch fills; 0: the tier has none
  int tokens = 0;  // leading tokens of the request whose keys and values are in memory after Fetch
  bool with_admission = false;      // Fetch is called in the step that admits the request, otherwise before
  bool exclusive = false;           // at most one such hit is fetched per step
  bool summaries_only = false;      // Fetch fills key summaries only; layers are read when rows need them
  std::vector<SlotRef> slots = {};  // keep the blocks' slots from reuse until Fetch

  explicit operator bool() const { return blocks > 0; }
};

/// A block that the radix tree is about to evict. Its contents are still in place.
struct EvictedBlock {
  int32_t block = 0;
  bool discarded = false;  // its contents are of no further use
};

/// A fetch that has ended: `blocks` leading ones of its hit are in memory.
struct FinishedFetch {
  uint64_t request = 0;
  int blocks = 0;
};

/// Keeps blocks outside the cache. Decides by numbers and tokens only; bytes are moved by the operations that
/// its methods append to `ops`, which are applied in order before the rows of the next step. Engine thread
/// only.
class KvTier {
 public:
  virtual ~KvTier() = default;

  /// Blocks for a waiting request. Changes nothing.
  virtual TierHit Lookup(const TierQuery& query) const = 0;
  /// Called for each block that is evicted.
  virtual void OnEvict(const EvictedBlock& evicted, KvOps* ops) = 0;
  /// Fills the last `hit.blocks` of `blocks`; the blocks before them are in the tree. The caller holds the
  /// only handles of the blocks to fill. True: they are filled when `ops` have been applied; false:
  /// TakeFinished reports the end.
  virtual bool Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
                     KvOps* ops) = 0;
  /// Ends the fetch of a request: its blocks are not written after `ops` have been applied.
  virtual void Cancel(uint64_t /*request*/, KvOps* /*ops*/) {}
  virtual std::vector<FinishedFetch> TakeFinished() { return {}; }

  /// A request is about to lose its blocks, which hold its first `tokens` tokens.
  virtual void OnPreempt(uint64_t request, std::span<const BlockRef> blocks, int tokens, KvOps* ops) = 0;
  /// A request has been admitted; its fetch, if any, has been listed.
  virtual void OnAdmit(uint64_t /*request*/) {}
  /// A request ends. `tokens` are those of its blocks in the radix tree.
  virtual void OnEnd(uint64_t request, std::string_view name, std::span<const int32_t> tokens) = 0;

  /// A step begins.
  virtual void BeginStep(KvOps* /*ops*/) {}
  /// The tree is about to evict `blocks`, the least valuable first.
  virtual void ExpectEvictions(int /*blocks*/) {}
  /// Updates the tier's records by the outcome of a step's operations.
  virtual void OnResult(const KvResult& /*result*/) {}
  /// Sets the seconds that it takes to compute one token at the start of a sequence.
  virtual void SetTokenSeconds(double /*seconds*/) {}

  /// Returns whether blocks remain to be stored.
  virtual bool saving() const { return false; }
  /// Waits until a fetch or a write ends, or until `timeout`.
  virtual void Wait(std::chrono::milliseconds /*timeout*/) {}
  /// Stores all pending blocks; ends early when `stop`, which is polled, becomes true. `apply` applies
  /// operations.
  virtual void Flush(const std::function<bool()>& /*stop*/, const std::function<void(KvOps)>& /*apply*/) {}
  /// Forgets all blocks.
  virtual void Clear() = 0;
  virtual void AddStats(TierStats* stats) const = 0;
};

}  // namespace moesaic::cache
