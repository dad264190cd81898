// Parameters that distinguish one decoder-only architecture from another. An architecture's file
// (deepseek.cc, qwen3.cc, ...) fills the spec from a config and rejects unsupported settings.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/route.h"
#include "layers/rope_table.h"

namespace moesaic::models {

struct AttentionSpec {
  enum class Kind { kGqa, kMla };
  Kind kind = Kind::kGqa;
  int heads = 0;
  int kv_heads = 0;  // GQA
  int head_dim = 0;  // GQA
  bool qkv_bias = false, o_bias = false;
  bool qk_norm = false;  // RMSNorm of every head's q and k before rope (Qwen3)
  int q_lora_rank = 0;   // MLA; 0: q_proj instead of q_a/q_b
  int kv_lora_rank = 0;
  int nope_dim = 0, rope_dim = 0, v_dim = 0;
  float latent_norm_eps = 0;  // of q_a_layernorm and kv_a_layernorm
  float scale = 0;            // softmax scale, including YaRN's mscale
};

struct MoeSpec {
  int experts = 0, top_k = 0;
  int intermediate = 0;         // width of one routed expert
  int shared_intermediate = 0;  // width of all shared experts together; 0: none
  kernels::RouteParams::Scoring scoring = kernels::RouteParams::Scoring::kSoftmax;
  kernels::RouteParams::GroupScore group_score = kernels::RouteParams::GroupScore::kMax;
  int groups = 1, top_groups = 1;
  bool normalize = false;
  float scale = 1;
  bool choice_bias = false;  // mlp.gate.e_score_correction_bias
};

struct DecoderSpec {
  std::string architecture, model_type;
  int vocab = 0, hidden = 0, layers = 0, context = 0;
  float norm_eps = 0;
  bool tied = false;
  bool sandwich_norm = false;  // openPangu: norms also after attention and after the FFN
  layers::RopeSpec rope;
  AttentionSpec attention;
  MoeSpec moe;           // experts == 0: none
  int intermediate = 0;  // width of dense layers
  bool mlp_bias = false;
  std::vector<bool> is_moe;  // [layers]; MTP layers are MoE if the last layer is
  int mtp_layers = 0;
};

/// Builds the spec from a config with the fields of config.json. Errors name unknown architectures and
/// unsupported fields. `file` prefixes every message.
StatusOr<DecoderSpec> SpecFromConfig(const nlohmann::json& config, const std::string& file);

/// Replaces the config's number of routed experts per token by top_k; 0 keeps it.
Status OverrideTopK(DecoderSpec& spec, int top_k);

/// Returns all supported architectures, for help texts and for errors.
std::vector<std::string> SupportedArchitectures();

}  // namespace moesaic::models
