#include "cache/kv_tiers.h"

#include <utility>

#include "cache/disk_tier.h"
#include "cache/swap_tier.h"
#include "cache/warm_tier.h"

namespace moesaic::cache {

namespace {

WarmTierOptions WarmOptionsOf(const KvTierOptions& options) {
  return {.bytes = options.warm_bytes, .exact = options.warm_exact, .step_bytes = options.warm_step_bytes};
}

}  // namespace

StatusOr<KvTierSlots> KvTiers::SlotsFor(const KvLayout& layout, const KvTierOptions& options) {
  KvTierSlots slots;
  if (options.swap_bytes > 0) {
    ASSIGN_OR_RETURN(slots.swap, SwapTier::SlotsFor(layout, options.swap_bytes));
  }
  if (options.warm_bytes > 0) {
    ASSIGN_OR_RETURN(slots.warm, WarmTier::SlotsFor(layout, WarmOptionsOf(options)));
  }
  return slots;
}

KvTiers::KvTiers(BlockPool& pool, const RadixTree& tree, const KvLayout& layout, const KvTierOptions& options,
                 const KvTierSlots& slots)
    : pool_(pool), tree_(tree) {
  if (slots.swap > 0) {
    swap_ = std::make_unique<SwapTier>(pool, layout, slots.swap, options.attention_tokens);
    all_.push_back(swap_.get());
  }
  if (slots.warm > 0) {
    warm_ = std::make_unique<WarmTier>(pool, &tree, layout, WarmOptionsOf(options), slots.warm);
    all_.push_back(warm_.get());
  }
}
KvTiers::~KvTiers() = default;

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
