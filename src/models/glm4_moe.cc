// GLM-4.5 and GLM-4.6 (arXiv 2508.06471): grouped-query attention with partly rotated heads, and
// DeepSeek-V3's router and shared expert. `moesaic carve` also writes this architecture for converted dense
// models.
#include "models/architectures.h"
#include "models/config_fields.h"

namespace moesaic::models {
namespace {

using checkpoint::ConfigReader;
using kernels::RouteParams;

void ReadGlmExperts(ConfigReader& reader, DecoderSpec& spec) {
  MoeSpec& moe = spec.moe;
  moe.experts = static_cast<int>(reader.Int("n_routed_experts", 1, 65536));
  moe.intermediate = static_cast<int>(reader.Int("moe_intermediate_size", 1, kMaxDim));
  moe.shared_intermediate = static_cast<int>(reader.IntOr("n_shared_experts", 0, 64, 1) * moe.intermediate);
  moe.scoring = RouteParams::Scoring::kSigmoid;
  moe.group_score = RouteParams::GroupScore::kTopTwoSum;
  moe.choice_bias = true;
  moe.normalize = reader.BoolOr("norm_topk_prob", true);
  moe.scale = static_cast<float>(reader.NumberOr("routed_scaling_factor", 0, 1e6, 1));
  ReadGroups(reader, "n_routed_experts", moe);
  ReadTopK(reader, "num_experts_per_tok", "n_routed_experts", moe);
}

}  // namespace

StatusOr<DecoderSpec> Glm4MoeSpec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadGqa(reader, spec, /*default_head_dim=*/0);
  spec.attention.qkv_bias = reader.BoolOr("attention_bias", false);  // biases of q, k and v only
  spec.attention.qk_norm = reader.BoolOr("use_qk_norm", false);
  ReadRope(reader, file, spec.attention.head_dim, spec, /*default_share=*/0.5);
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  ReadGlmExperts(reader, spec);
  FirstLayersDense(static_cast<int>(reader.IntOr("first_k_dense_replace", 0, 1024, 1)), spec);
  spec.mtp_layers = static_cast<int>(reader.IntOr("num_nextn_predict_layers", 0, 64, 0));
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

}  // namespace moesaic::models
