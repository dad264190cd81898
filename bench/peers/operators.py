#!/usr/bin/env python3
"""Compares operators with PyTorch eager compositions: same shapes and threads, in one run.

usage: operators.py BENCH_FOLDER [--threads N] [--rounds N] [--json FILE] [--quick] [--only WORD]

BENCH_FOLDER holds kernels_route_bench, kernels_attention_bench and kernels_moe_bench. The two sides alternate,
and the order changes from round to round. Prints medians over rounds of each round's median step, with the lowest and
highest, and the median of the ratios within a round. Needs the Python package torch.

An operator may have several compositions: that of the model's release, and others. Each has a ratio; the fastest one is
the reference.
"""
import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

SECONDS = 0.5  # of timed steps per side and round


def route_deepseek_v3(rows):
    """DeepSeek-V3's MoEGate, noaux_tc, from its logits on: 256 experts, 4 of 8 groups, 8 of 256."""
    experts, groups, top_groups, top_k = 256, 8, 4, 8
    logits, bias = torch.randn(rows, experts), 0.01 * torch.randn(experts)

    def step():
        scores = logits.sigmoid()
        choice = scores + bias.unsqueeze(0)
        group_scores = choice.view(rows, groups, -1).topk(2, dim=-1)[0].sum(dim=-1)
        group_ids = torch.topk(group_scores, k=top_groups, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_ids, 1)
        mask = group_mask.unsqueeze(-1).expand(rows, groups, experts // groups).reshape(rows, -1)
        _, ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=top_k, dim=-1, sorted=False)
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * 2.5

    return step


def route_qwen3_moe(rows):
    logits = torch.randn(rows, 128)

    def step():
        weights, ids = torch.topk(torch.softmax(logits, dim=1, dtype=torch.float), 8, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return ids, weights

    return step


class Layers:
    """bf16 tensors of the given shapes in turn, a gigabyte in all, so that each has left the caches before its next use."""

    def __init__(self, *shapes):
        size = sum(2 * math.prod(shape) for shape in shapes)
        count = max(1, (1 << 30) // size)
        self.layers = [[torch.full(shape, 0.25, dtype=torch.bfloat16) for shape in shapes] for _ in range(count)]
        self.at = 0

    def next(self):
        self.at = (self.at + 1) % len(self.layers)
        return self.layers[self.at]


def mla_absorbed(keys):
    """DeepSeek-V3's own inference code: queries in the latent space, einsum over the cache of 512 + 64."""
    heads, latent, rope = 128, 512, 64
    layers = Layers((1, keys, latent), (1, keys, rope))
    q_nope = torch.randn(1, 1, heads, latent).bfloat16()
    q_rope = torch.randn(1, 1, heads, rope).bfloat16()

    def step():
        kv, pe = layers.next()
        scores = (torch.einsum("bshc,btc->bsht", q_nope, kv) + torch.einsum("bshr,btr->bsht", q_rope, pe)) * 0.1
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(q_nope)
        return torch.einsum("bsht,btc->bshc", scores, kv)

    return step


def mla_matmul(keys):
    """The same with one cache of 576 and matmul in place of einsum: the fewest operators that do it."""
    heads = 128
    layers = Layers((keys, 576))
    q = torch.randn(heads, 576).bfloat16()

    def step():
        (kv,) = layers.next()
        scores = torch.softmax(torch.matmul(q, kv.t()).float() * 0.1, dim=-1).bfloat16()
        return torch.matmul(scores, kv[:, :512])

    return step


def mla_heads(keys):
    """As transformers' eager attention runs it: keys [128, 192] and values [128, 128] of every token in the cache."""
    layers = Layers((1, 128, keys, 192), (1, 128, keys, 128))
    q = torch.randn(1, 128, 1, 192).bfloat16()

    def step():
        k, v = layers.next()
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.1
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)

    return step


def mla_shared_heads(keys):
    """MQA as transformers' eager attention composes it: the one head repeated for 128 queries, then matmul."""
    layers = Layers((1, 1, keys, 576))
    q = torch.randn(1, 128, 1, 576).bfloat16()

    def step():
        (kv,) = layers.next()
        k = kv.expand(1, 128, keys, 576).reshape(1, 128, keys, 576)
        v = kv[..., :512].expand(1, 128, keys, 512).reshape(1, 128, keys, 512)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.1
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)

    return step


def gqa(keys):
    """Qwen3-30B-A3B as transformers' eager attention runs it: repeat_kv, then matmul."""
    heads, kv_heads, dim = 32, 4, 128
    layers = Layers((1, kv_heads, keys, dim), (1, kv_heads, keys, dim))
    q = torch.randn(1, heads, 1, dim).bfloat16()

    def repeat(x):
        return x[:, :, None].expand(1, kv_heads, heads // kv_heads, keys, dim).reshape(1, heads, keys, dim)

    def step():
        k, v = layers.next()
        scores = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.1
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), repeat(v))

    return step


def random_routes(rows):
    ids = torch.stack([torch.randperm(256)[:8] for _ in range(rows)])
    return ids, torch.full((rows, 8), 0.125), torch.randn(rows, 7168).bfloat16()


