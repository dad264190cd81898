// Writes configs for model_fuzzer whose fields no golden has: FOLDER/model_fuzzer/.
#include "base/test_seeds.h"

int main(int argc, char** argv) {
  const moesaic::base::SeedCorpus corpus(argc, argv);
  corpus.Write("model_fuzzer", "glm_rope_parameters", R"({"architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 32,
    "max_position_embeddings": 64, "moe_intermediate_size": 8, "n_routed_experts": 4,
    "num_attention_heads": 2, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5, "vocab_size": 16,
    "rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4, "partial_rotary_factor": 0.5}})");
  return 0;
}
