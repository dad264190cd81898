// How far a checkpoint's linears are from those of the one it was made from, and what a token reads of it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "quantizer/format/model_items.h"
#include "runtime/thread_pool.h"

namespace moesaic::quantizer {

/// "q_a_proj", "experts.down_proj", "shared_experts.up_proj": linears of a kind end alike.
std::string KindOf(const std::string& module);

struct LinearError {
  std::string name, kind;
  int layer = -1;
  double error = 0, weight = 0;  // sums of squares: of the difference, and of the source's weights

  double relative() const;  // sqrt(error / weight)
};

/// Every linear that may be rounded, both read by the code that loads models; the source's with what the
/// quantized folder's analysis folds into it (analysis.h). `progress` is called with
/// linears done and in all; return false to stop. A linear that one of them lacks is an error.
StatusOr<std::vector<LinearError>> WeightErrors(
    const checkpoint::Checkpoint& quantized, const checkpoint::Checkpoint& source, runtime::ThreadPool& pool,
    const std::function<bool(int64_t done, int64_t total)>& progress);

/// Bytes of a checkpoint's tensors, and those that one token's forward pass reads: one row of the embedding,
/// and of routed experts the share that the router chooses.
struct TokenBytes {
  int64_t total = 0, active = 0;
};
StatusOr<TokenBytes> BytesOf(const checkpoint::Checkpoint& source);

}  // namespace moesaic::quantizer
