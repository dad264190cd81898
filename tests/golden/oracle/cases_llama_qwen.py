"""Tiny Llama, Qwen3 and Qwen3-MoE configurations."""

import torch

from . import weights

_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 160,
}


def _make(arch, model_type, **changes):
    return dict(sorted((_COMMON | {"architectures": [arch], "model_type": model_type} | changes).items()))


def _llama(**changes):
    return _make("LlamaForCausalLM", "llama", head_dim=16, mlp_bias=False, pretraining_tp=1, **changes)


def _qwen3_moe(**changes):
    return _make(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **{
            "decoder_sparse_step": 1,
            "head_dim": 24,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        }
        | changes,
    )


def _qwen3_v5_style():
    """As transformers 5 writes it: `dtype`, `rope_parameters` for `torch_dtype`, `rope_theta`, `rope_scaling`."""
    cfg = _make("Qwen3ForCausalLM", "qwen3", head_dim=32, max_window_layers=3, tie_word_embeddings=True)
    cfg |= {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 3}
    cfg |= {"dtype": cfg.pop("torch_dtype"), "transformers_version": "5.23.0"}
    cfg["rope_parameters"] = {"rope_theta": cfg.pop("rope_theta"), "rope_type": "default"}
    del cfg["rope_scaling"]
    return dict(sorted(cfg.items()))


CONFIGS = {
    "qwen3-moe-norm-tied": _qwen3_moe(
        norm_topk_prob=True, tie_word_embeddings=True, decoder_sparse_step=2, num_hidden_layers=4
    ),
    "qwen3-moe-nonorm-untied": _qwen3_moe(norm_topk_prob=False, mlp_only_layers=[1], rms_norm_eps=0.001),
    "qwen3-tied": _qwen3_v5_style(),
    "llama-untied-f16": _llama(torch_dtype="float16", rope_theta=10000.0, rms_norm_eps=1e-05),
    "llama3-rope-bias": _llama(
        rms_norm_eps=0.001,  # large, so that a norm with another epsilon shows
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
    )
    | {"attention_bias": True, "mlp_bias": True},
}


def tensors(name):
    cfg = CONFIGS[name]
    dtype = getattr(torch, cfg.get("torch_dtype") or cfg["dtype"])
    return weights.draw(weights.llama_like(cfg), name, cfg["tie_word_embeddings"], dtype)
