#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "checkpoint/gguf_checkpoint.h"

namespace moesaic::checkpoint {
namespace {

using Pair = std::pair<std::string_view, std::string_view>;

constexpr std::array kGlobal = {
    Pair{"token_embd.weight", "model.embed_tokens.weight"},
    Pair{"output_norm.weight", "model.norm.weight"},
    Pair{"output.weight", "lm_head.weight"},
};

// Names after the prefixes "blk.N." and "model.layers.N.". Biases are named like their weights.
constexpr std::array kLayer = {
    Pair{"attn_norm", "input_layernorm"},
    Pair{"ffn_norm", "post_attention_layernorm"},
    Pair{"attn_q", "self_attn.q_proj"},
    Pair{"attn_k", "self_attn.k_proj"},
    Pair{"attn_v", "self_attn.v_proj"},
    Pair{"attn_output", "self_attn.o_proj"},
    Pair{"attn_q_norm", "self_attn.q_norm"},
    Pair{"attn_k_norm", "self_attn.k_norm"},
    Pair{"attn_q_a", "self_attn.q_a_proj"},
    Pair{"attn_q_a_norm", "self_attn.q_a_layernorm"},
    Pair{"attn_q_b", "self_attn.q_b_proj"},
    Pair{"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    Pair{"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    Pair{"attn_kv_b", "self_attn.kv_b_proj"},
    Pair{"attn_k_b", "self_attn.k_b"},  // the two halves of kv_b_proj: GgufCheckpoint joins them
    Pair{"attn_v_b", "self_attn.v_b"},
    Pair{"ffn_gate", "mlp.gate_proj"},
    Pair{"ffn_up", "mlp.up_proj"},
    Pair{"ffn_down", "mlp.down_proj"},
    Pair{"ffn_gate_inp", "mlp.gate"},
    Pair{"ffn_gate_exps", "mlp.experts.{}.gate_proj"},
    Pair{"ffn_up_exps", "mlp.experts.{}.up_proj"},
    Pair{"ffn_down_exps", "mlp.experts.{}.down_proj"},
    Pair{"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
    Pair{"ffn_up_shexp", "mlp.shared_experts.up_proj"},
    Pair{"ffn_down_shexp", "mlp.shared_experts.down_proj"},
    Pair{"nextn.eh_proj", "eh_proj"},
    Pair{"nextn.enorm", "enorm"},
    Pair{"nextn.hnorm", "hnorm"},
    Pair{"nextn.embed_tokens", "embed_tokens"},
    Pair{"nextn.shared_head_head", "shared_head.head"},
    Pair{"nextn.shared_head_norm", "shared_head.norm"},
};

}  // namespace

StatusOr<std::string> HubName(const std::string& ggml_name, const std::string& file) {
  for (const auto& [ggml, hub] : kGlobal) {
    if (ggml_name == ggml) return std::string(hub);
  }
  constexpr std::string_view kBlock = "blk.";
  const std::string_view name = ggml_name;
  const size_t dot = name.find('.', kBlock.size());
  if (name.starts_with(kBlock) && dot != std::string_view::npos) {
    int layer = -1;
    const std::string_view number = name.substr(kBlock.size(), dot - kBlock.size());
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), layer);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == number.data() + number.size() && layer >= 0;
    const std::string_view rest = name.substr(dot + 1);
    if (whole && rest == "exp_probs_b.bias") {
      return fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", layer);
    }
    const size_t last = rest.rfind('.');
    const std::string_view suffix = last == std::string_view::npos ? "" : rest.substr(last);
    for (const auto& [ggml, hub] : kLayer) {
      if (whole && rest.substr(0, last) == ggml && (suffix == ".weight" || suffix == ".bias")) {
        return fmt::format("model.layers.{}.{}{}", layer, hub, suffix);
      }
    }
  }
  return Unimplemented("{}: tensor {} is not known; running the model without it could give wrong results",
                       file, ggml_name);
}

}  // namespace moesaic::checkpoint
