// One function per architecture; each converts a config with the fields of config.json to a DecoderSpec. To
// add an architecture, write its function in its own file, declare it here and list it in registry.cc.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/status.h"
#include "models/decoder_spec.h"

namespace moesaic::models {

StatusOr<DecoderSpec> DeepseekV2Spec(const nlohmann::json& config, const std::string& file);
/// DeepSeek-V3 and R1, Moonlight, and Kimi-K2, whose config says model_type "kimi_k2".
StatusOr<DecoderSpec> DeepseekV3Spec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> PanguUltraMoeSpec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> Qwen3Spec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> Qwen3MoeSpec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> Glm4MoeSpec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> LlamaSpec(const nlohmann::json& config, const std::string& file);
StatusOr<DecoderSpec> MistralSpec(const nlohmann::json& config, const std::string& file);

}  // namespace moesaic::models
