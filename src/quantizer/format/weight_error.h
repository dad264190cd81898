// Measures the distance between a checkpoint's linears and those of its source, and the bytes that a token
// reads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "quantizer/format/model_items.h"
#include "runtime/thread_pool.h"

namespace moesaic::quantizer {

/// Returns the kind of a linear, for example "q_a_proj", "experts.down_proj" or "shared_experts.up_proj".
std::string KindOf(const std::string& module);

struct LinearError {
  std::string name, kind;
  int layer = -1;
  double error = 0, weight = 0;  // sums of squares of the difference and of the source's weights

  double relative() const;  // sqrt(error / weight)
};

/// Compares every linear that may be rounded, with both sides read by the code that loads models. The source
/// includes the folding of the quantized folder's analysis (analysis.h). `progress` is called with the
/// linears done and in all; return false to stop. A linear that one side lacks is an error.
StatusOr<std::vector<LinearError>> WeightErrors(
    const checkpoint::Checkpoint& quantized, const checkpoint::Checkpoint& source, runtime::ThreadPool& pool,
    const std::function<bool(int64_t done, int64_t total)>& progress);

/// Bytes of a checkpoint's tensors, and bytes that the forward pass of one token reads: one row of the
/// embedding, and the chosen share of the routed experts.
struct TokenBytes {
  int64_t total = 0, active = 0;
};
StatusOr<TokenBytes> BytesOf(const checkpoint::Checkpoint& source);

}  // namespace moesaic::quantizer
