// The architectures' files: each turns a config in config.json's terms into a DecoderSpec.
// To add one: write its function in a file of its own, declare it here and name it in registry.cc.
#pragma once

#include <nlohmann/json.hpp>
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
