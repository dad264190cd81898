#!/usr/bin/env python3
"""Writes the token ids of prompts of one domain (sums of small numbers) for engine_expert_moves_bench.

Usage: domain_prompts.py MOESAIC MODEL OUT [--prompts 8] [--tokens 200]

Each line of OUT has the ids of one prompt, separated by commas.
"""
import argparse
import json
import pathlib
import subprocess

from rebalance_bench import PROMPTS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    texts = [" ".join(f"{PROMPTS[(2 * number + part) % len(PROMPTS)]} {11 + part}." for part in range(1 + options.tokens // 25))
             for number in range(options.prompts)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    output = subprocess.run([options.binary, "tokenize", options.model], input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout
    ids = [json.loads(line)["ids"] for line in output.splitlines()]
    shortest = min(map(len, ids))
    if shortest < options.tokens:
        parser.error(f"these prompts have at most {shortest} tokens, but --tokens is {options.tokens}")
    options.out.write_text("".join(",".join(map(str, prompt[:options.tokens])) + "\n" for prompt in ids))


if __name__ == "__main__":
    main()
