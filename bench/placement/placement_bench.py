#!/usr/bin/env python3
"""Measures `moesaic placement` on generated loads and prints Markdown tables.

Usage: placement_bench.py MOESAIC [--layers 58] [--seeds 3] [--only TABLE ...] [--patterns FOLDER]

Needs numpy and scipy (HiGHS is the oracle of the exact split). FOLDER holds patterns of OmniPlacement (*.npy.gz). Each
number is a mean over layers, left-out workloads and seeds of the largest rank load over the mean, unless it is said.
"""
import argparse
import gzip
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

PATTERN_LAYERS = 58  # of OmniPlacement's files
SIZES = ((16, 288, 0.3), (32, 288, 0.3), (72, 288, 0.3), (144, 288, 0.35))  # ranks, slots, moves per rank
TABLES = ("left_out", "known", "redundancy", "speeds", "front", "times")
FAMILIES = (("mixtures of 4 profiles", ("--drift", "mixtures")), ("independent drift", ("--drift", "independent")),
            ("power law, mixtures", ("--drift", "mixtures", "--skew", "power-law")))


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    print()


class Bench:
    def __init__(self, binary, folder, layers, seeds):
        self.binary, self.folder, self.layers, self.seeds = binary, folder, layers, seeds

    def run(self, *words):
        command = [self.binary, "placement", *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def loads(self, seed, *flags):
        out = self.folder / f"loads-{seed}-{'-'.join(flags).replace('--', '')}"
        if not out.is_dir():
            self.run("generate", "--out", out, "--layers", self.layers, "--seed", seed, *flags)
        return sorted(out.glob("*.npy"))

    def compare(self, *words):
        return json.loads(self.run("compare", *words, "--json"))["policies"]

    def left_out(self):
        for name, flags in FAMILIES:
            print(f"### Leave one workload out: {name}\n")
            rows = []
            for ranks, slots, moves in SIZES:
                results = []
                for seed in self.seeds:
                    words = (*self.loads(seed, *flags), "--ranks", ranks, "--slots", slots, "--leave-one-out", "--split")
                    policies = self.compare(*words)
                    policies["moves"] = self.compare(*words, "--moves", moves)["moesaic"]
                    results.append(policies)

                def mean(policy):
                    values = [result[policy]["mean"] for result in results if policy in result]
                    return statistics.mean(values) if values else "-"

                rows.append((f"EP{ranks}/{slots}", *map(mean, ("default", "eplb", "eplb+split", "omni", "flashlb", "swift",
                                                              "lplb", "moesaic", "moves"))))
            table(("size", "default", "EPLB", "EPLB + our split", "Omni", "FlashLB", "Swift", "LPLB", "ours, split",
                   "ours, moves"), rows)

    def known(self):
        """One workload that is known: plan and measure on it."""
        rows = []
        for ranks, slots, _ in SIZES:
            values = {"eplb": [], "moesaic": []}
            for seed in self.seeds:
                for load in self.loads(seed, *FAMILIES[0][1])[:2]:
                    policies = self.compare(load, "--ranks", ranks, "--slots", slots)
                    for policy, means in values.items():
                        means.append(policies[policy]["mean"])
            rows.append((f"EP{ranks}/{slots}", *(statistics.mean(values[policy]) for policy in values)))
        print("### One known workload, equal shares\n")
        table(("size", "EPLB", "ours"), rows)

    def redundancy(self):
        rows, uniform_extra = [], self.layers * 32
        for share in (0, 8, 4, 2, 1):
            means = []
            for seed in self.seeds:
                load = self.loads(seed, *FAMILIES[0][1])[0]
                extra = uniform_extra // share if share else 0
                printed = json.loads(self.run("plan", load, "--ranks", 32, "--slots", 256, "--extra-replicas", extra, "--json"))
                means.append(printed["loads"][0]["mean"])
            rows.append((extra, statistics.mean(means)))
        uniform = statistics.mean(self.compare(self.loads(seed, *FAMILIES[0][1])[0], "--ranks", 32, "--slots", 288)["eplb"]["mean"]
                                  for seed in self.seeds)
        print(f"### Redundancy where it helps: EP32, one known workload (EPLB with {uniform_extra} replicas: {uniform:.4f})\n")
        table((f"extra replicas over {self.layers} layers", "ours"), rows)

    def speeds(self):
        """Ranks of two speeds; the split is compared with the linear programme over the same replicas."""
        speeds = numpy.array([1.0] * 8 + [0.4] * 8)
        load = self.loads(self.seeds[0], *FAMILIES[0][1])[0]
        out = self.folder / "speeds.json"
        printed = json.loads(self.run("plan", load, "--ranks", 16, "--slots", 288, "--speeds", ",".join(map(str, speeds)),
                                      "--out", out, "--json"))["loads"][0]
        tokens = numpy.load(load).astype(float)
        optima = []
        for layer, ranks in enumerate(json.loads(out.read_text())["layers"]):
            arcs = [(expert, rank) for rank, experts in enumerate(ranks) for expert in experts]
            equal = lil_matrix((tokens.shape[1], len(arcs) + 1))
            below = lil_matrix((len(ranks), len(arcs) + 1))
            for index, (expert, rank) in enumerate(arcs):
                equal[expert, index] = 1
                below[rank, index] = 1
            below[:, len(arcs)] = -speeds[:, None]
            cost = numpy.zeros(len(arcs) + 1)
            cost[-1] = 1
            share = tokens[layer] / tokens[layer].sum() * speeds.sum()
            optima.append(linprog(cost, below.tocsr(), numpy.zeros(len(ranks)), equal.tocsr(), share, method="highs").fun)
        print("### Ranks of speeds 1 and 0.4, EP16/288: largest load / speed over the bound total load / total speed\n")
        table(("equal shares", "exact split", "HiGHS on the same replicas"),
              [(printed["mean"], printed["split_mean"], statistics.mean(optima))])

    def front(self):
        print("### Balance and traffic, EP32/288 on 4 nodes, 4 of 8 groups per token, two workloads that are known\n")
        points = json.loads(self.run("front", *self.loads(self.seeds[0], *FAMILIES[0][1])[:2], "--ranks", 32, "--slots", 288,
                                     "--nodes", 4, "--groups", 8, "--top-groups", 4, "--json"))
        table(("policy", "weight", "largest rank over mean", "other nodes of a token", "dominated"),
              [(point["policy"], f"{point['traffic_weight']:g}", point["mean"], point["remote_nodes"],
                "yes" if point["dominated"] else "no") for point in points])

    def times(self):
        rows = []
        loads = self.loads(self.seeds[0], *FAMILIES[0][1])
        for ranks, slots, _ in SIZES:
            for count in (1, 6):
                out, seconds = self.folder / "times.json", []
                for _ in range(5):
                    start = time.perf_counter()
                    self.run("plan", *loads[:count], "--ranks", ranks, "--slots", slots, "--out", out)
                    seconds.append(time.perf_counter() - start)
                split = json.loads(self.run("evaluate", loads[-1], "--plan", out, "--json"))["loads"][0]["split_us"]
                rows.append((f"EP{ranks}/{slots}", count, f"{statistics.median(seconds):.2f}", f"{split:.0f}"))
        print(f"### Time of a plan of {self.layers} layers of 256 experts (whole command) and of a batch's split per layer\n")
        table(("size", "workloads", "plan, s", "split, us"), rows)

    def patterns(self, folder):
        rows = []
        load = self.loads(self.seeds[0], *FAMILIES[0][1])[0]
        for path in sorted(folder.glob("*.npy.gz")):
            pattern = self.folder / "pattern.npy"
            pattern.write_bytes(gzip.decompress(path.read_bytes()))
            printed = json.loads(self.run("evaluate", load, "--plan", pattern, "--json"))
            ranks, replicas = printed["ranks"], printed["replicas"]
            ours = json.loads(self.run("plan", load, "--ranks", ranks, "--slots", 256, "--extra-replicas",
                                       replicas - self.layers * 256, "--json"))["loads"][0]["mean"]
            rows.append((path.name.split(".")[0][:48], ranks, replicas, printed["loads"][0]["mean"],
                         printed["loads"][0]["split_mean"], ours))
        print("### Patterns of OmniPlacement on a generated load, which they were not made for\n")
        table(("pattern", "ranks", "replicas", "equal shares", "our split", "our plan, as many replicas"), rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--layers", type=int, default=PATTERN_LAYERS, help="layers of the loads; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="loads have the seeds 1 to this number; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, metavar="TABLE", help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--patterns", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.layers < 1 or arguments.seeds < 1:
        parser.error("--layers and --seeds must be at least 1")
    if arguments.patterns and arguments.layers != PATTERN_LAYERS:
        parser.error(f"--patterns has {PATTERN_LAYERS} layers, and so must the loads; found --layers {arguments.layers}")
    with tempfile.TemporaryDirectory(prefix="moesaic-placement-bench-") as folder:
        bench = Bench(arguments.binary, pathlib.Path(folder), arguments.layers, range(1, arguments.seeds + 1))
        for name in arguments.only:
            getattr(bench, name)()
        if arguments.patterns:
            bench.patterns(arguments.patterns)


if __name__ == "__main__":
    main()
