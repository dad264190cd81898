// Blocks of the pool of which only digests are in memory: their layers are read from disk when rows choose
// them. docs/contracts/kv-tiers.md is the law.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/disk_tier.h"
#include "cache/kv_pool.h"
#include "kernels/block_sparsity.h"

namespace moesaic::engine {

/// Engine thread only.
class LazyBlocks : public kernels::ColdSource {
 public:
  /// Both are borrowed; `tier` must outlive this. The first `layers` of the pool's are read, those of the
  /// decoder: MTP layers stay as they are, rows that nobody has computed.
  LazyBlocks(const cache::KvPool& pool, cache::DiskTier& tier, int layers)
      : pool_(pool), tier_(tier), layers_(layers) {}
  ~LazyBlocks() override;

  /// Puts the digests of `disk`, which is borrowed from the tier and returned by this, beside block `index`
  /// of the pool.
  void Add(int32_t index, cache::DiskBlock& disk);
  /// Whether some of these layers of the block is not in memory.
  bool Has(int32_t index) const { return absent_.contains(index); }
  /// The block is about to hold something else.
  void Forget(int32_t index);

  /// Reads layers that are missing, and waits. Where one is damaged nobody may use what the step computes.
  void Need(const kernels::KvLayer& cache, std::span<const kernels::SequenceSlice> slices) override;
  /// A block that could not be read since the last call.
  std::optional<int32_t> TakeFailure();

 private:
  struct Absent {
    cache::DiskBlock* disk;
    std::vector<bool> missing;  // [layers]
    int left;                   // of them
  };
  const cache::KvPool& pool_;
  cache::DiskTier& tier_;
  const int layers_;
  absl::flat_hash_map<int32_t, Absent> absent_;
  std::optional<int32_t> failed_;
};

}  // namespace moesaic::engine
