// Number of KV cache blocks for which every rank of a replica has memory.
#pragma once

#include "base/status.h"
#include "comm/transport/transport.h"
#include "engine/engine.h"
#include "models/model.h"
#include "parallel/layout.h"

namespace moesaic::engine {

/// Settings from which a rank computes the number of blocks for which it has memory.
struct CapacityQuestion {
  tensor::DType dtype{};
  bool key_summaries = false;
  KeySummaryKind summary_kind{};
  int64_t kv_bytes = 0;  // 0: context x max_sequences tokens, or fewer if memory is short
  int max_sequences = 0;
  int context = 0;
  int64_t reserved_bytes = 0;  // bytes that the cache leaves free
};

/// Returns the number of blocks that fit on a rank with this part of the cache. `local_ranks` ranks share its
/// machine.
StatusOr<int> BlocksOfRank(const models::KvSpec& kv, const CapacityQuestion& question, int local_ranks);

/// Called by the driver. Returns the minimum number of blocks over the ranks of `replica`, which are waiting
/// for commands. The rank with the largest part of a block, or with the least memory, determines it.
StatusOr<int> BlocksOfReplica(const models::ModelInfo& info, const CapacityQuestion& question,
                              const EngineOptions& options, int replica);

}  // namespace moesaic::engine
