// Which of the checkpoints that moesaic quantize writes other programs take, before hours go into one.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

/// What vLLM says to one entry of "config_groups": "yes", with conditions, "no" and why, or "not judged" or
/// "not known", which promise nothing.
struct LoaderVerdict {
  std::string group;    // "group_0"
  std::string scheme;   // "int8 by channel, int8 activations by token"
  std::string dense;    // for linears outside of experts
  std::string experts;  // for the fused linears of routed experts
};

/// By the rules of vllm/model_executor/layers/quantization/compressed_tensors of vLLM 0.33, on one GPU:
/// tensor parallel ones ask more of widths. Multi-token prediction's layers count. `config` is the whole
/// config.json. One that is not quantized, or not by compressed-tensors, is refused; of an architecture that
/// Moesaic does not run only the schemes are judged, and what vLLM would take of them is "not judged".
StatusOr<std::vector<LoaderVerdict>> JudgeVllm(const nlohmann::json& config, const std::string& file);

}  // namespace moesaic::quantizer
