#!/usr/bin/env python3
"""Judges a checkpoint folder: recalled words by task and length (teacher-forced: each is the likeliest where it must be said),
expert load, logits against transformers' Qwen3MoeForCausalLM in fp32, and, with --moesaic, those of our engine in fp32 too.

Rows are training_row()s of seeds that training never uses.
"""

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

import network  # first: it finds moesaic-tiny's modules
import tasks
from tokenizer import ids_of, vocabulary
from train import NAMES


@torch.no_grad()
def recalled(model, length: int, rows: int) -> dict[str, tuple[int, int]]:
    """Returns (correct, total) by kind. Three values may come in any order; the last must be the remaining one."""
    ids, totals = vocabulary(), {}
    for row in range(rows):
        sample = tasks.training_row(random.Random(f"held out|{length}|{row}"), length)
        made, kind = torch.tensor([ids_of(sample.tokens[:length], ids)]), torch.tensor(sample.kinds[:length])
        hidden = model.hidden(made, torch.arange(length)[None])
        for k, name in NAMES.items():
            at = (kind == k).nonzero().flatten()
            if k == tasks.MANY:
                at = at[2::3]  # the last of three; a row may end earlier
            if not len(at):
                continue
            right = (model.logits(hidden[0, at - 1]).argmax(-1) == made[0, at]).sum().item()
            before = totals.get(name, (0, 0))
            totals[name] = before[0] + right, before[1] + len(at)
    return totals


@torch.no_grad()
def logits_differ(model, folder: Path, length: int) -> float:
    hub = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = tasks.training_row(random.Random("logits"), length).tokens[:length]
    made = torch.tensor([ids_of(tokens, vocabulary())])
    ours = model.logits(model.hidden(made, torch.arange(length)[None]))
    return (ours - hub(input_ids=made).logits).abs().max().item()


@torch.no_grad()
def engine_differs(model, folder: Path, binary: Path, length: int) -> float:
    """Returns the largest difference between moesaic's f32 log-probabilities of a text and the training model's."""
    tokens = tasks.training_row(random.Random("logits"), length).tokens[:length]
    ids = ids_of(tokens, vocabulary())
    made = torch.tensor([ids])
    expected = model.logits(model.hidden(made, torch.arange(length)[None]))[0].log_softmax(-1)
    expected = expected[:-1].gather(1, made[0, 1:, None])[:, 0]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps({"ids": ids}) + "\n")
        file.flush()
        output = subprocess.run([binary, "generate", folder, "--jsonl", file.name, "--format", "jsonl", "--dtype", "f32",
                               "--temperature", "0", "-n", "1", "--prompt-logprobs", "--logprobs", "0"], check=True,
                              capture_output=True, text=True).stdout
    row = json.loads(output.splitlines()[0])
    ours = torch.tensor([one["logprob"] for one in row["prompt_logprobs"] if one][-len(expected):])
    return (ours - expected).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=32768, help="of each length")
    parser.add_argument("--moesaic", type=Path, help="our binary, to compare log-probabilities with")
    arguments = parser.parse_args()
    model = network.load(arguments.model)
    for length in arguments.lengths:
        for layer in model.layers:
            layer.mlp.load.zero_()
        totals = recalled(model, length, max(1, arguments.tokens // length))
        loads = [layer.mlp.load / layer.mlp.load.mean() for layer in model.layers]
        print(f"{length} tokens: " + ", ".join(f"{k} {a}/{b} ({100 * a / b:.1f}%)" for k, (a, b) in totals.items()) +
              "; busiest and idlest expert by layer " + ", ".join(f"{l.max():.2f} {l.min():.2f}" for l in loads))
    print(f"largest difference of logits to transformers: {logits_differ(model, arguments.model, 512):.2g}")
    if arguments.moesaic:
        print(f"largest difference of log-probabilities to moesaic: "
              f"{engine_differs(model, arguments.model, arguments.moesaic, 2048):.2g}")


if __name__ == "__main__":
    main()
