"""A DeepSeek-V3 in PyTorch, written for training on a CPU: MLA, grouped sigmoid routing, one MTP module.

The weights carry the names of the Hugging Face layout except that the experts of a layer are stacked; `export` in
checkpoint.py takes them apart.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "ep_size": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000,
    "rope_interleave": True,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def yarn_frequencies(config: dict) -> torch.Tensor:
    """Rotary frequencies under YaRN (arXiv 2309.00071): slow ones are stretched by `factor`.  [rope_dim / 2]"""
    dim, base, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def dimension(rotations):
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def softmax_scale(config: dict) -> float:
    scaling = config["rope_scaling"]
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return mscale * mscale / math.sqrt(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the interleaved pairs (x0, x1), (x2, x3), ... of x [batch, tokens, heads, rope_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Norm(torch.autograd.Function):
    """x / rms(x) * weight with a backward of few passes; PyTorch composes it of a dozen on a CPU."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        weight_grad = (grad * unit).flatten(0, -2).sum(0)
        scaled = grad * weight
        shift = torch.linalg.vecdot(scaled, unit)[..., None] / x.shape[-1]
        return scaled.sub_(unit.mul_(shift)).mul_(inverse), weight_grad, None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        out = Norm.apply(x.float(), self.weight, self.eps)
        # Cast once here; autocast would cast it again for every product that reads it.
        return out.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else out


class Attention(nn.Module):
    """Multi-head latent attention, expanded: keys and values are formed from the latent before the product."""

    def __init__(self, c: dict):
        super().__init__()
        self.c = c
        heads, nope, rope, value = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
                                                   "v_head_dim"))
        self.q_a_proj = linear(c["q_lora_rank"], c["hidden_size"])
        self.q_a_layernorm = RMSNorm(c["q_lora_rank"], c["rms_norm_eps"])
        self.q_b_proj = linear(heads * (nope + rope), c["q_lora_rank"])
        self.kv_a_proj_with_mqa = linear(c["kv_lora_rank"] + rope, c["hidden_size"])
        self.kv_a_layernorm = RMSNorm(c["kv_lora_rank"], c["rms_norm_eps"])
        self.kv_b_proj = linear(heads * (nope + value), c["kv_lora_rank"])
        self.o_proj = linear(c["hidden_size"], heads * value)
        self.scale = softmax_scale(c)

    def forward(self, x, rope, mask):
        c = self.c
        batch, tokens, _ = x.shape
        heads, nope, rope_dim, value = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim",
                                                       "qk_rope_head_dim", "v_head_dim"))
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, tokens, heads, nope + rope_dim)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c["kv_lora_rank"], rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, tokens, heads, nope + value)
        cos, sin = (t.to(q.dtype) for t in rope)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), dim=-1)
        k_rope = rotate(k_rope[:, :, None, :], cos, sin).expand(-1, -1, heads, -1)
        k = torch.cat((kv[..., :nope], k_rope), dim=-1)
        v = kv[..., nope:]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                             attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, heads * value))


