// How large the KV cache becomes: element type, layout and bytes.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "engine/engine.h"
#include "models/model.h"
#include "tensor/kv_layout.h"

namespace moesaic::engine {

/// "auto" becomes f32 for f32 weights and bf16 for all others; else "f32", "bf16" or "int8".
StatusOr<tensor::DType> KvDType(const std::string& name, const models::ModelInfo& info);

/// `digests`: with room for those of all layers.
tensor::KvLayout LayoutFor(const models::KvSpec& kv, tensor::DType dtype, bool digests,
                           DigestKind kind = DigestKind::kBox);

/// options.kv_bytes, or what max_sequences x context needs, at most a quarter of the memory that is free now.
int64_t KvBudget(const tensor::KvLayout& layout, const EngineOptions& options, int context);

}  // namespace moesaic::engine
