#!/usr/bin/env python3
"""Experts that calibration hardly reaches: shrinkage beside nearest rounding and beside all tokens to all experts.

    python3 bench/quantizer/rare_experts.py build/release/bin/moesaic [--rounds 8] [--cases short,skewed,...]

Experts of moesaic-tiny, and nothing else of it, are rounded to int4 in groups of 32 by `--method gptq` with
`--rare-experts shrink`, `identity` and `all`, and run over held-out text beside the bf16 model. Each round draws another
calibration text, the same for all three; KL is in nats a token, and a ratio of two is the geometric mean over rounds
with its 95% interval (Student's t of the logarithms, paired by round).

short     little text of all kinds, the model as it was trained
skewed    more text, but a model whose routers were given a preference: each expert's e_score_correction_bias is lowered
          by up to --skew, in an order drawn for each layer, so that some experts are hardly ever chosen, for calibration
          and held-out text alike. The model that it is held against has the same preference.
starved   the same preference for calibration alone: what it gives is run by the routers as they were trained, so that
          experts are in use that calibration hardly saw
narrow    text of one kind alone (questions of fact), held-out text of all kinds
wide      much text of all kinds: no expert is rare

Needs tokenizers, safetensors and numpy.
"""
import argparse
import json
import math
import pathlib
import random
import shutil
import statistics
import tempfile

import numpy
import safetensors.numpy
from tokenizers import Tokenizer

import compare
from compare import TINY, generate

FACTS = generate.Mix((1, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0, 0, 0))
CASES = {"short": (generate.LAST, 256), "skewed": (generate.LAST, 4096), "starved": (generate.LAST, 4096),
         "narrow": (FACTS, 512), "wide": (generate.LAST, 24576)}
MODES = ("shrink", "identity", "all")
RARE = 32  # tokens, as in calibrated_run.h
ALL_BUT_EXPERTS = "self_attn|shared_experts|layers.0.mlp"
LENGTH = 128  # of a sequence
# Quantiles of Student's t, 97.5%, by degrees of freedom.
STUDENT = (0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def write_calibration(path, mix, tokens, seed):
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    sampler = generate.Sampler(random.Random(f"rare experts {seed}"))
    ids = []
    while len(ids) < tokens:
        ids += tokenizer.encode(compare.conversations_text(sampler.conversation(512, mix)), add_special_tokens=False).ids
    rows = numpy.array(ids[:tokens], numpy.int32).reshape(-1, LENGTH)
    safetensors.numpy.save_file({"tokens": rows}, path)


def map_biases(folder, change):
    """Puts change(name, bias) in the place of each e_score_correction_bias of a folder's one file."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name.endswith("e_score_correction_bias"):
            part = slice(*(begin + offset for offset in entry["data_offsets"]))
            data[part] = change(name, numpy.frombuffer(bytes(data[part]), numpy.float32)).astype(numpy.float32).tobytes()
    path.write_bytes(data)


def skew(folder, most):
    """Lowers the correction biases by up to `most`."""
    rng = random.Random(0)
    map_biases(folder, lambda _, bias: bias - most * numpy.array(rng.sample(range(len(bias)), len(bias))) / (len(bias) - 1))


def copy_biases(source, folder):
    biases = {}
    map_biases(source, lambda name, bias: biases.setdefault(name, bias))
    map_biases(folder, lambda name, _: biases[name])


def ratio(over, under):
    """exp of the mean logarithm of the ratios, and the ends of its interval."""
    logs = [math.log(a / b) for a, b in zip(over, under)]
    mean = statistics.mean(logs)
    half = STUDENT[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"**{math.exp(mean):.3f}** ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


class Bench:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        self.text, self.trained, self.skewed = folder / "held_out.txt", folder / "trained", folder / "skewed"
        shutil.copytree(TINY, self.trained)
        shutil.copytree(TINY, self.skewed)
        skew(self.skewed, arguments.skew)
        compare.write_held_out(self.text)

    def moesaic(self, *flags):
        return compare.run([self.arguments.moesaic, *flags])[0]

    def round(self, base, case, seed):
        """({mode: KL}, share of experts with few tokens)."""
        calibration, out = self.folder / "calibration.safetensors", self.folder / "out"
        mix, tokens = CASES[case]
        model = self.skewed if case in ("skewed", "starved") else self.trained
        write_calibration(calibration, mix, tokens, f"{case} {seed}")
        kl = {}
        for mode in MODES:
            shutil.rmtree(out, ignore_errors=True)
            self.moesaic("quantize", model, "-o", out, "--scheme", "w4a16", "--method", "gptq", "--calibration", calibration,
                         "--min-coverage", "0", "--keep", "bf16", ALL_BUT_EXPERTS, "--rare-experts", mode)
            if case == "starved":
                copy_biases(self.trained, out)
            told = self.moesaic("perplexity", out, "--text", self.text, "--kl-base", base, "-c", "512", "--max-tokens",
                                self.arguments.tokens, "--format", "json")
            kl[mode] = json.loads(told)["kl"]
        layers = json.loads((out / "quantize.json").read_text())["routing"]
        counts = [tokens for layer in layers for tokens in layer["tokens"]]
        return kl, sum(tokens < RARE for tokens in counts) / len(counts)

    def case(self, case):
        base = self.folder / "base"
        self.moesaic("perplexity", self.skewed if case == "skewed" else self.trained, "--text", self.text, "--save-logits",
                     base, "-c", "512", "--max-tokens", self.arguments.tokens)
        rounds = [self.round(base, case, seed) for seed in range(self.arguments.rounds)]
        kl = {mode: [kls[mode] for kls, _ in rounds] for mode in MODES}
        means = " | ".join(f"{statistics.mean(kl[mode]):.5f}" for mode in MODES)
        rare = statistics.mean(share for _, share in rounds)
        print(f"| {case} | {CASES[case][1]} | {rare:.0%} | {means} | {ratio(kl['shrink'], kl['identity'])} | "
              f"{ratio(kl['shrink'], kl['all'])} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--rounds", type=int, default=8, choices=range(2, len(STUDENT) + 1), metavar="2 to 16")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--skew", type=float, default=1.2)
    parser.add_argument("--tokens", type=int, default=16384, help="of the held-out text")
    arguments = parser.parse_args()
    print("| case | calibration tokens | experts with fewer than 32 | KL, shrink | identity | all | shrink / identity | shrink / all |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, pathlib.Path(folder))
        for case in arguments.cases.split(","):
            bench.case(case)


if __name__ == "__main__":
    main()
