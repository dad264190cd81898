"""A small Qwen3-MoE in PyTorch, written for training on a CPU; export and load of the Hugging Face folder.

Norms, the packing of experts and the optimizer are moesaic-tiny's.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "moesaic-tiny"))
from model import MoE, RMSNorm, linear  # noqa: E402

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.01,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 64}
STACKS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def rotate(x, cos, sin):
    """Rotates pairs (x[i], x[i + half]) of x [batch, tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normed per head, then rotated."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.groups, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = linear(self.heads * self.size, c["hidden_size"])
        self.k_proj = linear(self.groups * self.size, c["hidden_size"])
        self.v_proj = linear(self.groups * self.size, c["hidden_size"])
        self.o_proj = linear(c["hidden_size"], self.heads * self.size)
        self.q_norm = RMSNorm(self.size, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.size, c["rms_norm_eps"])

    def forward(self, x, rope):
        batch, tokens, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, tokens, self.heads, self.size))
        k = self.k_norm(self.k_proj(x).view(batch, tokens, self.groups, self.size))
        v = self.v_proj(x).view(batch, tokens, self.groups, self.size)
        cos, sin = (t.to(q.dtype) for t in rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class NoShared(nn.Module):
    def forward(self, x):
        return torch.zeros((), dtype=x.dtype)


class Experts(MoE):
    """Softmax routing with the chosen weights scaled to 1, as Qwen3-MoE has it, and no shared expert."""

    def __init__(self, c: dict):
        super().__init__({**c, "n_routed_experts": c["num_experts"], "n_shared_experts": 1})
        self.shared_experts = NoShared()
        del self.bias
        self.balance = torch.zeros(())

    def route(self, x):
        c = self.c
        with torch.autocast("cpu", enabled=False):
            shares = torch.softmax(x.float() @ self.router.float().T, dim=-1)
        weights, ids = shares.topk(c["num_experts_per_tok"], dim=-1)
        chosen = F.one_hot(ids, c["num_experts"]).float().mean((0, 1))
        self.balance = c["num_experts"] * (chosen * shares.mean(0)).sum()  # Switch's loss: 1 when even
        return weights / weights.sum(-1, keepdim=True), ids


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Experts(c)

    def forward(self, x, rope):
        x = x + self.self_attn(self.input_layernorm(x), rope).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


class Model(nn.Module):
    def __init__(self, c: dict = CONFIG):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        half = c["head_dim"] // 2
        self.register_buffer("frequencies", c["rope_theta"] ** -(torch.arange(half) / half), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = 0.1 if name.startswith("embed") else 0.5 / math.sqrt(p.shape[-1])
                out = name.endswith(("o_proj.weight", "mlp.down"))
                nn.init.normal_(p, std=std / math.sqrt(2 * c["num_hidden_layers"]) if out else std)
        with torch.no_grad():
            self.lay_circuits()

    def lay_circuits(self):
        """Starts the first two layers as the two halves of an induction circuit, which training would else take most
        of its steps to find (arXiv 2209.11895): heads that look one and two tokens back write what they see next to the
        token's own embedding, and heads of the next layer look where that equals the own token, or the one before.

        The residual stream is cut into one constant dimension, `own` and `before`. Matching takes the dimensions of a
        head that turn less than 0.3 radians over 16k tokens.
        """
        c, size = self.c, self.c["head_dim"]
        own, before = slice(1, 64), slice(64, 127)  # 63 each
        width, half = 63, size // 2
        table = self.embed_tokens.weight
        table.normal_(std=0.02)
        table[:, own].normal_(std=0.5)
        table[:, 0] = 1.0
        turned = torch.linalg.qr(torch.randn(width, width)).Q  # the token two back is rotated relative to the one before

        fast = torch.tensor([2.0, 1.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # of pairs 0 to 7: alone at distances to some 500
        angles = self.frequencies[:8]

        def look_back(attention, group, heads):
            """Makes `heads` {head: tokens back} of a KV head attend to one position each; its values are `own`."""
            attention.k_proj.weight[group * size:(group + 1) * size] = 0
            attention.k_proj.weight[group * size:group * size + 8, 0] = fast
            attention.v_proj.weight[group * size:(group + 1) * size] = 0
            attention.v_proj.weight[group * size:group * size + width, own] = torch.eye(width)
            for head, back in heads.items():
                at = head * size
                attention.q_proj.weight[at:at + size] = 0
                attention.q_proj.weight[at:at + 8, 0] = fast * (back * angles).cos()
                attention.q_proj.weight[at + half:at + half + 8, 0] = -fast * (back * angles).sin()
                attention.o_proj.weight[:, at:at + size] = 0

        first = self.layers[0].self_attn
        look_back(first, 0, {0: 1, 1: 2})
        first.o_proj.weight[before, :width] = torch.eye(width)
        first.o_proj.weight[before, size:size + width] = 0.7 * turned

        second = self.layers[1].self_attn
        slow = [i for i in range(half) if self.frequencies[i] * 16384 < 0.3]
        slow += [i + half for i in slow]
        for head, group, seen, map_ in ((0, 0, own, torch.eye(width)), (2, 1, before, turned)):
            match = torch.linalg.qr(torch.randn(width, width)).Q[:len(slow)]
            q = torch.zeros(size, c["hidden_size"])
            k = torch.zeros(size, c["hidden_size"])
            q[slow, seen] = match
            k[slow, before] = match @ map_.T
            second.q_proj.weight[head * size:(head + 1) * size] = q
            second.k_proj.weight[group * size:(group + 1) * size] = k
            second.v_proj.weight[group * size:(group + 1) * size] = 0
            second.v_proj.weight[group * size:group * size + width, own] = torch.eye(width)
            second.o_proj.weight[:, head * size:(head + 1) * size] = 0
            second.o_proj.weight[own, head * size:head * size + width] = torch.eye(width)
        for layer in (first, second):
            layer.q_norm.weight.fill_(2.0)
            layer.k_norm.weight.fill_(1.5)

        # The values of three and seven tokens before are not repeated.
        third = self.layers[2].self_attn
        look_back(third, 1, {2: 7, 3: 3})
        for head in (2, 3):
            third.o_proj.weight[own, head * size:head * size + width] = -0.5 * torch.eye(width)
        for norm, gain in ((third.q_norm, 2.0), (third.k_norm, 1.5)):
            norm.weight[[*range(8), *range(half, half + 8)]] = gain

    def hidden(self, ids, positions):
        """Returns final normed states of ids [batch, tokens] at `positions` [batch, tokens]."""
        angle = positions.float()[..., None] * self.frequencies
        rope = angle.cos()[:, :, None, :], angle.sin()[:, :, None, :]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()

    def balance(self):
        return sum(layer.mlp.balance for layer in self.layers) / len(self.layers)


def to_hub(model: Model) -> dict[str, torch.Tensor]:
    """The tensors under Qwen3-MoE's names, views of the model's own."""
    out = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".mlp") and leaf in STACKS:
            for i, expert in enumerate(tensor):
                out[f"model.{owner}.experts.{i}.{STACKS[leaf]}.weight"] = expert
        else:
            out[f"model.{owner}.gate.weight" if leaf == "router" else f"model.{name}"] = tensor
    return out


def export(model: Model, folder: Path) -> None:
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in to_hub(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.c, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def load(folder: Path) -> Model:
    """The exported weights in the training model, fp32."""
    model = Model(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    for name, view in to_hub(model).items():
        view.copy_(stored[name].float())
    return model.eval()
