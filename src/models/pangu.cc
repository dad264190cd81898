// openPangu-Ultra-MoE 718B (arXiv 2505.04519): DeepSeek-V3's attention and experts with sandwich norm, plain
// rotary embedding and a router without groups or correction bias. V1.0's config has its own field names,
// V1.1's has DeepSeek's; each field is read under the name that is present.
#include <cmath>

#include "models/architectures.h"
#include "models/config_fields.h"

namespace moesaic::models {
namespace {

using checkpoint::ConfigReader;
using kernels::RouteParams;

// Returns the field name that this config uses: openPangu's own if present, otherwise DeepSeek's.
const char* NameOf(const ConfigReader& reader, const char* pangu, const char* deepseek) {
  return reader.Has(pangu) ? pangu : deepseek;
}

void ReadAttention(ConfigReader& reader, const std::string& file, DecoderSpec& spec) {
  AttentionSpec& attention = spec.attention;
  attention.kind = AttentionSpec::Kind::kMla;
  attention.heads = static_cast<int>(reader.Int("num_attention_heads", 1, kMaxHeads));
  const char* nope = NameOf(reader, "attention_qk_dim", "qk_nope_head_dim");
  const char* rope = NameOf(reader, "attention_qk_rope_dim", "qk_rope_head_dim");
  attention.q_lora_rank =
      static_cast<int>(reader.IntOr(NameOf(reader, "attention_q_lora_dim", "q_lora_rank"), 1, kMaxDim, 0));
  attention.kv_lora_rank =
      static_cast<int>(reader.Int(NameOf(reader, "attention_kv_lora_dim", "kv_lora_rank"), 1, kMaxHeadDim));
  attention.nope_dim = static_cast<int>(reader.Int(nope, 1, kMaxHeadDim));
  attention.rope_dim = static_cast<int>(reader.Int(rope, 1, kMaxHeadDim));
  attention.v_dim =
      static_cast<int>(reader.Int(NameOf(reader, "attention_v_dim", "v_head_dim"), 1, kMaxHeadDim));
  CheckMlaDims(reader, nope, rope, attention);
  reader.OnlyBool("attention_bias", false);
  reader.Ignore({"num_key_value_heads", "head_dim", "qk_head_dim"});
  if (reader.Has("rope_scaling")) reader.Fail("\"rope_scaling\" must be absent or null");
  ReadRope(reader, file, attention.rope_dim, spec);
  spec.rope.interleaved = true;
  attention.scale = static_cast<float>(1.0 / std::sqrt(attention.nope_dim + attention.rope_dim));
  attention.latent_norm_eps = 1e-6F;  // the published code's default, regardless of rms_norm_eps
}

}  // namespace

StatusOr<DecoderSpec> PanguUltraMoeSpec(const nlohmann::json& config, const std::string& file) {
  ConfigReader reader(config, file);
  DecoderSpec spec = ReadCommon(config, reader);
  ReadAttention(reader, file, spec);
  spec.sandwich_norm = reader.BoolOr("sandwich_norm", false);
  spec.intermediate = static_cast<int>(reader.Int("intermediate_size", 1, kMaxDim));
  MoeSpec& moe = spec.moe;
  const char* experts = NameOf(reader, "num_routed_experts", "n_routed_experts");
  moe.experts = static_cast<int>(reader.Int(experts, 1, 65536));
  moe.intermediate = static_cast<int>(reader.Int("moe_intermediate_size", 1, kMaxDim));
  const int64_t shared = reader.IntOr(NameOf(reader, "num_shared_experts", "n_shared_experts"), 0, 64, 0);
  moe.shared_intermediate = static_cast<int>(shared * moe.intermediate);
  moe.scoring = RouteParams::Scoring::kSigmoid;
  moe.normalize = reader.BoolOr("norm_topk_prob", true);
  moe.scale = static_cast<float>(reader.NumberOr("routed_scaling_factor", 0, 1e6, 1));
  ReadTopK(reader, "num_experts_per_tok", experts, moe);
  const char* dense = NameOf(reader, "num_dense_layers", "first_k_dense_replace");
  FirstLayersDense(static_cast<int>(reader.IntOr(dense, 0, 1024, 0)), spec);
  const char* mtp = NameOf(reader, "num_mtp_layers", "num_nextn_predict_layers");
  spec.mtp_layers = static_cast<int>(reader.IntOr(mtp, 0, 64, 0));
  RETURN_IF_ERROR(reader.Finish());
  return spec;
}

}  // namespace moesaic::models
