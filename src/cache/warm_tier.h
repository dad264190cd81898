// The warm tier: blocks that the radix tree let go, kept in RAM beside the pool in fewer bytes and found
// again by what is in them. docs/contracts/kv-tiers.md, W1 to W9, is the law.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "cache/swap_space.h"
#include "cache/warm_codec.h"
#include "prefix/prefix_index.h"
#include "runtime/thread_pool.h"

namespace moesaic::cache {

/// Counters rise over the tier's life; the others are of this moment.
struct WarmTierStats {
  int blocks = 0, capacity_blocks = 0;
  int64_t bytes = 0;  ///< of these blocks
  int64_t stored_blocks = 0, restored_blocks = 0, evicted_blocks = 0;
  int64_t refused_blocks = 0;  ///< not finite, or no room but what is being read
  int64_t dropped_blocks = 0;  ///< beyond what one step keeps
  double store_seconds = 0, restore_seconds = 0;
};

/// Of the pool, what one step keeps at most, and what one brings back: about a tenth of a second's reading
/// and writing, beside steps of tens of milliseconds to seconds.
inline constexpr int64_t kWarmStepBytes = int64_t{256} << 20;

/// Of a block that is put as one of many.
struct WarmInRow {
  bool before_last = false;  ///< its chain is that of the last Put without its end: it costs no search
  int more = 0;              ///< that come behind it in this step and are worth more: it is dropped for them
};

/// Engine thread only; loops run on `threads`.
class WarmTier {
 public:
  /// `bytes` are for blocks and what names them; fails when they hold not even one. `exact`: blocks are kept
  /// as they are. `threads` are borrowed. `step_bytes` of the pool are kept in a step at most; but one block.
  static StatusOr<std::unique_ptr<WarmTier>> Create(const KvLayout& layout, int64_t bytes, bool exact,
                                                    runtime::ThreadPool& threads,
                                                    int64_t step_bytes = kWarmStepBytes);
  ~WarmTier();
  WarmTier(const WarmTier&) = delete;
  WarmTier& operator=(const WarmTier&) = delete;

  /// Whether what comes back is what went in, to the bit.
  bool exact() const { return codec_.exact(); }
  int step_blocks() const { return step_blocks_; }  ///< that one step keeps
  /// A step begins: it may keep so many blocks again.
  void StartStep() { left_ = step_blocks_; }

  /// Blocks [first ..) of `tokens` in namespace `name`, as far as they are here without a gap, at most
  /// `most`. While a reference lives its block can be restored.
  std::vector<SwapRef> Find(std::string_view name, std::span<const int32_t> tokens, int first,
                            int most) const;
  /// A request has come upon the first `count` blocks of `tokens`: they are the last used, and a block goes
  /// before the one that stands before it.
  void Touch(std::string_view name, std::span<const int32_t> tokens, int count);
  /// Keeps a copy of `block`, the last of `chain`, whose spans are the tokens [kKvBlockTokens] of all blocks
  /// from the first of namespace `name` on. One that is here stays as it is.
  void Put(std::string_view name, std::span<const std::span<const int32_t>> chain, const KvBlockView& block,
           WarmInRow row = {});
  /// Puts blocks that Find gave back, each to its memory; summaries too where the tier is exact.
  void Restore(std::span<const SwapRef> blocks, std::span<const KvBlockView> to);
  /// Forgets all blocks.
  void Clear();

  WarmTierStats stats() const;
  void CheckStructure() const;  ///< For tests.

 private:
  // A block, or the name of a block that others follow: then it has no slot.
  struct Entry {
    SwapRef slot = nullptr;
    std::list<int32_t>::iterator place = {};  // in by_use_, while it has a slot
  };
  using Index = prefix::PrefixIndex<Entry>;
  using Chain = std::span<const std::span<const int32_t>>;

  // Bytes that the index and the list need for one block, and its tokens.
  static constexpr int64_t kNodeBytes = kKvBlockTokens * int64_t{sizeof(int32_t)} + 192;

  WarmTier(const WarmCodec& codec, std::unique_ptr<SwapSpace> space, runtime::ThreadPool& threads,
           int64_t bytes, int step_blocks);
  static int64_t RootBytes(std::string_view name);
  int64_t UsedBytes() const;
  void Locate(std::string_view name, Chain chain, bool before_last);
  int32_t Reach(std::string_view name, Chain chain);
  bool IsFinite(const KvBlockView& block);
  SwapRef TakeSlot(std::string_view name, Chain chain);
  void Drop(int32_t id);
  void Prune(int32_t id);

  const WarmCodec codec_;
  const std::unique_ptr<SwapSpace> space_;
  runtime::ThreadPool& threads_;
  Index index_{kKvBlockTokens};
  std::list<int32_t> by_use_;  // blocks with slots, the least recently used first
  const int64_t bytes_;
  int64_t root_bytes_ = 0;  // of all namespaces
  const int step_blocks_;
  int left_;  // blocks that this step may keep
  // The longest known beginning of the chain of the last Put: its last block (-1: it is empty) and length.
  int32_t reached_ = -1;
  size_t reached_depth_ = 0;
  WarmTierStats stats_;
};

}  // namespace moesaic::cache
