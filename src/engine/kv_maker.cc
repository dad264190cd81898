#include "engine/kv_maker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "cache/kv_segment.h"
#include "kernels/sketch.h"

namespace moesaic::engine {

StatusOr<std::string> MakerOf(const models::ModelInfo& info, const EngineOptions& options, Executor& executor,
                              cache::KvPool& blocks) {
  ASSIGN_OR_RETURN(const cache::BlockRef block, blocks.Allocate());
  const tensor::KvLayout& layout = blocks.layout();
  std::vector<std::byte> bytes(static_cast<size_t>(layout.total_bytes()));
  const tensor::KvBlockView here = layout.Flat(bytes.data()), there = blocks.ViewOf(block.index());
  layout.Copy(here, there);  // what the model does not write is to be the same each time
  std::vector<int32_t> tokens(std::min(tensor::kKvBlockTokens, info.context_length));
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(info.vocab_size));  // from all over it
  }
  const std::array<int32_t, 1> table = {block.index()};
  const ExecutorRows rows = {
      .tokens = tokens, .block_table = table, .first_logits = static_cast<int>(tokens.size())};
  RETURN_IF_ERROR(executor.Run({&rows, 1}, /*want_hidden=*/false).status());
  layout.Copy(there, here);
  return fmt::format(
      "{};{};{};{};{};{};{};{:016x};{}", info.architecture, info.layers, info.parameters, info.weight_format,
      info.experts_per_token, options.sparsity.digests ? options.sparsity.dense_layers : -1,
      options.sparsity.digests ? kernels::kDigestVersion : 0, cache::ChecksumOf(bytes), options.disk->model);
}

}  // namespace moesaic::engine
