// Predicts whether other programs load the checkpoints that moesaic quantize writes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

/// vLLM's answer to one entry of "config_groups": "yes" with conditions, or "no" with the reason. "not
/// judged" and "not known" promise nothing.
struct LoaderVerdict {
  std::string group;    // "group_0"
  std::string scheme;   // "int8 by channel, int8 activations by token"
  std::string dense;    // for linears outside of experts
  std::string experts;  // for the fused linears of routed experts
};

/// Judges by the rules of vllm/model_executor/layers/quantization/compressed_tensors of vLLM 0.33 on one GPU.
/// Tensor parallelism has stricter rules for widths. Layers of multi-token prediction count. `config` is the
/// whole config.json; `file` is its name in errors. Fails unless it is quantized by compressed-tensors. For
/// an architecture that Moesaic does not run, only the schemes are judged and the linears are "not judged".
StatusOr<std::vector<LoaderVerdict>> JudgeVllm(const nlohmann::json& config, const std::string& file);

}  // namespace moesaic::quantizer