class MLP(nn.Module):
    def __init__(self, c: dict, width: int):
        super().__init__()
        self.gate_proj = linear(width, c["hidden_size"])
        self.up_proj = linear(width, c["hidden_size"])
        self.down_proj = linear(c["hidden_size"], width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Pack(torch.autograd.Function):
    """Copies tokens into expert slots: row source[s] of x for slot s. Rows of the slots in `idle` are not read.

    Both directions are plain gathers: quicker on a CPU than scatter-adds, and the same sum in every run.
    """

    @staticmethod
    def forward(ctx, x, source, slot_of):
        ctx.save_for_backward(slot_of)
        ctx.rows = x.shape[0]
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        (slot_of,) = ctx.saved_tensors
        return grad.index_select(0, slot_of).view(ctx.rows, -1, grad.shape[1]).sum(1), None, None


class Unpack(torch.autograd.Function):
    """The inverse of Pack: row slot_of[c] of x for choice c; idle slots get no gradient."""

    @staticmethod
    def forward(ctx, x, slot_of, choice_in, idle):
        ctx.save_for_backward(choice_in, idle)
        return x.index_select(0, slot_of)

    @staticmethod
    def backward(ctx, grad):
        choice_in, idle = ctx.saved_tensors
        return grad.index_select(0, choice_in).index_fill_(0, idle, 0), None, None, None


class MoE(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.c = c
        experts, width, hidden = c["n_routed_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("bias", torch.zeros(experts))
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = MLP(c, width * c["n_shared_experts"])
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def route(self, x):
        """(weights, expert ids), each [tokens, top_k]: groups by their two best, then experts (DeepSeek-V3 2.1.2)."""
        c = self.c
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(x.float() @ self.router.float().T)
        with torch.no_grad():
            choice = scores + self.bias
            groups = choice.view(len(x), c["n_group"], -1)
            best = groups.topk(2, dim=-1)[0].sum(-1).topk(c["topk_group"], dim=-1)[1]
            keep = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
            choice = groups.masked_fill(~keep[..., None], -math.inf).view(len(x), -1)
            ids = choice.topk(c["num_experts_per_tok"], dim=-1)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"], ids

    def forward(self, x):
        c = self.c
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        tokens, experts, top_k = len(x), c["n_routed_experts"], c["num_experts_per_tok"]
        weights, ids = self.route(x)
        with torch.no_grad():
            flat = ids.flatten()
            counts = torch.bincount(flat, minlength=experts)
            self.load += counts
            capacity = -(-int(counts.max()) // 64) * 64
            order = torch.argsort(flat, stable=True)
            starts = torch.cumsum(counts, 0) - counts
            rank = torch.arange(tokens * top_k) - starts[flat[order]]
            slot = flat[order] * capacity + rank  # of the sorted choices
            slot_of = torch.empty_like(slot).scatter_(0, order, slot)  # of choice token * top_k + j
            choice_in = torch.full((experts * capacity,), -1).scatter_(0, slot, order)
            idle = (choice_in < 0).nonzero().flatten()
            choice_in.clamp_(min=0)
        packed = Pack.apply(x, choice_in // top_k, slot_of).view(experts, capacity, -1)
        hidden = F.silu(packed @ self.gate.transpose(1, 2)) * (packed @ self.up.transpose(1, 2))
        out = (hidden @ self.down.transpose(1, 2)).view(experts * capacity, -1)
        out = Unpack.apply(out, slot_of, choice_in, idle).view(tokens, top_k, -1)
        routed = torch.bmm(weights.to(out.dtype)[:, None, :], out).squeeze(1)
        return (routed + self.shared_experts(x)).view(shape)


class Layer(nn.Module):
    def __init__(self, c: dict, dense: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c, c["intermediate_size"]) if dense else MoE(c)

    def forward(self, x, rope, mask):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


class MTP(nn.Module):
    """Predicts token i+2 from the model's normed hidden state i and the embedding of token i+1."""

    def __init__(self, c: dict):
        super().__init__()
        self.enorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.hnorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.eh_proj = linear(c["hidden_size"], 2 * c["hidden_size"])
        self.layer = Layer(c, dense=False)
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, hidden, next_embedding, rope, mask):
        x = self.eh_proj(torch.cat((self.enorm(next_embedding), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x.float(), rope, mask))


class Model(nn.Module):
    def __init__(self, c: dict = CONFIG):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i < c["first_k_dense_replace"]) for i in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = linear(c["vocab_size"], c["hidden_size"])
        self.mtp = MTP(c)
        self.register_buffer("frequencies", yarn_frequencies(c), persistent=False)
        depth = 2 * (c["num_hidden_layers"] + 1)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = 0.5 if name.startswith("embed") else 0.5 / math.sqrt(p.shape[-1])
                out = name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down"))
                nn.init.normal_(p, std=std / math.sqrt(depth) if out else std)

    def rope(self, tokens: int):
        angle = torch.arange(tokens, dtype=torch.float32)[:, None] * self.frequencies
        return angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]

    def hidden(self, ids, mask=None):
        """Final normed hidden states of ids [batch, tokens]: [batch, tokens, hidden]."""
        rope = self.rope(ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.norm(x)

    def drafts(self, hidden, ids, mask=None):
        """MTP hidden states; row i predicts ids[i + 2] (the last row has no next token and is dropped)."""
        mask = mask[..., :-1, :-1] if mask is not None else None
        return self.mtp(hidden[:, :-1], self.embed_tokens(ids[:, 1:]), self.rope(ids.shape[1] - 1), mask)

    def moes(self):
        return [m for m in self.modules() if isinstance(m, MoE)]
