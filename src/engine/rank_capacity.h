// Blocks of the KV cache for which every rank of a replica has memory.
#pragma once

#include "base/status.h"
#include "comm/transport/transport.h"
#include "engine/engine.h"
#include "models/model.h"
#include "parallel/layout.h"

namespace moesaic::engine {

/// Settings from which a rank computes the blocks that it has memory for.
struct CapacityQuestion {
  tensor::DType dtype{};
  bool key_summaries = false;
  KeySummaryKind summary_kind{};
  int64_t kv_bytes = 0;  // 0: enough for context x max_sequences, as far as there is memory
  int max_sequences = 0;
  int context = 0;
  int64_t reserved_bytes = 0;  // that the cache leaves free
};

/// The blocks that fit a rank with this part of the cache. Its machine has `local_ranks` ranks.
StatusOr<int> BlocksOfRank(const models::KvSpec& kv, const CapacityQuestion& question, int local_ranks);

/// Of the driver: the least number of blocks over the ranks of `replica`, which wait for commands. It is that
/// of the rank with the largest part of a block, or the least memory.
StatusOr<int> BlocksOfReplica(const models::ModelInfo& info, const CapacityQuestion& question,
                              const EngineOptions& options, int replica);

}  // namespace moesaic::engine
