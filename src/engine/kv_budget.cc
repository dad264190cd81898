#include "engine/kv_budget.h"

#include <algorithm>

#include "runtime/topology.h"

namespace moesaic::engine {

StatusOr<tensor::DType> KvDType(const std::string& name, const models::ModelInfo& info) {
  if (name == "f32") return tensor::DType::kF32;
  if (name == "bf16") return tensor::DType::kBF16;
  if (name == "int8") return tensor::DType::kI8;
  if (name == "auto") return info.weight_format == "f32" ? tensor::DType::kF32 : tensor::DType::kBF16;
  return InvalidArgument("the KV cache's type must be auto, f32, bf16 or int8, found \"{}\"", name);
}

tensor::KvLayout LayoutFor(const models::KvSpec& kv, tensor::DType dtype, bool key_summaries,
                           KeySummaryKind kind) {
  return {.layers = kv.layers,
          .heads = kv.heads,
          .key_dim = kv.key_dim,
          .value_dim = kv.value_dim,
          .shared = kv.shared,
          .dtype = dtype,
          .summary_bytes = key_summaries ? KeySummaryBytesOf(kv, kind) : 0,
          .sketches = key_summaries && kind == KeySummaryKind::kSketch};
}

int64_t KvBudget(const tensor::KvLayout& layout, const EngineOptions& options, int context) {
  if (options.kv_bytes > 0) return options.kv_bytes;
  const int64_t wanted = layout.total_bytes() * tensor::KvBlocksFor(context) * options.max_sequences;
  const int64_t available = runtime::AvailableMemory();
  return available > 0 ? std::min(wanted, available / 4 / options.local_ranks) : wanted;
}

}  // namespace moesaic::engine
