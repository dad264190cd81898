// Llama (arXiv 2302.13971, 2407.21783), SmolLM2 and Mistral (arXiv 2310.06825): grouped-query attention and
// dense SwiGLU layers.
#include <nlohmann/json.hpp>

#include "models/architectures.h"
#include "models/config_fields.h"

namespace moesaic::models {

using checkpoint::ConfigReader;

StatusOr<DecoderSpec> LlamaSpec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadGqa(reader, spec, /*default_head_dim=*/0);
  spec.attention.qkv_bias = spec.attention.o_bias = reader.BoolOr("attention_bias", false);
  spec.mlp_bias = reader.BoolOr("mlp_bias", false);
  ReadRope(reader, file, spec.attention.head_dim, spec);
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  reader.OnlyBool("rope_interleaved", false);  // present in SmolLM2's configs
  reader.Ignore({"is_llama_config"});
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

StatusOr<DecoderSpec> MistralSpec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadGqa(reader, spec, /*default_head_dim=*/0);
  ReadRope(reader, file, spec.attention.head_dim, spec);
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  constexpr int kDefaultWindow = 4096;  // of transformers, if the field is missing
  if (reader.Has("sliding_window") || (!config.contains("sliding_window") && spec.context > kDefaultWindow)) {
    reader.Fail("\"sliding_window\" must be null: attention is full");
  }
  reader.Ignore({"sliding_window"});
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

}  // namespace moesaic::models
