#!/usr/bin/env python3
"""Compares a plan of two slots per rank with the best one that exists, for some layers of one load.

Usage: pair_bound.py LOAD.npy PLAN.json [--every 6] [--relaxed]. PLAN is written by `moesaic placement plan`. A replica has an equal share of its
expert's tokens. Replicas with a largest pair sum T exist if, for every replica of size s > T/2, as many replicas are at most T - s as
are at least s: an integer programme over the number of replicas of each expert, which HiGHS solves (scipy). T is bisected between an
infeasible value and the plan's. With --relaxed the programme is linear, which takes seconds for all layers and gives a smaller lower bound.
"""
import argparse
import json

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

FURTHER = 6  # numbers of replicas tried for an expert, from the smallest one whose replicas are below T
WIDTH = 1.5e-3  # of the interval at the end
LIMIT_S = 60  # of a programme; one that takes longer counts as infeasible, and the row is marked


def exists(loads, ranks, largest, integral=True):
    """Whether replicas with pairs of at most `largest` exist; None: not known."""
    expert, copies = [], []
    for e, load in enumerate(loads):
        least = max(1, int(np.ceil(load / largest - 1e-12)))
        expert += [e] * FURTHER
        copies += range(least, least + FURTHER)
    expert, copies = np.array(expert), np.array(copies, float)
    size, n = loads[expert] / copies, len(expert)
    rows, columns, values = [], [], []
    for row, small in enumerate(np.unique(largest - size[size > largest / 2])):
        above, below = np.where(size >= largest - small - 1e-12)[0], np.where(size <= small + 1e-12)[0]
        rows += [row] * (len(above) + len(below))
        columns += [*above, *below]
        values += [*copies[above], *-copies[below]]
    constraints = []
    if rows:
        constraints.append(LinearConstraint(coo_matrix((values, (rows, columns)), (max(rows) + 1, n)).tocsr(), -np.inf, 0))
    total = coo_matrix(([*np.ones(n), *copies], ([*expert, *[len(loads)] * n], [*range(n)] * 2)), (len(loads) + 1, n)).tocsr()
    needed = np.append(np.ones(len(loads)), 2 * ranks)
    constraints.append(LinearConstraint(total, needed, needed))
    status = milp(np.zeros(n), constraints=constraints, integrality=np.full(n, int(integral)), bounds=Bounds(0, 1), options={"time_limit": LIMIT_S}).status
    return {0: True, 2: False}.get(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load")
    parser.add_argument("plan")
    parser.add_argument("--every", type=int, default=6, help="distance of the layers that are measured")
    parser.add_argument("--relaxed", action="store_true", help="allow fractional numbers of replicas")
    arguments = parser.parse_args()
    load, placement = np.load(arguments.load).astype(float), json.load(open(arguments.plan))["layers"]
    rows = []
    for layer in range(0, len(load), arguments.every):
        ranks, loads = len(placement[layer]), load[layer] / load[layer].sum() * len(placement[layer])
        copies = np.bincount([e for held in placement[layer] for e in held], minlength=len(loads))
        ours = high = max(sum(loads[e] / copies[e] for e in held) for held in placement[layer])
        low, known = ours, True
        while True:  # down to an infeasible value
            low *= 0.98
            found = exists(loads, ranks, low, not arguments.relaxed)
            if not found:
                break
            high = low
        known &= found is not None
        while high - low > WIDTH:
            middle = (low + high) / 2
            found = exists(loads, ranks, middle, not arguments.relaxed)
            known &= found is not None
            low, high = (low, middle) if found else (middle, high)
        rows.append((ours, low, high))
        print(f"layer {layer:3}: plan {ours:.4f}, the best is from {low:.4f} to {high:.4f}{'' if known else ', if time limits mean infeasible'}",
              flush=True)
    ours, low, high = np.mean(rows, axis=0)
    print(f"mean of {len(rows)} layers: plan {ours:.4f}, the best is from {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
