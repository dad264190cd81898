#!/usr/bin/env python3
"""Runs the published EPLB on random inputs and stores a hash of each result.

Usage: eplb_goldens.py eplb.py OUT.npy [CASES]

eplb.py is the file of https://github.com/deepseek-ai/EPLB (commit d52c72d); it needs PyTorch (2.15.0 made the stored
goldens). Inputs are made from the number of the case by the same generator as in eplb_test.cc.
"""
import importlib.util
import sys

import numpy
import torch

MASK = (1 << 64) - 1


class Random:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound):
        return self.next() % bound


def case(number):
    """Returns (loads, replicas, groups, nodes, gpus)."""
    random = Random(number)
    layers, nodes = 1 + random.below(3), 1 + random.below(4)
    gpus = nodes * (1 + random.below(6))
    groups = nodes * (1 + random.below(4))
    group_size = 1 + random.below(12) if random.below(8) else 32 + random.below(100)
    experts = groups * group_size
    replicas = -(-experts // gpus) * gpus + gpus * random.below(4)
    kind = random.below(6)
    values = []
    for _ in range(layers * experts):
        value = random.next()
        if kind == 0:
            values.append(value % 4)  # many ties
        elif kind == 1:
            values.append(value % 100000)
        elif kind == 2:
            values.append((value >> 11) / 2**53)  # not a float: rounded first
        elif kind == 3:
            values.append((value >> 40) / 7.0)
        elif kind == 4:
            values.append(5)  # all equal
        else:
            values.append(value % 1000 if value >> 62 else 0)  # mostly zero
    if random.below(4) == 0 and nodes > 1:
        groups += 1  # the group count isn't a multiple of the nodes: global policy
    return torch.tensor(values, dtype=torch.float64).view(layers, experts), replicas, groups, nodes, gpus


def result_hash(arrays):
    """FNV-1a over the values, 64 bits each, folded to 32 bits."""
    value = 0xCBF29CE484222325
    for array in arrays:
        for number in array.flatten().tolist():
            value = ((value ^ (number & MASK)) * 0x100000001B3) & MASK
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def main():
    spec = importlib.util.spec_from_file_location("eplb", sys.argv[1])
    eplb = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(eplb)
    cases = int(sys.argv[3]) if len(sys.argv) > 3 else 10000
    torch.set_num_threads(1)
    hashes = [result_hash(eplb.rebalance_experts(*case(number))) for number in range(cases)]
    numpy.save(sys.argv[2], numpy.array(hashes, dtype=numpy.uint32))


if __name__ == "__main__":
    main()
