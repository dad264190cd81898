"""Tiny GLM-4.5 configurations: grouped-query attention with DeepSeek-V3's router. What `moesaic carve` makes of a dense
model declares this architecture, without norms of heads and with whole heads rotated."""

import torch

from . import weights

_COMMON = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": [1, 2],
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 160,
}

_VARIANTS = {
    "glm4-moe": {
        "attention_bias": True,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "glm4-moe-carved": {
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_hidden_layers": 2,
        "partial_rotary_factor": 1.0,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": True,
        "topk_group": 1,
        "use_qk_norm": False,
    },
}

CONFIGS = {name: dict(sorted((_COMMON | changes).items())) for name, changes in _VARIANTS.items()}


def tensors(name):
    cfg = CONFIGS[name]
    return weights.draw(weights.glm4_moe(cfg), name, cfg["tie_word_embeddings"], torch.bfloat16)
