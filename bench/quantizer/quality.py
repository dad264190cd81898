#!/usr/bin/env python3
"""Measures the effect of rounding a trained MoE model's linear layers on its answers, by grid and method.

Runs moesaic-tiny over training conversations of a separate seed and records the inputs of every linear layer and expert.
round_matrices rounds the weights. The rounded and the bf16 model then predict the held-out answers. Prints mean and p99 of
KL(bf16 || rounded) in nats per token and the share of equal likeliest tokens. All linear layers of the decoder except
embeddings, head and routers are rounded independently, on unrounded inputs.

Usage: quality.py ROUND_MATRICES [--grids int8,int4_g32,...] [--methods nearest,gptq,...]
Needs torch, safetensors and tokenizers.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(MODEL))

import checkpoint  # noqa: E402
import generate  # noqa: E402
from model import MLP, Attention, MoE  # noqa: E402

CALIBRATION_ROWS, ROW_TOKENS = 96, 512


def calibration(tokenizer) -> list[list[int]]:
    sampler = generate.Sampler(random.Random("calibration"))
    rows = []
    while len(rows) < CALIBRATION_ROWS:
        row = []
        while len(row) < ROW_TOKENS:
            conversation = sampler.conversation(ROW_TOKENS, generate.LAST)
            row += tokenizer.encode("".join(t for t, _ in generate.segments(**conversation)),
                                    add_special_tokens=False).ids
        rows.append(row[:ROW_TOKENS])
    return rows


def held_out(tokenizer) -> list[list[int]]:
    rows = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    texts = ["".join(t for t, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)) + r["expected"]
             for r in rows]
    return [i for i in (tokenizer.encode(t, add_special_tokens=False).ids for t in texts) if len(i) <= 1024]


class Inputs:
    """Records the inputs of every linear layer: rows by name, and the weights that read them."""

    def __init__(self, model):
        self.rows, self.owner = {}, {}
        for name, module in model.named_modules():
            if name.startswith("mtp"):
                continue
            if isinstance(module, (MLP, Attention)):
                for leaf, linear in module.named_children():
                    if isinstance(linear, torch.nn.Linear):
                        shared = {"up_proj": "gate_proj", "kv_a_proj_with_mqa": "q_a_proj"}.get(leaf, leaf)
                        self.owner[f"{name}.{leaf}.weight"] = f"{name}.{shared}"
                        if shared == leaf:
                            linear.register_forward_pre_hook(
                                lambda _, x, key=f"{name}.{leaf}": self.keep(key, x[0]))
            elif isinstance(module, MoE):
                for expert in range(module.c["n_routed_experts"]):
                    for leaf in ("gate", "up", "down"):
                        self.owner[f"{name}.{leaf}.{expert}"] = (
                            f"{name}.{'down' if leaf == 'down' else 'gate'}.{expert}")
                module.register_forward_pre_hook(lambda m, x, key=name: self.keep_experts(key, m, x[0]))

    def keep(self, key, x):
        self.rows.setdefault(key, []).append(x.reshape(-1, x.shape[-1]))

    def keep_experts(self, name, moe, x):
        x = x.reshape(-1, x.shape[-1])
        _, ids = moe.route(x)
        for expert in range(moe.c["n_routed_experts"]):
            mine = x[(ids == expert).any(-1)]
            self.keep(f"{name}.gate.{expert}", mine)
            self.keep(f"{name}.down.{expert}",
                      torch.nn.functional.silu(mine @ moe.gate[expert].T) * (mine @ moe.up[expert].T))


def weight_of(model, name: str) -> torch.Tensor:
    """Returns the weight by its name in Inputs; for experts a slice of their stack."""
    stack, _, last = name.rpartition(".")
    if last.isdigit():
        return model.get_parameter(stack)[int(last)]
    return model.get_parameter(name)


@torch.no_grad()
def logprobs(model, rows: list[list[int]]) -> torch.Tensor:
    return torch.cat([model.lm_head(model.hidden(torch.tensor([row])))[0].log_softmax(-1) for row in rows])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("round_matrices")
    parser.add_argument("--grids", default="int8,int4_g32,nvfp4,fp8")
    parser.add_argument("--methods", default="nearest,searched,weighted,gptq,gptq_searched,gptq_weighted")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = checkpoint.load(MODEL)
    inputs = Inputs(model)
    for row in calibration(tokenizer):
        model.hidden(torch.tensor([row]))
    names = list(inputs.owner)
    original = {name: weight_of(model, name).clone() for name in names}
    tensors = {f"W:{name}@{inputs.owner[name]}": original[name].contiguous() for name in names}
    tensors |= {f"X:{key}": torch.cat(rows).contiguous() for key, rows in inputs.rows.items()}
    inputs.keep = inputs.keep_experts = lambda *_: None
    rows = held_out(tokenizer)
    reference = logprobs(model, rows)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/in.safetensors")
        print(f"{len(names)} matrices, {CALIBRATION_ROWS * ROW_TOKENS} calibration tokens, {len(reference)} held out")
        print(f"{'grid':10}{'method':16}{'loss/nearest':>13}{'mean KL':>11}{'of nearest':>11}{'p99 KL':>10}{'top-1':>9}")
        for grid in arguments.grids.split(","):
            nearest = None
            for method in arguments.methods.split(","):
                printed = subprocess.run([arguments.round_matrices, f"{folder}/in.safetensors",
                                       f"{folder}/out.safetensors", grid, method],
                                      check=True, capture_output=True, text=True).stdout
                rounded = load_file(f"{folder}/out.safetensors")
                for name in names:
                    weight_of(model, name).copy_(rounded[name])
                ours = logprobs(model, rows)
                kl = (reference.exp() * (reference - ours)).sum(-1).clamp(min=0)
                mean = kl.mean().item()
                nearest = mean if nearest is None else nearest
                agree = (ours.argmax(-1) == reference.argmax(-1)).float().mean().item()
                print(f"{grid:10}{method:16}{printed.split()[-1]:>13}{mean:11.6f}{mean / nearest:11.3f}"
                      f"{kl.quantile(0.99).item():10.5f}{agree:9.4f}", flush=True)
                for name in names:
                    weight_of(model, name).copy_(original[name])


if __name__ == "__main__":
    main()
