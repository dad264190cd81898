// Numbers of KV blocks, in the cache and its tiers, for which every rank of a replica has memory.
#pragma once

#include "base/status.h"
#include "cache/kv_tiers.h"
#include "comm/transport/transport.h"
#include "engine/engine.h"
#include "models/model.h"
#include "parallel/layout.h"

namespace moesaic::engine {

/// Settings from which a rank computes its capacity.
struct CapacityQuestion {
  tensor::DType dtype{};
  bool key_summaries = false;
  KeySummaryKind summary_kind{};
  int64_t kv_bytes = 0;  // 0: context x max_sequences tokens, or fewer if memory is short
  int max_sequences = 0;
  int context = 0;
  int64_t reserved_bytes = 0;  // bytes that the cache leaves free
  int64_t swap_bytes = 0, warm_bytes = 0;
  bool warm_exact = false;
};

/// Numbers of blocks that fit in the memory of a rank.
struct RankCapacity {
  int blocks = 0;
  cache::KvTierSlots slots = {};
};

/// Returns the capacity of a rank with this part of the cache. `local_ranks` ranks share its machine.
StatusOr<RankCapacity> CapacityOfRank(const models::KvSpec& kv, const CapacityQuestion& question,
                                      int local_ranks);

/// Called by the driver. Returns the minimum of each number over the ranks of `replica`, which are waiting
/// for commands. The rank with the largest part of a block, or with the least memory, determines it.
StatusOr<RankCapacity> CapacityOfReplica(const models::ModelInfo& info, const CapacityQuestion& question,
                                         const EngineOptions& options, int replica);

}  // namespace moesaic::engine
