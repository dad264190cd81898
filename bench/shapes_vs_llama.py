#!/usr/bin/env python3
"""Prefill and decode speed on real layer shapes, beside llama.cpp's on the same files, in one run.

usage: shapes_vs_llama.py MOESAIC SHAPES_FOLDER [--llama-bench PATH] [--rounds N] [--quick] ...

The files come from make_shapes.py and are made when missing. The two sides take turns, and who begins changes
from round to round; each round is a process of its own with an untimed repetition before the timed one. What is
printed are medians over the rounds with the lowest and highest, and the median of the ratios within a round.
Precisions are of the same class: q8_0 files run as int8 (W8A8, one scale an output) here and as q8_0 x q8 blocks
there; bf16 files as bf16 on both sides.

`llama-bench` (and `llama-batched-bench`, which is looked for beside it) is llama.cpp's own benchmark: build it
natively on the machine that is measured. Without it only this side is measured.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

DTYPES = {"q8_0": "int8", "bf16": "bf16"}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}\nexit code {done.returncode}")
    return done


class Side:
    """Speeds by test over the rounds: {"pp512": [t/s, ...]}."""

    def __init__(self):
        self.speeds = collections.defaultdict(list)

    def add(self, speeds):
        for test, speed in speeds.items():
            self.speeds[test].append(speed)


class Ours(Side):
    def __init__(self, binary, options):
        super().__init__()
        self.binary, self.options = binary, options
        self.shares = collections.defaultdict(list)  # of read bandwidth (decode) or dot peak (prefill)

    def peaks(self):
        """Operations a second of the strongest dot products: {(dtype, threads): peak}."""
        text = run([self.binary, "doctor"]).stdout
        peaks = {}
        for dtype in ("int8", "bf16"):
            found = re.search(rf"^{dtype} dot products.*?([\d.]+) GOP/s(?: +([\d.]+) GOP/s)?", text, re.M)
            one, all_threads = found.group(1), found.group(2) or found.group(1)
            peaks[dtype, 1], peaks[dtype, os.cpu_count()] = float(one) * 1e9, float(all_threads) * 1e9
        return peaks

    def bench(self, file, dtype, threads, flags):
        command = [self.binary, "bench", file, "--dtype", dtype, "-t", str(threads), "-r", "1", "-o", "json"]
        return json.loads(run(command + flags).stdout)

    def single(self, file, dtype, threads):
        o = self.options
        peak = self.peaks().get((dtype, threads))
        flags = ["-p", ",".join(map(str, o.prompts)), "-n", str(o.decode)]
        for line in self.bench(file, dtype, threads, flags):
            test = line["test"]
            self.add({test: line["tokens_per_s"]})
            if line["generate"] > 0:
                self.shares[test].append(line["bandwidth_share"])
            elif peak:  # two operations a weight; the head, a tenth of them, runs for the last token only
                self.shares[test].append(2 * line["active_parameters"] * line["tokens_per_s"] / peak)

    def deep(self, file, dtype, threads):
        flags = ["-p", "0", "-n", str(self.options.decode), "-d", str(self.options.depth)]
        for line in self.bench(file, dtype, threads, flags):
            self.add({line["test"]: line["tokens_per_s"]})
            self.shares[line["test"]].append(line["bandwidth_share"])

    def batched(self, file, dtype, threads):
        o = self.options
        flags = ["-p", "0", "-n", "32", "-d", "128", "-s", ",".join(map(str, o.batches))]
        lines = self.bench(file, dtype, threads, flags)
        self.add({f"tg32 x {line['sequences']}": line["tokens_per_s"] for line in lines})


class Llama(Side):
    def __init__(self, binary, options):
        super().__init__()
        self.binary, self.options = binary, options

    def bench(self, file, threads, flags):
        command = [self.binary, "-m", file, "-t", str(threads), "-r", "1", "-o", "json"]
        lines = json.loads(run(command + flags + self.options.llama_flags.split()).stdout)
        for line in lines:
            test = f"pp{line['n_prompt']}" if line["n_prompt"] else f"tg{line['n_gen']}"
            self.add({test + (f" @ d{line['n_depth']}" if line["n_depth"] else ""): line["avg_ts"]})

    def single(self, file, dtype, threads):
        flags = ["-p", ",".join(map(str, self.options.prompts)), "-n", str(self.options.decode)]
        self.bench(file, threads, flags)

    def deep(self, file, dtype, threads):
        self.bench(file, threads, ["-p", "0", "-n", str(self.options.decode), "-d", str(self.options.depth)])

    def batched(self, file, dtype, threads):
        binary = self.binary.with_name("llama-batched-bench")
        context = max(self.options.batches) * (128 + 32)
        out = run([binary, "-m", file, "-t", str(threads), "-c", str(context), "-npp", "128", "-ntg", "32",
                   "-npl", ",".join(map(str, self.options.batches)), "--output-format", "jsonl"]).stdout
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        self.add({f"tg32 x {line['pl']}": line["speed_tg"] for line in lines})


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def rows(shape, kind, threads, ours, peer):
    for test, speeds in ours.speeds.items():
        share = f"{100 * statistics.median(ours.shares[test]):.0f}%" if ours.shares[test] else "-"
        cells = [shape, kind, str(threads), test, spread(speeds), share]
        if peer:
            ratios = [a / b for a, b in zip(speeds, peer.speeds[test])]
            cells += [spread(peer.speeds[test]),
                      f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"]
        yield "| " + " | ".join(cells) + " |"


def measure(file, shape, kind, threads, options):
    ours = Ours(options.moesaic, options)
    peer = Llama(options.llama_bench, options) if options.llama_bench else None
    sides = [ours, peer] if peer else [ours]
    works = ["single"]
    if threads == max(options.threads):
        works += ["deep"] * (options.depth > 0) + ["batched"] * bool(options.batches)
    for work in works:
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                print(f"{shape} {kind}, {threads} threads, {work}, round {number + 1} of {options.rounds}: "
                      f"{type(side).__name__}", file=sys.stderr)
                getattr(side, work)(file, DTYPES[kind], threads)
    for row in rows(shape, kind, threads, ours, peer):
        print(row, flush=True)


def numbers(text):
    return [int(number) for number in text.split(",") if number]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic", type=pathlib.Path)
    parser.add_argument("shapes", type=pathlib.Path)
    parser.add_argument("--llama-bench", type=pathlib.Path, help="default: $LLAMA_BENCH")
    parser.add_argument("--llama-flags", default="", help="more flags of llama-bench")
    parser.add_argument("--shape", action="append", help="default: qwen3-30b-a3b and deepseek-v2-lite")
    parser.add_argument("--type", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--threads", type=numbers, default=sorted({1, os.cpu_count()}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4096, help="decode behind so many tokens too; 0: don't")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16], help="empty: no batched decode")
    parser.add_argument("--quick", action="store_true", help="3 rounds of pp128, pp512, tg32 of q8_0")
    options = parser.parse_args()
    if options.llama_bench is None and os.environ.get("LLAMA_BENCH"):
        options.llama_bench = pathlib.Path(os.environ["LLAMA_BENCH"])
    if options.quick:
        options.rounds, options.prompts, options.decode, options.batches = 3, [128, 512], 32, []
        options.type, options.threads, options.depth = ["q8_0"], [os.cpu_count()], 0
    shapes = options.shape or ["qwen3-30b-a3b", "deepseek-v2-lite"]
    kinds = options.type or list(DTYPES)
    maker = pathlib.Path(__file__).with_name("make_shapes.py")
    flags = [flag for shape in shapes for flag in ("--shape", shape)] + [f for k in kinds for f in ("--type", k)]
    subprocess.run([sys.executable, maker, options.shapes, *flags], check=True, stdout=sys.stderr)
    head = ["shape", "weights", "threads", "test", "Moesaic t/s", "of peak"]
    head += ["llama.cpp t/s", "ratio"] if options.llama_bench else []
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    for shape in shapes:
        for kind in kinds:
            for threads in options.threads:
                measure(options.shapes / f"{shape}-{kind}.gguf", shape, kind, threads, options)


if __name__ == "__main__":
    main()
