// Qwen3 and Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normed heads. Layers are dense, or
// every decoder_sparse_step-th layer has experts unless mlp_only_layers lists it.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/architectures.h"
#include "models/config_fields.h"

namespace moesaic::models {
namespace {

using checkpoint::ConfigReader;

DecoderSpec ReadQwen3(const nlohmann::json& config, const std::string& file, ConfigReader& reader,
                      int64_t default_head_dim) {
  DecoderSpec spec = ReadCommon(config, reader);
  ReadGqa(reader, spec, default_head_dim);
  spec.attention.qk_norm = true;
  spec.attention.qkv_bias = spec.attention.o_bias = reader.BoolOr("attention_bias", false);
  ReadRope(reader, file, spec.attention.head_dim, spec);
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  reader.OnlyBool("use_sliding_window", false);
  reader.Ignore({"sliding_window", "max_window_layers"});  // without effect if use_sliding_window is false
  reader.Ignore({"layer_types"});  // checked here because the reader has no lists of strings
  const auto types = config.find("layer_types");
  if (types == config.end() || !types->is_array()) return spec;
  for (const nlohmann::json& type : *types) {
    if (const std::string found = type.dump(); found != "\"full_attention\"") {
      reader.Fail(fmt::format("\"layer_types\" must be \"full_attention\" everywhere, found {}", found));
    }
  }
  return spec;
}

}  // namespace

StatusOr<DecoderSpec> Qwen3Spec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadQwen3(config, file, reader, /*default_head_dim=*/128);
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

StatusOr<DecoderSpec> Qwen3MoeSpec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadQwen3(config, file, reader, /*default_head_dim=*/0);
  reader.OnlyBool("qkv_bias", false);  // fields of Qwen3-Coder's configs
  reader.OnlyBool("use_qk_norm", true);
  if (reader.IntOr("shared_expert_intermediate_size", 0, kMaxDim, 0) != 0) {
    reader.Fail("\"shared_expert_intermediate_size\" must be 0: Qwen3-MoE has no shared expert");
  }
  MoeSpec& moe = spec.moe;
  const char* experts = reader.Has("num_local_experts") ? "num_local_experts" : "num_experts";
  moe.experts = static_cast<int>(reader.Int(experts, 1, 65536));
  moe.intermediate = static_cast<int>(reader.Int("moe_intermediate_size", 1, kMaxDim));
  moe.normalize = reader.BoolOr("norm_topk_prob", false);
  ReadTopK(reader, "num_experts_per_tok", experts, moe);
  const int64_t step = reader.IntOr("decoder_sparse_step", 1, 1024, 1);
  const std::vector<int64_t> dense = reader.IntsOr("mlp_only_layers", 0, 1023, {});
  for (int i = 0; i < spec.layers; ++i) {
    spec.is_moe[i] = (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
  }
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

}  // namespace moesaic::models
