// DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 and R1 (arXiv 2412.19437), Moonlight and Kimi-K2 (arXiv
// 2507.20534): multi-head latent attention, some dense layers, then shared and fine-grained routed experts.
#include <cmath>

#include "models/architectures.h"
#include "models/config_fields.h"

namespace moesaic::models {
namespace {

using checkpoint::ConfigReader;
using kernels::RouteParams;

void ReadMla(ConfigReader& reader, const std::string& file, DecoderSpec& spec) {
  AttentionSpec& attention = spec.attention;
  attention.kind = AttentionSpec::Kind::kMla;
  attention.heads = static_cast<int>(reader.Int("num_attention_heads", 1, kMaxHeads));
  const int64_t kv_heads = reader.IntOr("num_key_value_heads", 1, kMaxHeads, attention.heads);
  if (kv_heads != attention.heads) {
    reader.Fail(fmt::format(
        "\"num_key_value_heads\" is {} but \"num_attention_heads\" is {}: MLA requires equal numbers",
        kv_heads, attention.heads));
  }
  attention.q_lora_rank = static_cast<int>(reader.IntOr("q_lora_rank", 1, kMaxDim, 0));
  attention.kv_lora_rank = static_cast<int>(reader.Int("kv_lora_rank", 1, kMaxHeadDim));
  attention.nope_dim = static_cast<int>(reader.Int("qk_nope_head_dim", 1, kMaxHeadDim));
  attention.rope_dim = static_cast<int>(reader.Int("qk_rope_head_dim", 1, kMaxHeadDim));
  attention.v_dim = static_cast<int>(reader.Int("v_head_dim", 1, kMaxHeadDim));
  CheckMlaDims(reader, "qk_nope_head_dim", "qk_rope_head_dim", attention);
  reader.OnlyBool("attention_bias", false);
  reader.Ignore({"head_dim", "qk_head_dim"});  // written by transformers; implied by the fields above
  const double all_dim_scale = ReadRope(reader, file, attention.rope_dim, spec);
  const double base = 1.0 / std::sqrt(attention.nope_dim + attention.rope_dim);
  attention.scale = static_cast<float>(base * all_dim_scale * all_dim_scale);
  // The releases' code uses the default epsilon for the norms inside MLA, regardless of rms_norm_eps.
  attention.latent_norm_eps = 1e-6F;
}

void ReadExperts(ConfigReader& reader, double default_scale, DecoderSpec& spec) {
  MoeSpec& moe = spec.moe;
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  moe.experts = static_cast<int>(reader.IntOr("n_routed_experts", 1, 65536, 0));
  const auto first_dense = static_cast<int>(reader.IntOr("first_k_dense_replace", 0, 1024, 0));
  if (moe.experts == 0) {
    reader.Fail("\"n_routed_experts\" is missing");
    return;
  }
  moe.intermediate = static_cast<int>(reader.Int("moe_intermediate_size", 1, kMaxDim));
  const int64_t shared = reader.IntOr("n_shared_experts", 0, 64, 0);
  moe.shared_intermediate = static_cast<int>(shared * moe.intermediate);
  moe.scale = static_cast<float>(reader.NumberOr("routed_scaling_factor", 0, 1e6, default_scale));
  if (reader.IntOr("moe_layer_freq", 1, 1024, 1) != 1) reader.Fail("\"moe_layer_freq\" must be 1");
  FirstLayersDense(first_dense, spec);
}

}  // namespace

StatusOr<DecoderSpec> DeepseekV2Spec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadMla(reader, file, spec);
  spec.rope.interleaved = true;
  reader.OnlyBool("mlp_bias", false);  // written by transformers
  ReadExperts(reader, /*default_scale=*/1, spec);
  MoeSpec& moe = spec.moe;
  moe.scoring = RouteParams::Scoring::kSoftmax;
  moe.group_score = RouteParams::GroupScore::kMax;
  reader.OnlyString("scoring_func", {"softmax"});
  // The releases' code and transformers implement `true` differently; no release uses it.
  reader.OnlyBool("norm_topk_prob", false);
  reader.OnlyString("topk_method", {"greedy", "group_limited_greedy"});
  if (reader.StringOr("topk_method", "greedy") == "group_limited_greedy") {
    ReadGroups(reader, "n_routed_experts", moe);
  } else {
    reader.Ignore({"n_group", "topk_group"});
  }
  ReadTopK(reader, "num_experts_per_tok", "n_routed_experts", moe);
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

StatusOr<DecoderSpec> DeepseekV3Spec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadMla(reader, file, spec);
  spec.rope.interleaved = reader.BoolOr("rope_interleave", true);
  ReadExperts(reader, /*default_scale=*/2.5, spec);  // defaults here are those of the release's config class
  MoeSpec& moe = spec.moe;
  moe.scoring = RouteParams::Scoring::kSigmoid;
  moe.group_score = RouteParams::GroupScore::kTopTwoSum;
  moe.choice_bias = true;
  moe.normalize = reader.BoolOr("norm_topk_prob", true);
  reader.OnlyString("scoring_func", {"sigmoid"});
  reader.OnlyString("topk_method", {"noaux_tc"});
  ReadGroups(reader, "n_routed_experts", moe, /*default_groups=*/8, /*default_top_groups=*/4);
  ReadTopK(reader, "num_experts_per_tok", "n_routed_experts", moe);
  spec.mtp_layers = static_cast<int>(reader.IntOr("num_nextn_predict_layers", 0, 64, 0));
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

}  // namespace moesaic::models
