#!/usr/bin/env python3
"""Measures moesaic.layers against PyTorch on the shapes of a 512-residue protein, in one run.

Usage: layers.py [--threads N] [--repetitions N] [--residues N] [--only LAYER ...] [--cpu-time] [--compile | --memory]. The PyTorch layers
are the transcriptions that made the goldens (src/science/goldens), in float32 and inference mode. --compile adds torch.compile.
--memory measures the memory of one call instead of times, each side in a process of its own: the largest resident memory over that
before the call.
"""
import argparse
import ctypes
import json
import pathlib
import re
import subprocess
import sys

import torch

import moesaic
from graph_operators import add_options, measure, prepare, report
from moesaic import graph, layers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src" / "science" / "goldens"))
import egnn  # noqa: E402
import evoformer  # noqa: E402
import se3  # noqa: E402
import structure  # noqa: E402


LAYERS = ("egnn128", "egnn256", "ipa", "triangle", "se3", "evoformer", "structure", "gradients", "se3_gradients", "pair_gradients",
          "model_gradients")


SIDES = ("moesaic", "PyTorch eager")
MODE = {"compile": False, "side": None}  # side: the one whose memory this process measures


def status_mib(field):
    """A field of this process's memory."""
    return int(re.search(rf"^{field}:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE).group(1)) / 1024


def peak_mib(function, side):
    """Memory that a call needs. PyTorch's second call, as the first one loads its program; the first one of moesaic, which keeps its
    scratch memory."""
    if side != "moesaic":
        function()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status_mib("VmRSS")
    result = function()
    peak = status_mib("VmHWM") - before
    del result
    return peak


def pair(title, ours, theirs, repetitions, inference=True, wrap=lambda call: call, bound=None):
    """bound is a title and a call that do the least work that the layer must do."""
    functions = dict(zip(SIDES, (wrap(ours), wrap(theirs))))
    if bound:
        functions[f"bound: {bound[0]}"] = bound[1]
    with torch.inference_mode(inference):
        if MODE["compile"]:
            compiled = wrap(torch.compile(theirs))
            try:
                compiled()
                functions["torch.compile"] = compiled
            except Exception as error:  # of the compiler, for which PyTorch has no common base
                print(f"\n{title}: torch.compile fails: {str(error).splitlines()[0]}")
        if MODE["side"]:
            print(json.dumps([title, peak_mib(functions[MODE["side"]], MODE["side"])]))
        else:
            report(title, measure(functions, repetitions), "moesaic")


def compare_memory(arguments):
    """Runs this program for each side and prints the ratios."""
    found = []
    for side in SIDES:
        text = subprocess.run([sys.executable, __file__, *arguments, "--side", side], check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append([json.loads(line) for line in text.splitlines() if line.startswith("[")])
    for (title, ours), (_, theirs) in zip(*found):
        print(f"{title:60} moesaic {ours:8.1f} MiB   PyTorch eager {theirs:8.1f} MiB   {theirs / max(ours, 0.1):6.1f} x")


def egnn_pair(n, xyz, hidden, repetitions):
    dst, src = layers.knn_graph(xyz, 64)
    plan, layer = graph.Graph(src, dst, n, n), egnn.Egnn(hidden, hidden, 0, False)
    mine, h, edge = layers.EgnnLayer(layer.state_dict(), hidden), torch.randn(n, hidden), torch.zeros(len(src), 0)
    pair(f"EGNN, hidden {hidden}, 64 neighbours", lambda: mine(plan, h, xyz), lambda: layer(h, xyz, src, dst, edge), repetitions)


def ipa_pair(n, xyz, repetitions):
    ipa = evoformer.InvariantPointAttention(384, 128, 12, 16, 4, 8)
    s, z = torch.randn(n, 384), torch.randn(n, n, 128)
    rotation, mask = torch.linalg.qr(torch.randn(n, 3, 3))[0], torch.ones(n)
    mine = layers.InvariantPointAttention(ipa.state_dict())
    # Products with z take 2 x 2 x 128 x 12 operations per pair, scores and values 2 x (28 + 40) x 12; projections 2 x 384 x 1152 per
    # residue, and the result 2 x 2112 x 384.
    operations = n * n * 12 * (4 * 128 + 2 * 68) + n * 2 * 384 * (1152 + 2112)
    side = round((operations / 2) ** (1 / 3))
    square = torch.randn(side, side)
    pair("Invariant point attention", lambda: mine(s, z, rotation, xyz), lambda: ipa(s, z, rotation, xyz, mask), repetitions,
         bound=(f"torch.mm of {operations / 1e9:.1f} GFLOP, read of z", lambda: (square @ square, z.sum())))


def triangle_pair(n, repetitions):
    multiplication, pairs, z = evoformer.TriangleMultiplication(128, 128, False), torch.ones(n, n), torch.randn(n, n, 128)
    triangle = layers.TriangleMultiplication(multiplication.state_dict())
    pair("Triangle multiplication, 128 channels", lambda: triangle(z), lambda: z + multiplication(z, pairs), repetitions)


def se3_pair(n, xyz, repetitions):
    fiber_in, fiber_out = {0: 32, 1: 3}, {0: 16, 1: 16}
    block = se3.AttentionBlock(fiber_in, fiber_out, 32, 4, 2)
    dst, src = layers.knn_graph(xyz, 64)
    plan, edge = graph.Graph(src, dst, n, n), torch.randn(len(src), 32)
    features = {d: torch.randn(n, c, 2 * d + 1) for d, c in fiber_in.items()}
    mine = layers.Se3AttentionBlock(block.state_dict(), fiber_in, fiber_out, 32, 4, 2)
    offsets = xyz[src] - xyz[dst]
    pair("SE(3) attention block, 64 neighbours", lambda: mine(plan, xyz, features, edge),
         lambda: block(features, src, dst, offsets, edge), repetitions)


def evoformer_pair(n, sequences, repetitions):
    block = evoformer.EvoformerBlock(256, 128, 32, 8, 32)
    block.tri_att_start, block.tri_att_end = (evoformer.TriangleAttention(128, 4, 32, ending) for ending in (False, True))
    block.tri_mul_out, block.tri_mul_in = (evoformer.TriangleMultiplication(128, 128, incoming) for incoming in (False, True))
    m, z = torch.randn(sequences, n, 256), torch.randn(n, n, 128)
    masks = torch.ones(sequences, n), torch.ones(n, n)
    mine = layers.EvoformerBlock(block.state_dict(), 8, 4)
    pair(f"Evoformer block, {sequences} sequences", lambda: mine(m, z, *masks), lambda: block(m, z, *masks), repetitions)


def structure_pair(n, repetitions):
    module = structure.StructureModule(384, 128, 12, 16, 4, 8, 128, 2, structure.random_geometry())
    single, z, types, mask = torch.randn(n, 384), torch.randn(n, n, 128), torch.randint(0, 21, (n,)), torch.ones(n)
    mine = layers.StructureModule(module.state_dict())
    pair("Structure module, 8 iterations", lambda: mine(single, z, types, mask), lambda: module(single, z, types, mask), repetitions)


def gradient_pair(title, ours, theirs, leaves, repetitions):
    """Forward and backward pass of calls that return tuples, with the gradients of all leaves."""
    def wrap(call):
        return lambda: torch.autograd.grad(sum(x.sum() for x in call()), leaves)

    pair(f"{title}, forward and backward", ours, theirs, repetitions, inference=False, wrap=wrap)


def egnn_gradients(n, xyz, hidden, repetitions):
    dst, src = layers.knn_graph(xyz, 64)
    plan, layer = graph.Graph(src, dst, n, n), egnn.Egnn(hidden, hidden, 0, False)
    mine, h = layers.EgnnLayer(dict(layer.named_parameters()), hidden), torch.randn(n, hidden, requires_grad=True)
    x, edge = xyz.clone().requires_grad_(), torch.zeros(len(src), 0)
    gradient_pair(f"EGNN, hidden {hidden}", lambda: mine(plan, h, x), lambda: layer(h, x, src, dst, edge), [h, x, *layer.parameters()],
                  repetitions)


def se3_gradients(n, xyz, repetitions):
    fiber_in, fiber_out = {0: 32, 1: 3}, {0: 16, 1: 16}
    block = se3.AttentionBlock(fiber_in, fiber_out, 32, 4, 2)
    dst, src = layers.knn_graph(xyz, 64)
    plan, edge, x = graph.Graph(src, dst, n, n), torch.randn(len(src), 32, requires_grad=True), xyz.clone().requires_grad_()
    features = {d: torch.randn(n, c, 2 * d + 1, requires_grad=True) for d, c in fiber_in.items()}
    mine = layers.Se3AttentionBlock(dict(block.named_parameters()), fiber_in, fiber_out, 32, 4, 2)
    gradient_pair("SE(3) attention block, 64 neighbours", lambda: mine(plan, x, features, edge).values(),
                  lambda: block(features, src, dst, x[src] - x[dst], edge).values(), [x, edge, *features.values(), *block.parameters()],
                  repetitions)


def pair_gradients(n, sequences, repetitions):
    attention, pairs = evoformer.TriangleAttention(128, 4, 32, False), torch.ones(n, n)
    z, m = torch.randn(n, n, 128, requires_grad=True), torch.randn(sequences, n, 256, requires_grad=True)
    mine = layers.TriangleAttention(dict(attention.named_parameters()), 4)
    gradient_pair(f"Triangle attention, {n} residues", lambda: (mine(z),), lambda: (z + attention(z, pairs),),
                  [z, *attention.parameters()], repetitions)
    outer, present = evoformer.OuterProductMean(256, 128, 32), torch.ones(sequences, n)
    mean = layers.OuterProductMean(dict(outer.named_parameters()))
    gradient_pair(f"Outer product mean, {n} residues, {sequences} sequences", lambda: (mean(m, z),), lambda: (z + outer(m, present),),
                  [m, z, *outer.parameters()], repetitions)


def model_gradients(n, sequences, repetitions):
    """AlphaFold 2's stack: an Evoformer block and the structure module, with OpenFold's stopped rotations."""
    block = evoformer.EvoformerBlock(256, 128, 32, 8, 32)
    block.tri_att_start, block.tri_att_end = (evoformer.TriangleAttention(128, 4, 32, ending) for ending in (False, True))
    block.tri_mul_out, block.tri_mul_in = (evoformer.TriangleMultiplication(128, 128, incoming) for incoming in (False, True))
    m, z = torch.randn(sequences, n, 256, requires_grad=True), torch.randn(n, n, 128, requires_grad=True)
    masks = torch.ones(sequences, n), torch.ones(n, n)
    mine = layers.EvoformerBlock(dict(block.named_parameters()), 8, 4)
    gradient_pair(f"Evoformer block, {n} residues, {sequences} sequences", lambda: mine(m, z, *masks), lambda: block(m, z, *masks),
                  [m, z, *block.parameters()], repetitions)
    module = structure.StructureModule(384, 128, 12, 16, 4, 8, 128, 2, structure.random_geometry())
    single, types, mask = torch.randn(n, 384, requires_grad=True), torch.randint(0, 21, (n,)), torch.ones(n)
    fold = layers.StructureModule({**dict(module.named_parameters()), **dict(module.named_buffers())})
    gradient_pair(f"Structure module, {n} residues, 8 iterations", lambda: (fold(single, z, types, mask)["positions"],),
                  lambda: (module(single, z, types, mask, True)["positions"],), [single, z, *module.ipa.parameters()], repetitions)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, 5)
    parser.add_argument("--residues", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=128, help="rows of the alignment in the Evoformer block")
    parser.add_argument("--only", nargs="+", choices=LAYERS, default=LAYERS, metavar="LAYER", help=f"some of {', '.join(LAYERS)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--compile", action="store_true", help="also measure torch.compile")
    what.add_argument("--memory", action="store_true", help="measure memory instead of times")
    what.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return compare_memory([x for x in sys.argv[1:] if x != "--memory"])
    MODE.update(compile=options.compile, side=options.side)
    torch.set_default_dtype(torch.float32)
    prepare(options)
    torch.manual_seed(1)
    n, repetitions = options.residues, options.repetitions
    print(f"PyTorch {torch.__version__}, kernels {moesaic.kernels()}, {options.threads} threads, {n} residues")
    xyz = torch.cumsum(torch.nn.functional.normalize(torch.randn(n, 3), dim=-1) * 3.8, 0)
    runs = {"egnn128": lambda: egnn_pair(n, xyz, 128, repetitions), "egnn256": lambda: egnn_pair(n, xyz, 256, repetitions),
            "ipa": lambda: ipa_pair(n, xyz, repetitions), "triangle": lambda: triangle_pair(n, repetitions),
            "se3": lambda: se3_pair(n, xyz, repetitions), "structure": lambda: structure_pair(n, repetitions),
            "evoformer": lambda: evoformer_pair(n, options.sequences, repetitions),
            "gradients": lambda: egnn_gradients(n, xyz, 128, repetitions),
            "se3_gradients": lambda: se3_gradients(n, xyz, repetitions),
            "pair_gradients": lambda: pair_gradients(n // 2, options.sequences, repetitions),
            "model_gradients": lambda: model_gradients(n // 2, options.sequences, repetitions)}
    for name in options.only:
        runs[name]()


if __name__ == "__main__":
    main()
