#!/usr/bin/env python3
"""Compares encoding speed with HF's `tokenizers`: same text, machine and run, one thread.

usage: tokenizer_vs_hf.py BENCH_BINARY TOKENIZER_FOLDER TEXT_FILE [--rounds N]

BENCH_BINARY is text_tokenizer_bench. The two sides alternate. Prints medians, the spread (lowest and highest round) and
the ratio of the medians. HF is measured in its fastest form (encode_batch_fast, which skips
offsets) and in its usual one (encode). Needs the Python package tokenizers.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers

PIECE_BYTES = 4096  # as in tokenizer_bench.cc


def pieces(data):
    at = 0
    while at < len(data):
        line = data.find(b"\n", min(at + PIECE_BYTES, len(data)))
        end = len(data) if line < 0 else line + 1
        yield data[at:end].decode()
        at = end


def timed(encode, texts, size):
    start = time.perf_counter()
    for text in texts:
        encode(text)
    return size / (time.perf_counter() - start) / 1e6


def ours(args):
    command = [args.binary, args.folder, args.text, "--benchmark_format=json", "--benchmark_filter=Encode"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["benchmarks"][0]["bytes_per_second"] / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("folder")
    parser.add_argument("text")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with open(args.text, "rb") as file:
        data = file.read()
    texts = list(pieces(data))
    peer = tokenizers.Tokenizer.from_file(os.path.join(args.folder, "tokenizer.json"))
    sides = {
        "moesaic": lambda: ours(args),
        "HF encode_batch_fast": lambda: timed(
            lambda text: peer.encode_batch_fast([text], add_special_tokens=False), texts, len(data)),
        "HF encode": lambda: timed(lambda text: peer.encode(text, add_special_tokens=False), texts, len(data)),
    }
    rounds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rounds[name].append(side())
    print(f"{os.path.basename(args.text)}, {len(data) / 1e6:.2f} MB, tokenizers {tokenizers.__version__}, "
          f"median of {args.rounds} rounds in turn")
    base = statistics.median(rounds["moesaic"])
    for name, speeds in rounds.items():
        median = statistics.median(speeds)
        print(f"  {name:22} {median:7.2f} MB/s  ({min(speeds):.2f} to {max(speeds):.2f})   moesaic/this {base / median:.2f}")


if __name__ == "__main__":
    main()
