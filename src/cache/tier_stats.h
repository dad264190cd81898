// Counters of the tiers that keep KV blocks outside the cache.
#pragma once

#include <cstdint>

namespace moesaic::cache {

/// Counts and times are totals since the tier was opened. `blocks`, `bytes` and capacities are current
/// values.
struct SwapTierStats {
  int blocks = 0, capacity_blocks = 0;
  int64_t saved_blocks = 0, restored_blocks = 0;
};

struct WarmTierStats {
  int blocks = 0, capacity_blocks = 0;
  int64_t bytes = 0;  ///< memory of the blocks
  int64_t stored_blocks = 0, restored_blocks = 0, evicted_blocks = 0;
  int64_t refused_blocks = 0;  ///< blocks that were not finite, or for which no slot could be freed
  int64_t dropped_blocks = 0;  ///< evicted blocks that exceeded the limit of blocks stored in one step
  double store_seconds = 0, restore_seconds = 0;
};

struct DiskTierStats {
  int blocks = 0;               ///< blocks that can be found
  int64_t capacity_blocks = 0;  ///< blocks that fit the budget
  int64_t bytes = 0;            ///< bytes of the blocks in files
  int64_t written_blocks = 0, loaded_blocks = 0, evicted_blocks = 0;
  int64_t loads = 0, loaded_bytes = 0;  ///< completed loads, and bytes that they read
  double load_seconds = 0;
  int64_t abandoned_loads = 0;  ///< loads that were cancelled
  int64_t borrowed_blocks = 0;  ///< blocks that were attached without a load: rows read their layers later
  int64_t read_layers = 0;      ///< layers of attached blocks that were read
  int64_t refused_blocks = 0;   ///< damaged blocks, found when the tier was opened or by a load
  int64_t refused_files = 0;    ///< files of another model, or damaged ones
  int64_t write_errors = 0;
  int64_t lost_blocks = 0;  ///< blocks that were evicted from the tree before they were stored
  bool storing = true;      ///< false after a write error; stored blocks can still be found
};

struct TierStats {
  SwapTierStats swap;
  WarmTierStats warm;
  DiskTierStats disk;
};

}  // namespace moesaic::cache
