"""Names, shapes and seeded values of every tensor of a tiny checkpoint, in Hugging Face Hub layout."""

import math
import zlib

import torch


def _mla(cfg, p):
    h, heads = cfg["hidden_size"], cfg["num_attention_heads"]
    nope, rope, v = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"], cfg["v_head_dim"]
    kv = cfg["kv_lora_rank"]
    out = {}
    if cfg["q_lora_rank"] is None:
        out[p + "q_proj.weight"] = (heads * (nope + rope), h)
    else:
        out[p + "q_a_proj.weight"] = (cfg["q_lora_rank"], h)
        out[p + "q_a_layernorm.weight"] = (cfg["q_lora_rank"],)
        out[p + "q_b_proj.weight"] = (heads * (nope + rope), cfg["q_lora_rank"])
    out[p + "kv_a_proj_with_mqa.weight"] = (kv + rope, h)
    out[p + "kv_a_layernorm.weight"] = (kv,)
    out[p + "kv_b_proj.weight"] = (heads * (nope + v), kv)
    out[p + "o_proj.weight"] = (h, heads * v)
    return out


def _gqa(cfg, p, qk_norm):
    h, d = cfg["hidden_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * d, cfg["num_key_value_heads"] * d
    out = {
        p + "q_proj.weight": (q, h),
        p + "k_proj.weight": (kv, h),
        p + "v_proj.weight": (kv, h),
        p + "o_proj.weight": (h, q),
    }
    if cfg.get("attention_bias"):
        out |= {
            p + "q_proj.bias": (q,),
            p + "k_proj.bias": (kv,),
            p + "v_proj.bias": (kv,),
            p + "o_proj.bias": (h,),
        }
    if qk_norm:
        out |= {p + "q_norm.weight": (d,), p + "k_norm.weight": (d,)}
    return out


def _mlp(cfg, p, inter, bias=False):
    h = cfg["hidden_size"]
    out = {
        p + "gate_proj.weight": (inter, h),
        p + "up_proj.weight": (inter, h),
        p + "down_proj.weight": (h, inter),
    }
    if bias:
        out |= {p + "gate_proj.bias": (inter,), p + "up_proj.bias": (inter,), p + "down_proj.bias": (h,)}
    return out


def _experts(cfg, p, count):
    out = {p + "gate.weight": (count, cfg["hidden_size"])}
    for e in range(count):
        out |= _mlp(cfg, f"{p}experts.{e}.", cfg["moe_intermediate_size"])
    return out


def _deepseek_layer(cfg, i):
    p, h = f"model.layers.{i}.", cfg["hidden_size"]
    out = _mla(cfg, p + "self_attn.")
    norms = ["input_layernorm", "post_attention_layernorm"]
    if cfg.get("sandwich_norm"):
        norms += ["pre_mlp_layernorm", "post_mlp_layernorm"]
    out |= {f"{p}{n}.weight": (h,) for n in norms}
    if i < cfg["first_k_dense_replace"]:
        return out | _mlp(cfg, p + "mlp.", cfg["intermediate_size"])
    out |= _experts(cfg, p + "mlp.", cfg["n_routed_experts"])
    if cfg.get("topk_method") == "noaux_tc":
        out[p + "mlp.gate.e_score_correction_bias"] = (cfg["n_routed_experts"],)
    if cfg.get("n_shared_experts"):
        out |= _mlp(cfg, p + "mlp.shared_experts.", cfg["moe_intermediate_size"] * cfg["n_shared_experts"])
    return out


def deepseek(cfg, mtp_copies=True):
    """DeepSeek-V2, V3, Kimi-K2 and (given DeepSeek's key names and `sandwich_norm`) openPangu-Ultra-MoE.

    An MTP module is stored as layer `num_hidden_layers`, as in DeepSeek's release; `mtp_copies` adds the copies of
    the embedding and the head that the release carries there.
    """
    h, v, n = cfg["hidden_size"], cfg["vocab_size"], cfg["num_hidden_layers"]
    out = {"model.embed_tokens.weight": (v, h)}
    for i in range(n):
        out |= _deepseek_layer(cfg, i)
    for i in range(n, n + cfg.get("num_nextn_predict_layers", 0)):
        p = f"model.layers.{i}."
        out |= {p + "enorm.weight": (h,), p + "hnorm.weight": (h,), p + "eh_proj.weight": (h, 2 * h)}
        out |= _deepseek_layer(cfg, i)
        out[p + "shared_head.norm.weight"] = (h,)
        if mtp_copies:
            out |= {p + "embed_tokens.weight": (v, h), p + "shared_head.head.weight": (v, h)}
    return out | {"model.norm.weight": (h,), "lm_head.weight": (v, h)}


def llama_like(cfg):
    """Llama, Qwen3 and Qwen3-MoE."""
    h, v = cfg["hidden_size"], cfg["vocab_size"]
    qwen = cfg["model_type"].startswith("qwen3")
    out = {"model.embed_tokens.weight": (v, h)}
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out |= _gqa(cfg, p + "self_attn.", qwen)
        out |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        sparse = cfg["model_type"] == "qwen3_moe" and i not in cfg["mlp_only_layers"]
        if sparse and (i + 1) % cfg["decoder_sparse_step"] == 0:
            out |= _experts(cfg, p + "mlp.", cfg["num_experts"])
        else:
            out |= _mlp(cfg, p + "mlp.", cfg["intermediate_size"], cfg.get("mlp_bias", False))
    out["model.norm.weight"] = (h,)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, h)
    return out


