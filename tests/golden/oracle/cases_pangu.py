"""Tiny openPangu-Ultra-MoE configurations: the 718B release's own key names, and DeepSeek's, which V1.1 uses."""

import tempfile
from pathlib import Path

import torch

from . import folder, weights
from .hf import HfModel
from .pangu import PanguModel, deepseek_names

_PANGU = {
    "architectures": ["PanguUltraMoEForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_kv_lora_dim": 24,
    "attention_q_lora_dim": 40,
    "attention_qk_dim": 16,
    "attention_qk_rope_dim": 16,
    "attention_v_dim": 12,
    "auto_map": {
        "AutoConfig": "configuration_openpangu_moe.PanguUltraMoEConfig",
        "AutoModel": "modeling_openpangu_moe.PanguUltraMoEModel",
        "AutoModelForCausalLM": "modeling_openpangu_moe.PanguUltraMoEForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "model_type": "pangu_ultra_moe",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_dense_layers": 1,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_mtp_layers": 1,
    "num_routed_experts": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 0.001,  # large, so that a norm with another epsilon shows
    "rope_theta": 25600000,
    "routed_scaling_factor": 2.5,
    "sandwich_norm": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 160,
}

_V11 = deepseek_names(_PANGU) | {"num_nextn_predict_layers": 0, "num_hidden_layers": 3}
del _V11["auto_map"]
CONFIGS = {"pangu-ultra-moe-mtp": _PANGU, "pangu-ultra-moe-v11": dict(sorted(_V11.items()))}


def tensors(name):
    shapes = weights.deepseek(deepseek_names(CONFIGS[name]), mtp_copies=False)
    return weights.draw(shapes, name, tied=False, dtype=torch.bfloat16)


def check_transcription(name):
    """Without sandwich norm Pangu is DeepSeek-V3 with one group and no bias: there transformers must agree."""
    config = deepseek_names(CONFIGS[name]) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "sandwich_norm": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }
    config.pop("auto_map", None)
    plain = weights.draw(weights.deepseek(config), name, tied=False, dtype=torch.bfloat16)
    plain |= {k: torch.zeros_like(v) for k, v in plain.items() if k.endswith("e_score_correction_bias")}
    ids = torch.randint(3, config["vocab_size"], (50,), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as tmp:
        folder.write(Path(tmp) / "m", config, plain)
        theirs, ours = HfModel(Path(tmp) / "m").start(ids)[0], PanguModel(Path(tmp) / "m").start(ids)[0]
    assert (theirs - ours).abs().max() < 5e-5, (theirs - ours).abs().max()
