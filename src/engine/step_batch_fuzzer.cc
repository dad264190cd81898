// Feeds bytes to the parser of step batches. Serialize must give the same bytes for accepted batches, and the
// check of their numbers must not read out of range.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "engine/step_batch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::engine;
  const auto batch = ParseStepBatch(std::as_bytes(std::span(data, size)));
  if (!batch.ok()) return 0;
  const std::string bytes = Serialize(*batch);
  if (bytes.size() != size || std::memcmp(bytes.data(), data, size) != 0) std::abort();
  const StepLimits limits = {
      .blocks = 16, .swap_slots = 4, .warm_slots = 4, .layers = 2, .vocab_size = 100, .hidden_size = 2};
  if (!CheckBatch(*batch, limits).ok()) return 0;
  int64_t sum = 0;
  for (const BatchRows& rows : batch->rows) {
    for (int i = 0; i < rows.count; ++i) sum += batch->tokens[rows.first_token + i];
    for (int i = 0; i < rows.blocks; ++i) sum += batch->block_tables[rows.first_block + i];
    if (rows.sparsity >= 0) sum += batch->sparsity[rows.sparsity].reuse;
  }
  return sum < 0 ? 1 : 0;
}
