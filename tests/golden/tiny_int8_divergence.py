#!/usr/bin/env python3
"""Writes tiny_int8_divergence.json: how far moesaic-tiny in int8 is from itself, as transformers says in fp32.

Usage: tiny_int8_divergence.py   (in the repository; needs torch, transformers and safetensors)
Weights are rounded here, in plain torch, as `--scheme w8a8` does it: for each output of a linear the largest magnitude
at 127, the scale a bf16 number. The scored text is the unchanged heldout.jsonl, in windows, each from its second token on.
"""
import json
import pathlib
import re
import tempfile

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

WINDOW, TOKENS = 256, 2048
HERE = pathlib.Path(__file__).resolve().parent
TINY = HERE.parent.parent / "models" / "moesaic-tiny"
KEPT = re.compile(r".*(embed_tokens|lm_head|mlp\.gate|kv_b_proj|eh_proj|shared_head\.head|norm)\.weight")


def rounded(weight):
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    return (weight / scale).round().clamp(-127, 127) * scale


def run(folder, ids):
    """Log-probabilities [windows, window - 1, vocabulary] and, of each MoE layer, chosen experts as sorted ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    chosen = []
    for module in model.modules():
        if isinstance(module, DeepseekV3TopkRouter):
            routes = []
            chosen.append(routes)
            module.register_forward_hook(lambda _, __, out, routes=routes: routes.append(
                out[-1].sort(-1).values))  # [tokens, experts chosen]
    logprobs = []
    for start in range(0, len(ids), WINDOW):
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : start + WINDOW]])).logits[0, :-1]
        logprobs.append(logits.double().log_softmax(-1))
    return torch.stack(logprobs), [torch.stack([window[:-1] for window in layer]) for layer in chosen]


def main():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer((TINY / "heldout.jsonl").read_text()).input_ids[:TOKENS]
    tensors = {name: tensor.float() for name, tensor in safetensors.torch.load_file(TINY / "model.safetensors").items()}
    folders = []
    with tempfile.TemporaryDirectory() as temporary:
        for rounds in (False, True):
            folder = pathlib.Path(temporary) / str(rounds)
            folder.mkdir()
            (folder / "config.json").write_text((TINY / "config.json").read_text())
            safetensors.torch.save_file(
                {name: rounded(t) if rounds and t.ndim == 2 and not KEPT.match(name) else t for name, t in tensors.items()},
                folder / "model.safetensors", {"format": "pt"})
            folders.append(run(folder, ids))
    (base, base_routes), (int8, int8_routes) = folders
    kl = (base.exp() * (base - int8)).sum(-1)
    targets = torch.tensor(ids).reshape(-1, WINDOW)[:, 1:, None]
    difference = (base - int8).gather(-1, targets)[..., 0]
    result = {
        "window": WINDOW, "tokens": len(ids), "scored": kl.numel(), "first_ids": ids[:8],
        "base_nll": -base.gather(-1, targets).mean().item(), "log_ratio": difference.mean().item(),
        "kl": kl.mean().item(), "kl_max": kl.max().item(),
        # All windows have as many tokens, so that the error of the mean is that of the windows' means.
        "kl_error": (kl.mean(1).std() / len(kl) ** 0.5).item(),
        "log_ratio_error": (difference.mean(1).std() / len(kl) ** 0.5).item(),
        "same_top": (base.argmax(-1) == int8.argmax(-1)).double().mean().item(),
        "router_flips": [(a != b).any(-1).double().mean().item() for a, b in zip(base_routes, int8_routes, strict=True)],
    }
    (HERE / "tiny_int8_divergence.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
