#!/usr/bin/env python3
"""Measures the time of prompts of one domain on two ranks of one thread, before and after rebalancing.

Usage: elapsed_bench.py MOESAIC [--rounds 9] [--hidden 512] [--intermediate 1024] [--layers 4] [--redundant 2] [--split exact]
                        [--spill BYTES]

Needs numpy, two cores, and memory for two copies of the weights. The model is a Qwen3-MoE of random weights, in which experts take most
of the time, as they do in large models; shipped ones have small experts. Its router prefers the experts of the first rank for
the tokens of one domain, and those of the other rank for the others: the first half of the vocabulary, and the second. One server keeps its
experts in the default order; the other one moves them until its plans gain nothing. Both then answer the same prompts in turns. Answers and
log-probabilities must be equal. Prints medians, quartiles and the ratio.
"""
import argparse
import concurrent.futures
import json
import pathlib
import shutil
import statistics
import struct
import tempfile
import time

import numpy

import rebalance_bench
from rebalance_bench import Server, settle

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERTS, TOP_K, VOCABULARY, HEADS, HEAD = 16, 2, 1536, 4, 64
PREFERENCE = 2.0  # of the router for the experts of a domain


def write_model(folder, hidden, intermediate, layers):
    random = numpy.random.default_rng(1)

    def normal(*shape, scale=0.02):
        values = (random.standard_normal(shape, dtype=numpy.float32) * scale)
        return (values.view(numpy.uint32) >> 16).astype(numpy.uint16)  # bf16

    def of(values):
        return (values.astype(numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)

    ones = of(numpy.ones(hidden))
    direction = random.standard_normal(hidden)
    direction /= numpy.linalg.norm(direction)
    embedding = random.standard_normal((VOCABULARY, hidden)) * 0.5
    embedding += numpy.where(numpy.arange(VOCABULARY) < VOCABULARY // 2, 1, -1)[:, None] * direction * hidden**0.5 * 0.5
    tensors = {"model.embed_tokens.weight": of(embedding), "model.norm.weight": ones}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        gate = random.standard_normal((EXPERTS, hidden)) * hidden**-0.5
        gate += numpy.where(numpy.arange(EXPERTS) < EXPERTS // 2, 1, -1)[:, None] * direction * PREFERENCE * 2 / hidden**0.5
        tensors |= {name + "input_layernorm.weight": ones, name + "post_attention_layernorm.weight": ones,
                    name + "mlp.gate.weight": of(gate),
                    name + "self_attn.q_norm.weight": of(numpy.ones(HEAD)), name + "self_attn.k_norm.weight": of(numpy.ones(HEAD)),
                    name + "self_attn.q_proj.weight": normal(HEADS * HEAD, hidden), name + "self_attn.k_proj.weight": normal(HEAD, hidden),
                    name + "self_attn.v_proj.weight": normal(HEAD, hidden), name + "self_attn.o_proj.weight": normal(hidden, HEADS * HEAD)}
        for expert in range(EXPERTS):
            part = f"{name}mlp.experts.{expert}."
            tensors |= {part + "gate_proj.weight": normal(intermediate, hidden), part + "up_proj.weight": normal(intermediate, hidden),
                        part + "down_proj.weight": normal(hidden, intermediate)}
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())
    config = json.loads((ROOT / "models" / "moesaic-recall" / "config.json").read_text())
    config |= {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": intermediate, "moe_intermediate_size": intermediate,
               "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD, "num_experts": EXPERTS,
               "num_experts_per_tok": TOP_K, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "moesaic-tiny" / name, folder)


def run(server, prompts):
    """Answers all prompts at once, so that both replicas compute. Returns the seconds and the answers."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.answer(prompt, max_tokens=1), prompts))
    return time.perf_counter() - begin, answers


def quartiles(seconds):
    low, median, high = statistics.quantiles(seconds, n=4)
    return f"{median * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    for name, value in (("rounds", 9), ("hidden", 512), ("intermediate", 1024), ("layers", 4), ("redundant", 2), ("prompts", 4), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--split", default="exact", choices=("exact", "shares"))
    parser.add_argument("--spill", help="bytes: compares a server that sends experts of busy ranks for each batch, instead of one that moves them")
    options = parser.parse_args()
    random = numpy.random.default_rng(2)
    prompts = [[int(token) for token in random.integers(3, VOCABULARY // 2, options.tokens)] for _ in range(options.prompts)]
    rebalance_bench.FLAGS = ("-dp", "2", "-ep", "--threads", "1", "--dtype", "bf16", "--expert-load-window", "0.2", "--port", "0",
                             "--served-model-name", "m", "--max-batch-tokens", "512", "--no-prefix-cache")
    redundant = ("--redundant-experts", str(options.redundant))
    with tempfile.TemporaryDirectory(prefix="moesaic-elapsed-") as folder:
        write_model(pathlib.Path(folder), options.hidden, options.intermediate, options.layers)
        before_flags = ("--rebalance-experts", "86400", *redundant)
        after_flags = ("--rebalance-experts", "86400", "--spill-experts", options.spill) if options.spill else (
            "--rebalance-experts", "5", *redundant, "--replica-split", options.split)
        with Server(options.binary, folder, *before_flags) as before, Server(options.binary, folder, *after_flags) as after:
            for server in (before, after):
                run(server, prompts)
            if not options.spill:
                settle(after, prompts, runs=run)
            seconds = {before: [], after: []}
            equal = True
            for round in range(options.rounds):
                results = {}
                for server in ((before, after), (after, before))[round % 2]:
                    elapsed, results[server] = run(server, prompts)
                    seconds[server].append(elapsed)
                equal &= results[before] == results[after]
            time.sleep(1)
            run(before, prompts[:1]), run(after, prompts[:1])  # the last window ends
            print(f"{options.layers} layers of {EXPERTS} experts, {options.hidden} x {options.intermediate}, {options.prompts} prompts of "
                  f"{options.tokens} tokens, medians of {options.rounds} alternating rounds (quartiles)")
            print(f"before: {quartiles(seconds[before])}, busiest rank {before.busiest():.3f} times the mean")
            split = after.metric("moesaic:expert_split_imbalance")
            print(f"after:  {quartiles(seconds[after])}, busiest rank {after.busiest():.3f} times the mean"
                  f"{'' if not split else f', of exact splits {max(split.values()):.3f}'}"
                  f"; {int(sum(after.metric('moesaic:moved_experts_total').values()))} experts moved, "
                  f"{int(sum(after.metric('moesaic:spilled_experts_total').values()))} spilled")
            ratios = [a / b for a, b in zip(seconds[before], seconds[after])]
            low, median, high = statistics.quantiles(ratios, n=4)
            print(f"ratio {median:.2f} ({low:.2f} to {high:.2f}); answers {'equal' if equal else 'DIFFER'}")
            raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
