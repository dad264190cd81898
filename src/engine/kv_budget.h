// Element type, layout and size of the KV cache.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "engine/engine.h"
#include "models/model.h"
#include "tensor/kv_layout.h"

namespace moesaic::engine {

/// Resolves "auto" (f32 for f32 weights, bf16 for others), or parses "f32", "bf16" or "int8".
StatusOr<tensor::DType> KvDType(const std::string& name, const models::ModelInfo& info);

/// The layout of blocks; with room for key summaries of all layers if `key_summaries`.
tensor::KvLayout LayoutFor(const models::KvSpec& kv, tensor::DType dtype, bool key_summaries,
                           KeySummaryKind kind = KeySummaryKind::kBox);

/// Returns the bytes of a rank's memory that moves of experts take in addition to the loaded weights: the
/// second buffer of one layer, the replicas of experts that plans may add, and copies of layers whose own
/// memory is not returned to the system, because it is mapped from a file. 0: experts stay.
int64_t MoveBytes(const models::ModelInfo& info, const EngineOptions& options);

/// options.kv_bytes, or enough for max_sequences x context, at most a quarter of the free memory, which
/// local_ranks ranks share, without `reserved_bytes` of each (MoveBytes).
int64_t KvBudget(const tensor::KvLayout& layout, const EngineOptions& options, int context,
                 int64_t reserved_bytes);

}  // namespace moesaic::engine
