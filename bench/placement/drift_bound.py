#!/usr/bin/env python3
"""Estimates how well a static plan can do on a workload that drifts on its own, expert by expert.

Usage: drift_bound.py [--ranks 72] [--slots 288] [--layers 12] [--workloads 6] [--correlation 0.83] [--spread 0.9]

The loads are those of `moesaic placement generate --drift independent`: logarithms of an expert's loads in two workloads have a common
normal part and parts of their own. A plan knows all workloads but one, so that the left-out load of an expert has a known log-normal
distribution. The problem is relaxed: in each sample, the busiest rank has at least the mean, at least the sum of the experts that have
their only replica there, and, for an expert with c replicas, at least a c-th of its load. Tokens of replicated experts cost nothing
else. The numbers of replicas are given one by one to the expert with the largest share, and the other experts are divided among the
ranks by a local search over samples. Neither is proven to be optimal, so the result is an estimate of the bound and is measured on other
samples.
"""
import argparse
import math

import numpy as np

SAMPLES = 400  # loads that are drawn for each layer
STEPS = 20000  # of the search in a layer
POWER = 24  # the search minimizes the mean of the ranks' loads with this exponent, a smooth form of their maximum


def posterior(random, options, spread):
    """Samples [samples, experts] of the left-out workload, given the others."""
    known = options.workloads - 1
    common = math.log(1 + options.correlation * (math.exp(spread**2) - 1)) / spread**2  # correlation of the logarithms / spread
    shared = random.standard_normal(options.experts)
    seen = math.sqrt(common) * shared + math.sqrt(1 - common) * random.standard_normal((known, options.experts))
    weight = known * common / (1 + (known - 1) * common)
    deviation = math.sqrt(1 - weight * common)
    normal = weight * seen.mean(axis=0) + deviation * random.standard_normal((SAMPLES * 2, options.experts))
    loads = np.exp(spread * normal)
    return loads / loads.mean(axis=1, keepdims=True) * options.ranks / options.experts  # the mean of ranks is 1


def divide(random, loads, ranks):
    """Ranks of the experts, for a small expected maximum of [samples, experts]."""
    experts = loads.shape[1]
    rank_of, sums = np.zeros(experts, int), np.zeros((ranks, len(loads)))
    for expert in np.argsort(-loads.mean(axis=0)):
        rank = np.argmin(sums.mean(axis=1))
        rank_of[expert] = rank
        sums[rank] += loads[:, expert]

    def height(row):
        return row**POWER

    powers = height(sums)
    total = powers.sum(axis=0)
    best = (total ** (1 / POWER)).mean()
    for _ in range(STEPS):
        one, other = random.integers(experts, size=2)
        a, b = rank_of[one], rank_of[other]
        if a == b:
            continue
        swaps = random.random() < 0.7
        shift = loads[:, other] - loads[:, one] if swaps else -loads[:, one]
        next_a, next_b = height(sums[a] + shift), height(sums[b] - shift)
        changed = total - powers[a] - powers[b] + next_a + next_b
        value = (np.maximum(changed, 0) ** (1 / POWER)).mean()
        if value >= best:
            continue
        best, total = value, changed
        sums[a] += shift
        sums[b] -= shift
        powers[a], powers[b] = next_a, next_b
        rank_of[one] = b
        if swaps:
            rank_of[other] = a
    return rank_of


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 72), ("slots", 288), ("experts", 256), ("layers", 12), ("workloads", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--correlation", type=float, default=0.83)
    parser.add_argument("--spread", type=float, default=0.9)
    options = parser.parse_args()
    rows = []
    for layer in range(options.layers):
        random = np.random.default_rng(layer)
        spread = options.spread * (1 + 0.2 * (2 * layer / max(1, options.layers - 1) - 1))
        loads = posterior(random, options, spread)
        plan, test = loads[:SAMPLES], loads[SAMPLES:]
        copies = np.ones(options.experts)
        for _ in range(options.slots - options.experts):
            copies[np.argmax(((plan / copies)**POWER).mean(axis=0))] += 1
        single = copies == 1
        sums = np.zeros((options.ranks, len(test)))
        np.add.at(sums, divide(random, plan[:, single], options.ranks), test[:, single].T)
        shares = (test / copies)[:, ~single].max(axis=1)
        found = np.maximum(np.maximum(sums.max(axis=0), shares), 1).mean()
        rows.append((found, sums.max(axis=0).mean(), shares.mean(), single.sum()))
        print(f"layer {layer:2}: spread {spread:.2f}, {rows[-1][3]} experts have one replica; busiest rank of these {rows[-1][1]:.3f}, largest "
              f"share of the others {rows[-1][2]:.3f}, together {found:.3f}", flush=True)
    print(f"mean of {len(rows)} layers, EP{options.ranks}/{options.slots}: no static plan has less than about {np.mean(rows, axis=0)[0]:.3f}")


if __name__ == "__main__":
    main()
