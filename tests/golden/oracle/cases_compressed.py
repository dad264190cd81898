"""compressed-tensors variants of tiny Llama, Qwen3-MoE and DeepSeek-V3 checkpoints."""

import tempfile
from pathlib import Path

import torch

from . import cases_deepseek, cases_llama_qwen, compressed, fake_quant, folder, weights
from .hf import HfModel

EXACT_PROMPTS = 2  # prompts whose simulated int8 activations are far from every rounding boundary
MIN_TIE = 3e-4
MAX_EXACT_NOISE = 3e-5  # fp32 against fp64 arithmetic around the same integers
MAX_LOOSE_NOISE = 0.2  # the same where some integers come out differently
_IGNORE = ["lm_head", "re:.*mlp\\.gate$", "re:.*kv_b_proj$"]


def _args(bits, strategy, **changes):
    args = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "int",
    }
    return args | changes


_STATIC = _args(8, "tensor")
_DYNAMIC = _args(8, "token", dynamic=True, observer=None)
_W8 = _args(8, "channel")


def _quantization(fmt, *groups, ignore=_IGNORE):
    """`groups`: (targets, weights, input_activations)."""
    return {
        "config_groups": {
            f"group_{i}": {"input_activations": a, "output_activations": None, "targets": t, "weights": w}
            for i, (t, w, a) in enumerate(groups)
        },
        "format": fmt,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _packed(bits, strategy, **changes):
    return _quantization("pack-quantized", (["Linear"], _args(bits, strategy, **changes), None))


def _int4(**changes):
    return _packed(4, "group", **changes)


_NVFP4 = _args(4, "tensor_group", type="float", group_size=16, scale_dtype="torch.float8_e4m3fn")
_LLAMA = cases_llama_qwen.CONFIGS["llama-untied-f16"] | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}
_QWEN = cases_llama_qwen.CONFIGS["qwen3-moe-nonorm-untied"] | {"norm_topk_prob": True, "num_hidden_layers": 2}
_V3 = cases_deepseek.CONFIGS["deepseek-v3-noqlora"] | {"q_lora_rank": 40, "num_hidden_layers": 2}
_WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
_BIAS = {"attention_bias": True}
_RAGGED = {"intermediate_size": 84}

_BASES = {
    "ct-llama-int8-static": (_LLAMA | _BIAS, _quantization("int-quantized", (["Linear"], _W8, _STATIC))),
    "ct-llama-int8-dynamic": (_LLAMA, _quantization("int-quantized", (["Linear"], _W8, _DYNAMIC))),
    "ct-llama-int4-g32": (_LLAMA, _int4(group_size=32)),
    "ct-llama-int4-g128": (_LLAMA | _WIDE, _int4(group_size=128)),
    "ct-llama-int4-g32-asym": (_LLAMA, _int4(group_size=32, symmetric=False)),
    "ct-llama-int4-actorder": (_LLAMA, _int4(group_size=32, actorder="group")),
    "ct-llama-int4-channel-asym": (_LLAMA | _RAGGED, _packed(4, "channel", symmetric=False)),
    "ct-llama-int8-g32": (_LLAMA, _packed(8, "group", group_size=32)),
    "ct-llama-int8-channel-asym": (_LLAMA | _RAGGED, _packed(8, "channel", symmetric=False)),
    "ct-llama-nvfp4a16": (_LLAMA, _quantization("nvfp4-pack-quantized", (["Linear"], _NVFP4, None))),
    "ct-qwen3-moe-int8-dynamic": (_QWEN, _quantization("int-quantized", (["Linear"], _W8, _DYNAMIC))),
    "ct-qwen3-moe-int4-experts": (
        _QWEN | {"moe_intermediate_size": 32},
        _quantization(
            "pack-quantized",
            (["Linear"], _args(4, "group", group_size=32), None),
            ignore=[
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*mlp\\.gate$",
            ],
        ),
    ),
    "ct-deepseek-v3-int8-mixed": (
        _V3,
        _quantization(
            "int-quantized",
            (["re:.*mlp\\.experts\\..*"], _W8, _DYNAMIC),
            (
                ["re:.*self_attn\\.(q_a|q_b|kv_a|o)_proj.*", "re:.*mlp\\.(shared_experts\\.)?(gate|up|down)_proj$"],
                _W8,
                _STATIC,
            ),
        ),
    ),
}
CONFIGS = {name: base | {"quantization_config": q} for name, (base, q) in _BASES.items()}


def tensors(name):
    config, quantization = _BASES[name]
    deepseek = config["model_type"].startswith("deepseek")
    shapes = (weights.deepseek if deepseek else weights.llama_like)(config)
    plain = weights.draw(shapes, name, tied=False, dtype=torch.bfloat16)
    amax = None
    if any(not (g["input_activations"] or _DYNAMIC)["dynamic"] for g in quantization["config_groups"].values()):
        with tempfile.TemporaryDirectory() as tmp:
            folder.write(Path(tmp) / "m", config, plain)
            ids = torch.randint(3, config["vocab_size"], (200,), generator=torch.Generator().manual_seed(2)).tolist()
            amax = fake_quant.calibrate(HfModel(Path(tmp) / "m"), compressed.modules_of(quantization, plain), ids)
    return compressed.quantize(quantization, plain, amax)


def w8a8_extra(hf, stored, min_router_margin):
    """Golden tensors with simulated int8 activations for `golden.make`, or None where a checkpoint has none."""
    groups = hf.config["quantization_config"]["config_groups"].values()
    if not any(g["input_activations"] for g in groups):
        return None
    hf64 = hf.double()
    quant, quant64 = fake_quant.FakeQuant(hf, stored), fake_quant.FakeQuant(hf64, stored)

    def run(p, ids, greedy, hidden, rows):
        quant.tie = hf.router_margin = float("inf")
        with quant.active():
            logits, _ = hf.start(ids)
        exact = int(p.removeprefix("prompt_").removesuffix(".")) < EXACT_PROMPTS
        if hf.router_margin < min_router_margin or (exact and quant.tie < MIN_TIE):
            return None
        with quant64.active():
            noise = (hf64.start(ids)[0] - logits)[rows].abs().max()
        if noise > (MAX_EXACT_NOISE if exact else MAX_LOOSE_NOISE):
            return None
        assert len(ids) < 200 or quant.used == set(quant.by_pointer), "a quantized linear was never run"
        return {p + "logits_w8a8": logits[rows].clone(), p + "w8a8_noise": noise.view(1)}

    return run
