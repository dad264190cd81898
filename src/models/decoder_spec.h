// Everything that distinguishes one decoder-only architecture from another, in numbers and switches. An
// architecture's file (deepseek.cc, qwen3.cc, ...) fills it from a config and refuses what it does not know.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
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
  float scale = 0;            // softmax scale, YaRN's mscale included
};

struct MoeSpec {
  int experts = 0, top_k = 0;
  int intermediate = 0;         // of one routed expert
  int shared_intermediate = 0;  // of all shared experts together; 0: none
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
  bool sandwich_norm = false;  // openPangu: norms after attention and after the FFN as well
  layers::RopeSpec rope;
  AttentionSpec attention;
  MoeSpec moe;           // experts == 0: none
  int intermediate = 0;  // of dense layers
  bool mlp_bias = false;
  std::vector<bool> is_moe;  // [layers]; MTP layers are MoE when the last layer is
  int mtp_layers = 0;
};

/// Makes the spec from a config in config.json's terms; refuses unknown architectures and unsupported fields
/// by name. `file` stands in front of every message.
StatusOr<DecoderSpec> SpecFromConfig(const nlohmann::json& config, const std::string& file);

/// Chooses top_k routed experts a token instead of the config's number; 0 leaves it.
Status OverrideTopK(DecoderSpec& spec, int top_k);

/// Every architecture this build runs, for help texts and the error that refuses others.
std::vector<std::string> SupportedArchitectures();

}  // namespace moesaic::models