def dispatch_sorted(rows):
    """DeepSeek-V3's moe_infer with experts that return their rows: sort, gather, put back, weighted sum."""
    ids, weights, x = random_routes(rows)

    def step():
        counts = ids.new_zeros((rows, 256))
        counts.scatter_(1, ids, 1)
        tokens_per_expert = counts.sum(dim=0).tolist()
        order = ids.view(-1).argsort()
        sorted_tokens = x[order // ids.shape[1]]
        outputs, start = [], 0
        for count in tokens_per_expert:
            if count > 0:
                outputs.append(sorted_tokens[start:start + count])
            start += count
        outs = torch.cat(outputs, dim=0)
        back = torch.empty_like(outs)
        back[order] = outs
        return back.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(x.dtype)

    return step


def dispatch_by_expert(rows):
    """As transformers' experts do: one-hot mask, and for each expert its rows, weighted and added where they belong."""
    ids, weights, x = random_routes(rows)

    def step():
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, num_classes=256).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert[0]])
            current = x[token] * weights[token, slot, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out

    return step


class Operator:
    """`less`: a counter of the benchmark to subtract from its time, for work that the compositions do not do."""

    def __init__(self, name, target, binary, test, compositions, quick=False, less=None):
        self.name, self.target, self.binary, self.test = name, target, binary, test
        self.compositions, self.quick, self.less = compositions, quick, less


def operators():
    for rows in (1, 32, 512, 4096):
        yield Operator(f"router, DeepSeek-V3, {rows} tokens", 21.5, "kernels_route_bench",
                       f"RouteDeepSeekV3/rows:{rows}", {"release": lambda r=rows: route_deepseek_v3(r)}, rows == 512)
        yield Operator(f"router, Qwen3-30B-A3B, {rows} tokens", 21.5, "kernels_route_bench",
                       f"RouteQwen3Moe/rows:{rows}", {"transformers": lambda r=rows: route_qwen3_moe(r)}, rows == 512)
    for keys in (4096, 16384):
        yield Operator(f"MLA, DeepSeek-V3, decode, {keys} keys", 41.2, "kernels_attention_bench",
                       f"DecodeMla128/bf16_{keys}",
                       {"release, absorbed": lambda k=keys: mla_absorbed(k), "matmul": lambda k=keys: mla_matmul(k),
                        "heads apart": lambda k=keys: mla_heads(k),
                        "one head repeated": lambda k=keys: mla_shared_heads(k)}, keys == 4096)
        yield Operator(f"GQA, Qwen3-30B-A3B, decode, {keys} keys", None, "kernels_attention_bench",
                       f"DecodeGqa/bf16_{keys}", {"transformers": lambda k=keys: gqa(k)}, keys == 4096)
    for rows in (512, 2048, 4096):
        compositions = {"release": lambda r=rows: dispatch_sorted(r),
                        "transformers": lambda r=rows: dispatch_by_expert(r)}
        # Ours cannot omit the experts, so they are tiny, and their products are measured separately.
        yield Operator(f"dispatch, DeepSeek-V3, {rows} tokens", 7.2, "kernels_moe_bench",
                       f"Dispatch/bf16/rows:{rows}", dict(compositions), rows == 512, less="products_us")
        yield Operator(f"dispatch with products of tiny experts, DeepSeek-V3, {rows} tokens", None,
                       "kernels_moe_bench", f"Dispatch/bf16/rows:{rows}", dict(compositions))


def ours(folder, operator, threads):
    command = [folder / operator.binary, f"--benchmark_filter=^{operator.test}/threads:{threads}/",
               f"--benchmark_min_time={SECONDS}", "--benchmark_format=json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (line,) = report["benchmarks"]
    return line["us"] - (line[operator.less] if operator.less else 0)


def theirs(step):
    seconds = []
    until = time.perf_counter() + SECONDS
    step()
    while not seconds or time.perf_counter() < until:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def microseconds(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def measure(operator, options):
    """Returns {side: [microseconds by round]}; "Moesaic" is ours, the others are compositions."""
    rounds = {"Moesaic": []} | {name: [] for name in operator.compositions}
    for number in range(options.rounds):
        for name in list(rounds) if number % 2 == 0 else reversed(list(rounds)):
            print(f"{operator.name}, round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            if name == "Moesaic":
                rounds[name].append(ours(options.folder, operator, options.threads))
            else:
                rounds[name].append(theirs(operator.compositions[name]()))
    return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--json", type=pathlib.Path, help="raw rounds")
    parser.add_argument("--only", default="", help="operators with this word in their name")
    parser.add_argument("--quick", action="store_true", help="3 rounds of one size an operator, first composition")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 5)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {options.threads} threads, medians of {options.rounds} rounds in turn.\n")
    print("| operator | Moesaic us | composition | PyTorch us | ratio | target |\n|" + "---|" * 6, flush=True)
    raw = []
    for operator in operators():
        if options.only not in operator.name or (options.quick and not operator.quick):
            continue
        if options.quick:
            operator.compositions = dict(list(operator.compositions.items())[:1])
        rounds = measure(operator, options)
        raw.append({"operator": operator.name, "threads": options.threads, "torch": torch.__version__, "us": rounds})
        if options.json:
            options.json.write_text(json.dumps(raw, indent=1))
        for name in operator.compositions:
            ratios = [b / a for a, b in zip(rounds["Moesaic"], rounds[name])]
            target = f"{operator.target}" if operator.target else "-"
            cells = [operator.name, microseconds(rounds["Moesaic"]), name, microseconds(rounds[name]),
                     f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})", target]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
