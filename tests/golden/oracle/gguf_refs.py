"""Goldens of the older reference checkpoints' q8_0 GGUF files: the file's own values, dequantised by gguf-py and put
back under their Hub names, through transformers."""

import re
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from . import folder, golden
from .hf import HfModel

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def _unpermute(w, heads):
    """llama.cpp stores Llama's q and k rows with rotary pairs side by side; the Hub has halves."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)


def _hub_tensors(path, config):
    raw = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in GGUFReader(path).tensors}
    out = {}
    for name, w in raw.items():
        layer, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+?)(?:\.weight|\.bias)?", name).groups()
        p = f"model.layers.{layer}."
        if layer is None:
            if kind != "rope_freqs":
                out[_TOP[kind] + ".weight"] = w
        elif kind.endswith("_exps"):
            for e, expert in enumerate(w):
                out[f"{p}mlp.experts.{e}.{kind[4:-5]}_proj.weight"] = expert
        elif kind == "exp_probs_b":
            out[p + "mlp.gate.e_score_correction_bias"] = w
        elif kind == "attn_k_b":  # [heads, rank, nope]; with attn_v_b [heads, v, rank] it is kv_b_proj
            both = torch.cat([w.transpose(1, 2), raw[name.replace("k_b", "v_b")]], 1)
            out[p + "self_attn.kv_b_proj.weight"] = both.flatten(0, 1)
        elif kind != "attn_v_b":
            if config["model_type"] == "llama" and kind in ("attn_q", "attn_k"):
                w = _unpermute(w, config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"])
            out[p + _LAYER[kind] + ".weight"] = w
    return out


def convert(source, target):
    for file in sorted((source / "gguf").glob("*-q8_0.gguf")):
        name = file.name.removesuffix("-q8_0.gguf")
        config = folder.read(source / name)[0]
        with tempfile.TemporaryDirectory() as tmp:
            folder.write(Path(tmp) / "m", config, _hub_tensors(file, config))
            model = HfModel(Path(tmp) / "m")
        # These models are larger, so that their noise is, and clear prompts are rarer.
        tensors, metadata = golden.make(
            model, file.stem, config["vocab_size"], max_noise=5e-5, min_router_margin=2e-5
        )
        golden.write(target, tensors, metadata, f"{file.stem}.golden.safetensors")
        print(file.name, metadata)
