#!/usr/bin/env python3
"""Runs ProteinMPNN with random weights on many proteins of different length, and measures memory and time.

Usage: dynamic_shapes.py [--proteins N] [--shortest N] [--longest N] [--neighbours N] [--threads N] [--cpu-time]. Every protein is a
new graph. Prints the resident memory along the way, the fit of time = a + b * edges, and the times per edge by length.
"""
import argparse
import pathlib
import random
import statistics
import time

import numpy as np

import moesaic
from moesaic import layers

HIDDEN, LETTERS = 128, 21


def random_state(rng):
    """The published architecture: 3 encoder and 3 decoder layers of 128 channels."""
    state = {}

    def linear(name, outputs, inputs, bias=True):
        state[f"{name}.weight"] = rng.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        if bias:
            state[f"{name}.bias"] = np.zeros(outputs, np.float32)

    def norm(name):
        state[f"{name}.weight"], state[f"{name}.bias"] = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)

    linear("features.embeddings.linear", 16, 66)
    linear("features.edge_embedding", HIDDEN, 416, bias=False)
    norm("features.norm_edges")
    linear("W_e", HIDDEN, HIDDEN)
    linear("W_out", LETTERS, HIDDEN)
    state["W_s.weight"] = rng.normal(0, 1, (LETTERS, HIDDEN)).astype(np.float32)
    for side, inputs, names in (("encoder", 3 * HIDDEN, ("W1", "W2", "W3", "W11", "W12", "W13")), ("decoder", 4 * HIDDEN, ("W1", "W2", "W3"))):
        for layer in range(3):
            scope = f"{side}_layers.{layer}"
            for name in names:
                linear(f"{scope}.{name}", HIDDEN, inputs if name in ("W1", "W11") else HIDDEN)
            for i in range(1, 4 if side == "encoder" else 3):
                norm(f"{scope}.norm{i}")
            linear(f"{scope}.dense.W_in", 4 * HIDDEN, HIDDEN)
            linear(f"{scope}.dense.W_out", HIDDEN, 4 * HIDDEN)
    return state


def backbone(rng, length):
    """A random walk of residues 3.8 angstroms apart with atoms N, CA, C and O around it."""
    step = rng.normal(size=(length, 3))
    ca = np.cumsum(3.8 * step / np.linalg.norm(step, axis=1, keepdims=True), 0)
    return (ca[:, None] + rng.normal(0, 0.8, (length, 4, 3))).astype(np.float32)


def resident_mib():
    """The resident memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def run(proteins, shortest, longest, neighbours, clock, seed=1):
    """Returns edges and seconds of every protein, and the resident memory after each."""
    rng, order = np.random.default_rng(seed), random.Random(seed)
    model = layers.ProteinMpnn(random_state(rng), neighbours)
    # Each length once while there are enough, in random order.
    lengths = [shortest + i * (longest - shortest) // max(1, proteins - 1) for i in range(proteins)]
    order.shuffle(lengths)
    edges, seconds, memory = [], [], []
    for length in [longest, *lengths]:  # the longest first: scratch memory has its final size after it
        xyz, index = backbone(rng, length), np.arange(length, dtype=np.int32)
        sequence = rng.integers(0, 20, length).astype(np.int32)
        ones, decoding = np.ones(length, np.int32), rng.permutation(length).astype(np.int32)
        begin = clock()
        logs = model.log_probabilities(xyz, ones, index, ones, sequence, decoding)
        seconds.append(clock() - begin)
        edges.append(length * min(length, neighbours))
        memory.append(resident_mib())
        assert np.isfinite(logs).all()
    return edges[1:], seconds[1:], memory[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proteins", type=int, default=1000)
    parser.add_argument("--shortest", type=int, default=50)
    parser.add_argument("--longest", type=int, default=1049)
    parser.add_argument("--neighbours", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time instead of elapsed time")
    options = parser.parse_args()
    moesaic.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    edges, seconds, memory = run(options.proteins, options.shortest, options.longest, options.neighbours, clock)
    print(f"{len(edges)} proteins of {options.shortest} to {options.longest} residues, {options.neighbours} neighbours, kernels "
          f"{moesaic.kernels()}, {options.threads} threads")
    tenth = max(1, len(memory) // 10)
    print("resident memory, MiB:", " ".join(f"{memory[i]:.0f}" for i in range(0, len(memory), tenth)), f"{memory[-1]:.0f}")
    slope, offset = np.polyfit(edges, seconds, 1)
    residual = np.asarray(seconds) - (slope * np.asarray(edges) + offset)
    explained = 1 - residual.var() / np.var(seconds)
    print(f"time = {1e3 * offset:.2f} ms + {1e6 * slope:.2f} us per edge, R^2 = {explained:.4f}")
    ordered = sorted(zip(edges, seconds))
    for part in range(4):
        rows = ordered[part * len(ordered) // 4:(part + 1) * len(ordered) // 4]
        if rows:
            print(f"  {rows[0][0]:6} to {rows[-1][0]:6} edges: median {1e6 * statistics.median(s / e for e, s in rows):.2f} us per edge")


if __name__ == "__main__":
    main()
