"""Tiny DeepSeek-V2, V3 and Kimi-K2 configurations. Keys are those of the released config.json files."""

import torch

from . import fp8, weights

_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "kv_lora_rank": 24,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 12,
    "vocab_size": 160,
}


def _yarn(factor, mscale, mscale_all_dim, beta_fast=32):
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    }


def _v2(**changes):
    cfg = _COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }
    del cfg["num_nextn_predict_layers"]
    return dict(sorted((cfg | changes).items()))


def _v3(**changes):
    cfg = _COMMON | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return dict(sorted((cfg | changes).items()))


_GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 16,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 3,
}

CONFIGS = {
    "deepseek-v2-lite": _v2(
        q_lora_rank=None,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        rope_scaling=_yarn(40, 0.707, 0.707),
    ),
    "deepseek-v2-groups": _v2(
        **_GROUPS,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
        rope_scaling=_yarn(8, 1.0, 0.707),
    ),
    "deepseek-v3-noqlora": _v3(**_GROUPS, q_lora_rank=None, rope_scaling=_yarn(40, 1.0, 1.0)),
    "deepseek-v3-mtp": _v3(num_hidden_layers=2, num_nextn_predict_layers=1),
    "deepseek-v3-fp8": _v3(
        hidden_size=136,
        intermediate_size=144,
        kv_lora_rank=130,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        q_lora_rank=72,
        vocab_size=128,
        quantization_config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    ),
    "kimi-k2": _v3(
        auto_map={
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        model_type="kimi_k2",
        n_routed_experts=12,
        num_experts_per_tok=4,
        rms_norm_eps=0.001,  # large, so that a norm with another epsilon shows
        rope_scaling=_yarn(32.0, 1.0, 1.0, beta_fast=1.0),
        rope_theta=50000.0,
        routed_scaling_factor=2.827,
    ),
}


def tensors(name):
    cfg = CONFIGS[name]
    plain = weights.draw(weights.deepseek(cfg), name, tied=False, dtype=torch.bfloat16)
    return fp8.quantize(plain) if "quantization_config" in cfg else plain
