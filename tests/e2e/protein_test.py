#!/usr/bin/env python3
"""Tests `moesaic protein` (inspect, design, property) on PDB and mmCIF files, its errors, and `moesaic graph bench`."""
import json
import math
import pathlib
import random
import shutil
import struct
import tempfile
import unittest

from moesaic_cli import ROOT, run
from torch_file import Tensor, write_torch_file

HELIX = ROOT / "examples" / "science" / "helix.pdb"
LETTERS = "MAEELAKKLEELLKRAVEEAKRLG"


def rows(text):
    """The cells of a printed table."""
    return [line.split() for line in text.splitlines()]


def write_safetensors(path, tensors):
    """Writes lists of floats by name and shape."""
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        assert len(values) == math.prod(shape)
        end = len(data) + 4 * len(values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
        data += struct.pack(f"<{len(values)}f", *values)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def egnn(inputs=21, hidden=4, outputs=None, moves=True):
    """Weights of an EGNN whose layers leave nodes as they are, and that predicts silu(0.5 nodes)."""
    tensors = {}

    def linear(name, n, k, weight=0.0, bias=0.0):
        tensors[f"{name}.weight"] = [n, k], [weight] * (n * k)
        tensors[f"{name}.bias"] = [n], [bias] * n

    linear("embedding", hidden, inputs, 0.3)
    linear("gcl_0.edge_mlp.0", hidden, 2 * hidden + 1)
    linear("gcl_0.edge_mlp.2", hidden, hidden)
    linear("gcl_0.node_mlp.0", hidden, 2 * hidden)
    linear("gcl_0.node_mlp.2", outputs or hidden, hidden)
    if moves:
        linear("gcl_0.coord_mlp.0", hidden, hidden)
        linear("gcl_0.coord_mlp.2", 1, hidden)
    linear("node_dec.0", hidden, hidden)
    linear("node_dec.2", 1, hidden, bias=0.5)
    linear("graph_dec.0", 1, 1, weight=1.0)
    linear("graph_dec.2", 1, 1, weight=1.0)
    return tensors


def protein_mpnn(hidden=128, layers=3):
    """Random weights of a ProteinMPNN of the published size, with the names of its state dict."""
    source, tensors = random.Random(1), {}

    def add(name, shape, low, high):
        tensors[name] = shape, [source.uniform(low, high) for _ in range(math.prod(shape))]

    def linear(name, n, k, bias=True):
        bound = math.sqrt(6 / (n + k))
        add(f"{name}.weight", [n, k], -bound, bound)
        if bias:
            add(f"{name}.bias", [n], -0.1, 0.1)

    def norm(name):
        add(f"{name}.weight", [hidden], 0.9, 1.1)
        add(f"{name}.bias", [hidden], -0.1, 0.1)

    linear("features.embeddings.linear", 16, 66)
    linear("features.edge_embedding", hidden, 16 + 16 * 25, bias=False)
    norm("features.norm_edges")
    linear("W_e", hidden, hidden)
    linear("W_s", 21, hidden, bias=False)
    for side, inputs, norms in (("encoder", 3 * hidden, 3), ("decoder", 4 * hidden, 2)):
        for i in range(layers):
            prefix = f"{side}_layers.{i}."
            for first in ("W1", "W11") if side == "encoder" else ("W1",):
                linear(prefix + first, hidden, inputs)
                for name in ("2", "3"):
                    linear(prefix + first[:-1] + name, hidden, hidden)
            linear(prefix + "dense.W_in", 4 * hidden, hidden)
            linear(prefix + "dense.W_out", hidden, 4 * hidden)
            for n in range(norms):
                norm(f"{prefix}norm{n + 1}")
    linear("W_out", 21, hidden)
    return tensors


def write_checkpoint(path, tensors, neighbors):
    """Writes a PyTorch checkpoint of ProteinMPNN."""
    state = {name: Tensor(shape, values) for name, (shape, values) in tensors.items()}
    write_torch_file(path, {"num_edges": neighbors, "noise_level": 0.2, "model_state_dict": state})


class Protein(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-protein-"))
        self.addCleanup(shutil.rmtree, self.folder)
        atoms = [line for line in HELIX.read_text().splitlines() if line.startswith("ATOM")]
        other = [f"{line[:21]}B{line[22:30]}{float(line[30:38]) + 12:8.3f}{line[38:]}" for line in atoms]
        self.pair = self.folder / "pair.pdb"
        self.pair.write_text("\n".join([*atoms, "TER", *other, "END", ""]))

    def error(self, *arguments, code=1):
        return run("protein", *arguments, code=code).stderr

    def test_mmcif_and_pdb_are_read_alike(self):
        printed = [run("protein", "inspect", HELIX.with_suffix(suffix)).stdout for suffix in (".pdb", ".cif")]
        self.assertEqual(printed[0], printed[1])
        self.assertEqual(rows(printed[0])[1], ["A", "24", "1", "24", "0", LETTERS])
        designs = [run("protein", "design", HELIX.with_suffix(suffix), "--random-weights", 1).stdout.splitlines()
                   for suffix in (".pdb", ".cif")]
        self.assertEqual(designs[0][1:], designs[1][1:])  # the first line has the name

    def test_chains_that_are_not_named_are_kept(self):
        both = run("protein", "design", self.pair, "--random-weights", 1).stdout.splitlines()
        self.assertEqual(both[1], f"{LETTERS}/{LETTERS}")
        self.assertRegex(both[3], "^[A-WY]{24}/[A-WY]{24}$")
        one = run("protein", "design", self.pair, "--random-weights", 1, "--chains", "B", "-n", 2).stdout.splitlines()
        self.assertEqual(len(one), 6)
        self.assertEqual(one[1], LETTERS)
        self.assertRegex(one[3], "^[A-WY]{24}$")
        self.assertIn('has no chain "C"; it has A, B', self.error("design", self.pair, "--random-weights", 1, "--chains", "A,C"))

    def test_a_pytorch_checkpoint_designs_like_the_same_safetensors(self):
        tensors = protein_mpnn()
        checkpoint, plain = self.folder / "model.pt", self.folder / "model.safetensors"
        write_checkpoint(checkpoint, tensors, neighbors=12)
        write_safetensors(plain, tensors)
        words = ("protein", "design", HELIX, "-n", 2, "--seed", 3, "--weights")
        designs = run(*words, checkpoint).stdout
        self.assertEqual(designs.splitlines()[1], LETTERS)
        self.assertEqual(designs, run(*words, plain, "--neighbors", 12).stdout)
        self.assertNotEqual(designs, run(*words, plain).stdout)  # the checkpoint has its number of neighbours
        del tensors["decoder_layers.2.norm2.bias"]
        write_checkpoint(checkpoint, tensors, neighbors=12)
        self.assertIn(f'{checkpoint}: the weights have no tensor "decoder_layers.2.norm2.bias"',
                      self.error("design", HELIX, "--weights", checkpoint))

    def test_backbones_without_an_atom_are_not_designed(self):
        bare = self.folder / "bare.pdb"
        bare.write_text("".join(f"{line}\n" for line in HELIX.read_text().splitlines() if line[12:16] != " O  "))
        self.assertEqual(rows(run("protein", "inspect", bare).stdout)[1][4], "24")
        self.assertIn('no residue to design has all of the atoms N, CA, C, O: residue 1 of chain "A" lacks O',
                      self.error("design", bare, "--random-weights", 1))

    def test_a_missing_end_is_reported(self):
        cut = self.folder / "cut.pdb"
        cut.write_text("".join(HELIX.read_text().splitlines(keepends=True)[:-20]))
        self.assertIn("the file has no END record: it may be truncated", run("protein", "inspect", cut).stderr)
        self.assertNotIn("END", run("protein", "inspect", HELIX).stderr)
        self.assertNotIn("END", run("protein", "inspect", HELIX.with_suffix(".cif")).stderr)

    def test_results_are_written_to_a_file(self):
        printed = run("protein", "design", self.pair, "--random-weights", 1, "-n", 2, "--seed", 5).stdout
        out = self.folder / "designs.fasta"
        table = rows(run("protein", "design", self.pair, "--random-weights", 1, "-n", 2, "--seed", 5, "-o", out).stdout)
        self.assertEqual(out.read_text(), printed)
        self.assertEqual(table[0], ["sample", "score", "recovery", "residues"])
        self.assertIn("No such file or directory", self.error("design", self.pair, "--random-weights", 1, "-o", self.folder / "no" / "x"))

    def test_a_property_is_predicted(self):
        weights = self.folder / "egnn.safetensors"
        write_safetensors(weights, egnn())
        for suffix in (".pdb", ".cif"):
            found = rows(run("protein", "property", HELIX.with_suffix(suffix), "-w", weights, "--neighbors", 5).stdout)
            self.assertEqual(found[0], ["structure", "residues", "edges", "property"])
            self.assertEqual(found[1][1:3], ["24", "120"])
            self.assertAlmostEqual(float(found[1][3]), 12 / (1 + math.exp(-12)), places=3)
        write_safetensors(weights, egnn(moves=False))  # coordinates have no effect on this model
        still = rows(run("protein", "property", HELIX, "-w", weights, "--neighbors", 5).stdout)
        self.assertEqual(still[1][1:], found[1][1:])

    def test_unusable_weights_are_named(self):
        weights = self.folder / "egnn.safetensors"
        write_safetensors(weights, egnn(inputs=20))
        self.assertIn('"embedding.weight" must have 21 inputs, one per letter of ACDEFGHIKLMNPQRSTVWYX, but has 20; the verb '
                      "predicts from residues", self.error("property", HELIX, "-w", weights))
        for outputs in (2, 400):
            write_safetensors(weights, egnn(outputs=outputs))
            self.assertIn(f'tensor "gcl_0.node_mlp.2.weight" must have the shape [4, -1], but has [{outputs}, 4]',
                          self.error("property", HELIX, "-w", weights))
        self.assertIn('no tensor "W_e.weight"', self.error("design", HELIX, "-w", weights))

    def test_unusable_files_and_flags_are_named(self):
        short = self.folder / "short.pdb"
        short.write_text(HELIX.read_text()[:40])
        self.assertIn(f"{short}: line 1", self.error("inspect", short))
        self.assertIn("--weights or --random-weights is required", self.error("design", HELIX, code=2))
        self.assertIn("--weights is required", self.error("property", HELIX, code=2))
        self.assertIn("is for moesaic protein design", self.error("inspect", HELIX, "--chains", "A", code=2))
        for flag, value in (("--weights", HELIX), ("--neighbors", 5), ("--threads", 1)):
            self.assertIn(f"{flag}: is for moesaic protein design and property",
                          self.error("inspect", HELIX, flag, value, code=2))
        self.assertIn("all letters of", self.error("design", HELIX, "--random-weights", 1, "--omit", "ACDEFGHIKLMNPQRSTVWYX"))


class GraphBench(unittest.TestCase):
    def test_every_operator_is_measured(self):
        for dtype in ("f32", "bf16", "f16"):
            words = ("graph", "bench", "--nodes", 50, "--edges", 400, "--columns", 16, "--dtype", dtype, "-r", 1, "-t", 2)
            result = json.loads(run(*words, "--json").stdout)
            self.assertEqual([result[key] for key in ("nodes", "edges", "columns", "dtype", "threads")], [50, 400, 16, dtype, 2])
            names = [operator["name"] for operator in result["operators"]]
            self.assertEqual(names, ["plan (COO -> CSC)", "segment sum, sorted", "scatter sum, plan reused", "copy_u sum",
                                     "u_mul_e sum", "copy_u max"])
            self.assertGreater(result["read_gb_per_s"], 0)
            for operator in result["operators"]:
                self.assertGreater(operator["median_ms"], 0)
                self.assertAlmostEqual(operator["share_of_read"] * result["read_gb_per_s"], operator["gb_per_s"])
            printed = run(*words).stdout
            self.assertRegex(printed, r"a read of memory in order: \d+\.\d GB/s")
            for name in names:
                self.assertIn(name, printed)
        self.assertIn("--edges", run("graph", "bench", "--edges", -1, code=2).stderr)


if __name__ == "__main__":
    unittest.main()