def glm4_moe(cfg):
    """GLM-4.5: biases of q, k and v only, DeepSeek-V3's router and shared experts."""
    h, v = cfg["hidden_size"], cfg["vocab_size"]
    out = {"model.embed_tokens.weight": (v, h)}
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out |= _gqa(cfg, p + "self_attn.", cfg["use_qk_norm"])
        out.pop(p + "self_attn.o_proj.bias", None)
        out |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        if i < cfg["first_k_dense_replace"]:
            out |= _mlp(cfg, p + "mlp.", cfg["intermediate_size"])
            continue
        out |= _experts(cfg, p + "mlp.", cfg["n_routed_experts"])
        out[p + "mlp.gate.e_score_correction_bias"] = (cfg["n_routed_experts"],)
        out |= _mlp(cfg, p + "mlp.shared_experts.", cfg["moe_intermediate_size"] * cfg["n_shared_experts"])
    out["model.norm.weight"] = (h,)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, h)
    return out


def draw(shapes, name, tied, dtype):
    """Random tensors for `shapes`, rounded to `dtype`. Each tensor's values depend on `name` and its own name only.

    Gains keep activations near unit variance and logits near a deviation of 2.5, so that a wrong scale, a wrong
    rotation or a missed bias moves logits by far more than the tests' tolerance.
    """
    out = {}
    for tensor, shape in shapes.items():
        g = torch.Generator().manual_seed(zlib.crc32(f"{name}/{tensor}".encode()))
        x = torch.randn(shape, generator=g)
        if tensor.endswith("e_score_correction_bias"):
            out[tensor] = 0.1 * x  # stays f32, as in the release
            continue
        if "norm" in tensor:
            x = 1.0 + 0.2 * x
        elif tensor.endswith(".bias"):
            x = 0.3 * x
        elif tensor.endswith("embed_tokens.weight"):
            x = x * (2.5 / math.sqrt(shape[1]) if tied else 1.0)
        else:
            gain = 1.0
            if tensor.endswith("lm_head.weight"):
                gain = 2.5
            elif any(s in tensor for s in ("q_proj", "q_b_proj", "k_proj", "mlp.gate.")):
                gain = 1.6
            x = x * (gain / math.sqrt(shape[1]))
        out[tensor] = x.to(dtype)
    for tensor in out:  # the release's MTP layer repeats the embedding and the head
        if tensor.endswith(".embed_tokens.weight") and ".layers." in tensor:
            out[tensor] = out["model.embed_tokens.weight"].clone()
        elif tensor.endswith("shared_head.head.weight"):
            out[tensor] = out["lm_head.weight"].clone()
    return out
