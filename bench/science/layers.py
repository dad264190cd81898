#!/usr/bin/env python3
"""Measures moesaic.layers against PyTorch eager on the shapes of a 512-residue protein, in one run.

Usage: layers.py [--threads N] [--repetitions N] [--residues N] [--cpu-time]. The PyTorch layers are the transcriptions
that made the goldens (src/science/goldens), in float32 and inference mode.
"""
import argparse
import pathlib
import sys

import torch

import moesaic
from graph_operators import add_options, measure, prepare, report
from moesaic import graph, layers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src" / "science" / "goldens"))
import evoformer  # noqa: E402
import make_goldens  # noqa: E402
import se3  # noqa: E402


def pair(title, ours, theirs, repetitions):
    with torch.inference_mode():
        report(title, measure({"moesaic": ours, "PyTorch eager": theirs}, repetitions), "moesaic")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, 5)
    parser.add_argument("--residues", type=int, default=512)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float32)
    prepare(options)
    torch.manual_seed(1)
    n = options.residues
    print(f"PyTorch {torch.__version__}, kernels {moesaic.kernels()}, {options.threads} threads, {n} residues")
    xyz = torch.cumsum(torch.nn.functional.normalize(torch.randn(n, 3), dim=-1) * 3.8, 0)
    for hidden in (128, 256):
        dst, src = layers.knn_graph(xyz, 64)
        plan, layer = graph.Graph(src, dst, n, n), make_goldens.Egnn(hidden, hidden, 0, False)
        mine, h, edge = layers.EgnnLayer(layer.state_dict(), hidden), torch.randn(n, hidden), torch.zeros(len(src), 0)
        pair(f"EGNN, hidden {hidden}, 64 neighbours", lambda: mine(plan, h, xyz), lambda: layer(h, xyz, src, dst, edge),
             options.repetitions)
    ipa = evoformer.InvariantPointAttention(384, 128, 12, 16, 4, 8)
    s, z = torch.randn(n, 384), torch.randn(n, n, 128)
    rotation, translation, mask = torch.linalg.qr(torch.randn(n, 3, 3))[0], xyz, torch.ones(n)
    mine = layers.InvariantPointAttention(ipa.state_dict())
    pair("Invariant point attention", lambda: mine(s, z, rotation, translation), lambda: ipa(s, z, rotation, translation, mask),
         options.repetitions)
    multiplication, pairs = evoformer.TriangleMultiplication(128, 128, False), torch.ones(n, n)
    triangle = layers.TriangleMultiplication(multiplication.state_dict())
    pair("Triangle multiplication, 128 channels", lambda: triangle(z), lambda: z + multiplication(z, pairs), options.repetitions)
    fiber_in, fiber_out = {0: 32, 1: 3}, {0: 16, 1: 16}
    block = se3.AttentionBlock(fiber_in, fiber_out, 32, 4, 2)
    dst, src = layers.knn_graph(xyz, 64)
    plan, edge = graph.Graph(src, dst, n, n), torch.randn(len(src), 32)
    features = {d: torch.randn(n, c, 2 * d + 1) for d, c in fiber_in.items()}
    mine_se3 = layers.Se3AttentionBlock(block.state_dict(), fiber_in, fiber_out, 32, 4, 2)
    offsets = xyz[src] - xyz[dst]
    pair("SE(3) attention block, 64 neighbours", lambda: mine_se3(plan, xyz, features, edge),
         lambda: block(features, src, dst, offsets, edge), options.repetitions)


if __name__ == "__main__":
    main()
