// All tiers of one engine.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/kv_store.h"
#include "cache/kv_tier.h"
#include "cache/radix_tree.h"

namespace moesaic::cache {

class DiskTier;
class SwapTier;
class WarmTier;

struct KvTierOptions {
  int64_t swap_bytes = 0;        ///< memory of the swap tier; 0 disables it
  int64_t attention_tokens = 1;  ///< position at which attention doubles the cost of a token
  int64_t warm_bytes = 0;        ///< memory of the warm tier; 0 disables it
  bool warm_exact = false;       ///< warm blocks are stored without loss
  int64_t warm_step_bytes = 0;   ///< maximum bytes of blocks that one step saves to the warm tier
};

/// Numbers of blocks that tiers keep in memory; 0: the tier is off.
struct KvTierSlots {
  int swap = 0, warm = 0;
};

/// Settings of the disk tier.
struct KvDiskOptions {
  std::string folder;       ///< created if it does not exist
  int64_t bytes = 0;        ///< maximum size of all files
  std::string fingerprint;  ///< identifies the computation of blocks: files of another one are refused
  int64_t step_bytes = 0;   ///< bytes that one step stores
};

/// Owns the tiers that the options enable. The scheduler looks prefixes up in this order: swap, warm, disk.
/// Engine thread only.
class KvTiers {
 public:
  /// Returns the slots that fit the memory of each tier. ResourceExhausted if not even one fits.
  static StatusOr<KvTierSlots> SlotsFor(const KvLayout& layout, const KvTierOptions& options);

  /// `pool` and `tree` are borrowed. `slots` are at most SlotsFor() of every rank.
  KvTiers(BlockPool& pool, const RadixTree& tree, const KvLayout& layout, const KvTierOptions& options,
          const KvTierSlots& slots);
  ~KvTiers();

  /// Adds the slots that the tiers need.
  void AddSlots(KvStoreOptions* options) const;
  /// Adds the disk tier. Its index and its files are one object, so `store` must be of this process.
  Status OpenDisk(const KvDiskOptions& options, KvStore& store);

  const std::vector<KvTier*>& all() const { return all_; }
  TierStats stats() const;

 private:
  BlockPool& pool_;
  const RadixTree& tree_;
  std::unique_ptr<SwapTier> swap_;  // or null, as the others
  std::unique_ptr<WarmTier> warm_;
  std::unique_ptr<DiskTier> disk_;
  std::vector<KvTier*> all_;
};

}  // namespace moesaic::cache
