#include "engine/kv_fingerprint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/sketch.h"

namespace moesaic::engine {

StatusOr<std::string> KvFingerprint(const models::ModelInfo& info, const EngineOptions& options,
                                    Executor& executor, const cache::KvStore& store, cache::BlockPool& pool) {
  ASSIGN_OR_RETURN(const cache::BlockRef block, pool.Allocate());
  std::vector<int32_t> tokens(std::min(tensor::kKvBlockTokens, info.context_length));
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(info.vocab_size));  // from all over it
  }
  StepBatch batch;
  for (int layer = 0; layer < store.layout().layers;
       ++layer) {  // parts that the model does not write are zero
    batch.ops_before.push_back({.kind = cache::KvOpKind::kClear, .block = block.index(), .layer = layer});
  }
  const std::array<int32_t, 1> table = {block.index()};
  batch.AddRows({.first_logits = static_cast<int32_t>(tokens.size())}, tokens, {}, table);
  RETURN_IF_ERROR(executor.Run(batch).status());
  return fmt::format("{};{};{};{};{};{};{};{:016x};{}", info.architecture, info.layers, info.parameters,
                     info.weight_format, info.experts_per_token,
                     options.sparsity.key_summaries ? options.sparsity.dense_layers : -1,
                     options.sparsity.key_summaries ? kernels::kKeySummaryVersion : 0,
                     store.Checksum(block.index()), options.disk->model);
}

}  // namespace moesaic::engine
