"""openPangu-Ultra-MoE 718B in plain PyTorch, transcribed from its published model code (`modeling_openpangu_moe.py`,
Huawei, as contributed to a transformers tree; the same mathematics as in vLLM's `openpangu.py`). No code is shared.

It is DeepSeek-V3's MLA and MoE with three differences:
  - sandwich norm: attention and FFN outputs are normed before they join the residual stream, so a layer is
      h += post_attention_layernorm(attention(input_layernorm(h)))
      h += post_mlp_layernorm(ffn(pre_mlp_layernorm(h)))
    (without `sandwich_norm`, post_attention_layernorm is the FFN's input norm, as in Llama);
  - routing: top-k of sigmoid scores over all experts, no groups and no correction bias; the chosen scores are divided
    by their sum (+ 1e-20) and multiplied by routed_scaling_factor;
  - plain rotary embedding over interleaved pairs, no YaRN; softmax scale (nope + rope) ** -0.5.
The norms inside MLA have epsilon 1e-6 for any rms_norm_eps, as in DeepSeek's code (vLLM uses rms_norm_eps).
The MTP module has DeepSeek-V3's form (mtp.py) around such a layer, read from layer `num_hidden_layers`.
"""

import copy
from pathlib import Path

import torch
from torch.nn import functional as F

from . import folder, routing

_INNER_EPS = 1e-6
_NAMES = {  # the published config's names for DeepSeek's dimensions
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_q_lora_dim": "q_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
    "num_dense_layers": "first_k_dense_replace",
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}


def deepseek_names(config):
    return {_NAMES.get(k, k): v for k, v in config.items()}


def _rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x, positions, theta):
    """Rotates pairs (2i, 2i + 1) of the last dimension of [..., len, dim] by positions * theta ** (-2i / dim)."""
    dim = x.shape[-1]
    inv = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(positions.float(), inv)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class PanguModel:
    oracle = "plain PyTorch transcription of modeling_openpangu_moe.py"

    def __init__(self, path):
        stored, tensors = folder.read(Path(path))
        self.config, self.router_margin = deepseek_names(stored), float("inf")
        self.weights = {k: v.float() for k, v in tensors.items()}

    def double(self):
        other = copy.copy(self)
        other.weights = {k: v.double() for k, v in self.weights.items()}
        return other

    def _linear(self, name, x):
        return F.linear(x, self.weights[name + ".weight"])

    def _norm(self, name, x, eps=None):
        return _rms(x, self.weights[name + ".weight"], self.config["rms_norm_eps"] if eps is None else eps)

    def _attention(self, p, x):
        cfg, n = self.config, x.shape[0]
        heads, nope, rope = cfg["num_attention_heads"], cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"]
        rank, theta, positions = cfg["kv_lora_rank"], cfg["rope_theta"], torch.arange(n)
        q = self._linear(p + "q_b_proj", self._norm(p + "q_a_layernorm", self._linear(p + "q_a_proj", x), _INNER_EPS))
        q = q.view(n, heads, nope + rope).transpose(0, 1)  # [heads, len, nope + rope]
        latent = self._linear(p + "kv_a_proj_with_mqa", x)
        kv = self._linear(p + "kv_b_proj", self._norm(p + "kv_a_layernorm", latent[:, :rank], _INNER_EPS))
        kv = kv.view(n, heads, -1).transpose(0, 1)  # [heads, len, nope + v]
        k_rope = _rotate(latent[:, rank:], positions, theta).expand(heads, n, rope)
        k, v = torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:]
        q = torch.cat([q[..., :nope], _rotate(q[..., nope:], positions, theta)], -1)
        scores = q @ k.transpose(1, 2) * (nope + rope) ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        return self._linear(p + "o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1))

    def _mlp(self, p, x):
        gate, up = self._linear(p + "gate_proj", x), self._linear(p + "up_proj", x)
        return self._linear(p + "down_proj", F.silu(gate) * up)

    def _moe(self, p, x):
        cfg = self.config
        logits = self._linear(p + "gate", x)
        flat = {"num_experts_per_tok": cfg["num_experts_per_tok"], "n_group": 1}
        margin = routing.margin(logits, flat, torch.zeros(logits.shape[-1]))
        self.router_margin = min(self.router_margin, margin)
        scores, chosen = logits.sigmoid().topk(cfg["num_experts_per_tok"], -1)
        if cfg["norm_topk_prob"]:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        out = self._mlp(p + "shared_experts.", x) if cfg["n_shared_experts"] else torch.zeros_like(x)
        for token, slot in [(t, s) for t in range(x.shape[0]) for s in range(chosen.shape[1])]:
            weight = scores[token, slot] * cfg["routed_scaling_factor"]
            out[token] += weight * self._mlp(f"{p}experts.{chosen[token, slot]}.", x[token])
        return out

    def layer(self, i, h):
        p, sandwich = f"model.layers.{i}.", self.config.get("sandwich_norm", False)
        ffn = self._mlp if i < self.config["first_k_dense_replace"] else self._moe
        a = self._attention(p + "self_attn.", self._norm(p + "input_layernorm", h))
        if not sandwich:
            h = h + a
            return h + ffn(p + "mlp.", self._norm(p + "post_attention_layernorm", h))
        h = h + self._norm(p + "post_attention_layernorm", a)
        return h + self._norm(p + "post_mlp_layernorm", ffn(p + "mlp.", self._norm(p + "pre_mlp_layernorm", h)))

    @torch.no_grad()
    def start(self, ids):
        """Runs `ids` from nothing; returns logits [len, vocab] and the final-normed hidden state [len, hidden]."""
        self.ids = list(ids)
        h = F.embedding(torch.tensor(self.ids), self.weights["model.embed_tokens.weight"])
        for i in range(self.config["num_hidden_layers"]):
            h = self.layer(i, h)
        h = self._norm("model.norm", h)
        return self._linear("lm_head", h).float(), h

    def extend(self, ids):
        logits, hidden = self.start(self.ids + list(ids))  # no cache: nothing to get wrong
        return logits[-len(ids) :], hidden[-len(ids) :]


class PanguMtp:
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def run(self, next_ids, hidden):
        m, i = self.model, self.model.config["num_hidden_layers"]
        p = f"model.layers.{i}."
        e = F.embedding(torch.tensor(next_ids), m.weights["model.embed_tokens.weight"])
        x = m._linear(p + "eh_proj", torch.cat([m._norm(p + "enorm", e), m._norm(p + "hnorm", hidden)], -1))
        return m._linear("lm_head", m._norm(p + "shared_head.norm", m.layer(i, x)))
