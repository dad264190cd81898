#include "cache/kv_tiers.h"

#include <utility>

#include "cache/disk_tier.h"
#include "cache/swap_tier.h"
#include "cache/warm_tier.h"

namespace moesaic::cache {

KvTiers::KvTiers(BlockPool& pool, const RadixTree& tree) : pool_(pool), tree_(tree) {}
KvTiers::~KvTiers() = default;

StatusOr<std::unique_ptr<KvTiers>> KvTiers::Create(BlockPool& pool, const RadixTree& tree,
                                                   const KvLayout& layout, const KvTierOptions& options) {
  std::unique_ptr<KvTiers> tiers(new KvTiers(pool, tree));
  if (options.swap_bytes > 0) {
    ASSIGN_OR_RETURN(tiers->swap_,
                     SwapTier::Create(pool, layout, options.swap_bytes, options.attention_tokens));
    tiers->all_.push_back(tiers->swap_.get());
  }
  if (options.warm_bytes > 0) {
    ASSIGN_OR_RETURN(tiers->warm_, WarmTier::Create(pool, &tree, layout,
                                                    {.bytes = options.warm_bytes,
                                                     .exact = options.warm_exact,
                                                     .step_bytes = options.warm_step_bytes}));
    tiers->all_.push_back(tiers->warm_.get());
  }
  return tiers;
}

void KvTiers::AddSlots(KvStoreOptions* options) const {
  if (swap_ != nullptr) options->swap_slots = swap_->slots();
  if (warm_ == nullptr) return;
  options->warm_slots = warm_->slots();
  options->warm_exact = warm_->exact();
}

Status KvTiers::OpenDisk(const KvDiskOptions& options, KvStore& store) {
  ASSIGN_OR_RETURN(std::unique_ptr<DiskStore> disk, DiskStore::Open({.folder = options.folder,
                                                                     .bytes = options.bytes,
                                                                     .layout = store.layout(),
                                                                     .fingerprint = options.fingerprint}));
  store.SetDisk(disk.get());
  // A block in the swap area must be whole, so the disk tier attaches no blocks if swap is enabled.
  disk_ = std::make_unique<DiskTier>(
      pool_, tree_, std::move(disk), store.layout(),
      DiskTierOptions{.step_bytes = options.step_bytes, .attaches = swap_ == nullptr});
  all_.push_back(disk_.get());
  return OkStatus();
}

TierStats KvTiers::stats() const {
  TierStats stats;
  for (const KvTier* tier : all_) tier->AddStats(&stats);
  return stats;
}

}  // namespace moesaic::cache
