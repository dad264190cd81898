"""The multi-token-prediction module of DeepSeek-V3, transcribed from the published description and from how vLLM and
transformers run it:

    x_i     = eh_proj(concat(enorm(embedding(t_{i+1})), hnorm(h_i)))     embedding half first
    y       = decoder layer (causal over x, the positions of the main model's rows)
    logits  = head(shared_head.norm(y))                                 row i predicts t_{i+2}

h_i is the main model's hidden state after its final norm. The layer has its own KV cache. Rotary positions enter only
as differences, so i and i + 1 number the rows equally well. vLLM zeroes the embedding of row 0; neither the paper nor
transformers does, and nor do we.
"""

import copy

import torch
from torch.nn import functional as F
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel


class HfMtp:
    """The MTP module of a V3 checkpoint. Its decoder layer is transformers' own class, loaded by hand."""

    def __init__(self, hf, tensors):
        cfg, self.main = hf.config, hf
        p = f"model.layers.{cfg['num_hidden_layers']}."
        own = {k[len(p) :]: v.float() for k, v in tensors.items() if k.startswith(p)}
        self.eps = cfg["rms_norm_eps"]
        self.enorm, self.hnorm = own.pop("enorm.weight"), own.pop("hnorm.weight")
        self.eh_proj, self.norm = own.pop("eh_proj.weight"), own.pop("shared_head.norm.weight")
        self.embed = own.pop("embed_tokens.weight", hf.model.model.embed_tokens.weight)
        self.head = own.pop("shared_head.head.weight", hf.model.lm_head.weight)
        experts = range(cfg["n_routed_experts"])
        gate, up, down = (
            [own.pop(f"mlp.experts.{e}.{n}_proj.weight") for e in experts] for n in ("gate", "up", "down")
        )
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        own["mlp.experts.down_proj"] = torch.stack(down)
        self.layer = copy.deepcopy(hf.model.model.layers[-1])  # hooks on its router come along
        self.layer.self_attn.layer_idx = 0
        self.layer.load_state_dict(own)
        self._check_against_transformers()

    @torch.no_grad()
    def _check_against_transformers(self):
        """The transcription must agree with transformers' MtpModel, which always uses the main model's head."""
        cfg, g = self.main.model.config, torch.Generator().manual_seed(0)
        other = MtpModel(self.main.model, 1).eval()
        block = other.layers[0]
        block.mtp_block.load_state_dict(self.layer.state_dict())
        for name, value in (("enorm", self.enorm), ("hnorm", self.hnorm), ("eh_proj", self.eh_proj)):
            getattr(block, name).weight.copy_(value)
        block.post_norm.weight.copy_(self.norm)
        ids, hidden = (
            torch.randint(3, cfg.vocab_size, (9,), generator=g),
            torch.randn(9, cfg.hidden_size, generator=g),
        )
        cache, positions = MtpCache(config=cfg.get_mtp_config()), torch.arange(1, 10)[None]
        out = other.forward_layer(0, hidden[None], positions, cache, input_ids=ids[None])
        theirs, ours = self.main.model.lm_head(out)[0], self.run(ids.tolist(), hidden)
        assert (theirs - ours).abs().max() < 2e-5, (theirs - ours).abs().max()

    def _rms(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    @torch.no_grad()
    def run(self, next_ids, hidden):
        """Logits [len, vocab] for rows that pair `hidden` [len, hidden] with the token after it."""
        e = F.embedding(torch.tensor(next_ids), self.embed)
        x = F.linear(torch.cat([self._rms(e, self.enorm), self._rms(hidden, self.hnorm)], -1), self.eh_proj)[None]
        n = x.shape[1]
        positions = self.main.model.model.rotary_emb(x, torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        y = self.layer(x, attention_mask=mask, position_embeddings=positions)
        return F.linear(self._rms(y[0], self.norm), self.head)


def extra(mtp, main, min_router_margin):
    """Golden tensors of the MTP module for `golden.make`: the last row pairs with the first greedy token."""

    def run(p, ids, greedy, hidden, rows):
        next_ids = ids[1:] + greedy[:1]
        logits = mtp.run(next_ids, hidden)
        if main.router_margin < min_router_margin:
            return None
        return {
            p + "mtp_next_ids": torch.tensor(next_ids, dtype=torch.int32),
            p + "mtp_logits": logits[rows].clone(),
        }

    return run
