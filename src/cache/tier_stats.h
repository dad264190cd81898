// Counters of the tiers that keep KV blocks outside the cache.
#pragma once

#include <cstdint>

namespace moesaic::cache {

/// Counters rise over the tier's life; other members are current values.
struct SwapTierStats {
  int blocks = 0, capacity_blocks = 0;
  int64_t saved_blocks = 0, restored_blocks = 0;
};

struct WarmTierStats {
  int blocks = 0, capacity_blocks = 0;
  int64_t bytes = 0;  ///< of the blocks
  int64_t stored_blocks = 0, restored_blocks = 0, evicted_blocks = 0;
  int64_t refused_blocks = 0;  ///< not finite, or without a slot that could be freed
  int64_t dropped_blocks = 0;  ///< beyond the number that one step keeps
  double store_seconds = 0, restore_seconds = 0;
};

struct DiskTierStats {
  int blocks = 0;               ///< that can be found
  int64_t capacity_blocks = 0;  ///< that the budget has room for
  int64_t bytes = 0;            ///< of the blocks
  int64_t written_blocks = 0, loaded_blocks = 0, evicted_blocks = 0;
  int64_t loads = 0, loaded_bytes = 0;  ///< completed loads, and bytes that they read
  double load_seconds = 0;
  int64_t abandoned_loads = 0;
  int64_t borrowed_blocks = 0;  ///< blocks whose layers are read when rows need them
  int64_t read_layers = 0;      ///< layers of these that were read
  int64_t refused_blocks = 0;   ///< damaged, found when the tier was opened or by a load
  int64_t refused_files = 0;    ///< of another model, or damaged
  int64_t write_errors = 0;
  int64_t lost_blocks = 0;  ///< evicted before they were stored
  bool storing = true;      ///< false after a write error; stored blocks can still be found
};

struct TierStats {
  SwapTierStats swap;
  WarmTierStats warm;
  DiskTierStats disk;
};

}  // namespace moesaic::cache
