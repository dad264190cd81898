#include "engine/kv_budget.h"

#include <algorithm>

#include "base/round.h"
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

int64_t MoveBytes(const models::ModelInfo& info, const EngineOptions& options) {
  if (info.experts == 0) return 0;
  constexpr int64_t kSpilled = int64_t{parallel::kSpillBuffers} * parallel::kSpillSlots;
  const int64_t spilled = options.layout.batch_split().spills() ? kSpilled * info.expert_bytes : 0;
  if (!options.layout.experts_move()) return spilled;
  const parallel::Degrees& degrees = options.layout.degrees();
  const int ranks = degrees.tensor * degrees.data;
  const int64_t slots = base::CeilDiv(info.experts + options.balance.redundant, ranks);
  const int64_t layers = base::CeilDiv(info.moe_layers, degrees.pipeline);
  const bool returns_memory = info.weights_from == models::WeightSource::kPacked;
  const int64_t kept = returns_memory ? slots - info.experts / ranks : slots;  // per layer that has moved
  return (slots + layers * kept) * info.expert_bytes + spilled;
}

int64_t KvBudget(const tensor::KvLayout& layout, const EngineOptions& options, int context,
                 int64_t reserved_bytes) {
  if (options.kv_bytes > 0) return options.kv_bytes;
  const int64_t wanted = layout.total_bytes() * tensor::KvBlocksFor(context) * options.max_sequences;
  const int64_t available = runtime::AvailableMemory();
  if (available <= 0) return wanted;
  const int64_t own = available / options.local_ranks - reserved_bytes;
  return std::clamp<int64_t>(own / 4, 0, wanted);
}

}  // namespace moesaic::engine
