"""moesaic.layers against the goldens of src/science/goldens."""

from __future__ import annotations

import importlib.util
import pathlib
import time

import numpy as np
import pytest

from moesaic import graph, layers

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "src" / "science" / "goldens"
pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="the package is tested without the repository")


def load(name):
    return dict(np.load(GOLDENS / f"{name}.npz"))


def under(arrays, prefix):
    return {key[len(prefix) :]: value for key, value in arrays.items() if key.startswith(prefix)}


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, np.abs(want).max()))


def test_egnn():
    a = load("egnn")
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3)
    g = graph.Graph(a["plain.src"], a["plain.dst"], 20, 20)
    h, x = layer(g, a["plain.h"], a["plain.x"], a["plain.edge"])
    close(h, a["plain.h_out"])
    close(x, a["plain.x_out"])
    with pytest.raises(ValueError, match="edge must have 270 elements, but has 267"):
        layer(g, a["plain.h"], a["plain.x"], a["plain.edge"][1:])
    with pytest.raises(ValueError, match="no tensor"):
        layers.EgnnLayer({}, 10, 3)


def test_evoformer():
    a = load("evoformer")
    weights = under(a, "weights.")
    m, z = layers.EvoformerBlock(weights, 2, 2)(a["m"], a["z"], a["msa_mask"], a["pair_mask"])
    close(m, a["m_out"], 1e-4)
    close(z, a["z_out"], 1e-4)
    for name, incoming in (("tri_mul_out", False), ("tri_mul_in", True)):
        layer = layers.TriangleMultiplication(under(weights, f"{name}."), incoming)
        close(layer(a["z"], a["pair_mask"]) - a["z"], a[f"{name}.out"])
    layer = layers.TriangleAttention(under(weights, "tri_att_end."), 2, ending=True)
    close(layer(a["z"], a["pair_mask"]) - a["z"], a["tri_att_end.out"])
    ipa = layers.InvariantPointAttention(under(a, "ipa.weights."), 3, 5, 4, 6)
    got = ipa(a["ipa.s"], a["z"], a["ipa.rotation"], a["ipa.translation"], a["ipa.mask"])
    close(got[:-2], a["ipa.out"][:-2], 2e-5)


def test_structure_module():
    a = load("structure")
    module = layers.StructureModule(under(a, "weights."), 3, 5, 4, 6, blocks=3)
    out = module(a["single"], a["pair"], a["types"], a["mask"])
    names = {"unnormalized": "unnormalized_angles", "groups": "sidechain_frames"}
    for key in ("frames", "angles", "unnormalized", "groups", "positions"):  # the last residue is padding
        close(out[names.get(key, key)][:, :-1], a[f"out.{key}"][:, :-1], 2e-4)
    assert "positions" not in module(a["single"], a["pair"])
    with pytest.raises(ValueError, match=r"types\[0\] must be in \[0, 21\), but is -1"):
        module(a["single"], a["pair"], a["types"] * 0 - 1)


def test_widths_of_arguments_are_those_of_the_weights():
    a = load("evoformer")
    weights = under(a, "weights.")
    n, c = a["z"].shape[1:]
    narrow = np.ascontiguousarray(a["z"][:, :, 1:])
    calls = [
        lambda: layers.TriangleMultiplication(under(weights, "tri_mul_out."))(narrow),
        lambda: layers.TriangleAttention(under(weights, "tri_att_end."), 2)(narrow),
        lambda: layers.EvoformerBlock(weights, 2, 2)(a["m"], narrow),
        lambda: layers.InvariantPointAttention(under(a, "ipa.weights."), 3, 5, 4, 6)(
            a["ipa.s"], narrow, a["ipa.rotation"], a["ipa.translation"]
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"z must have the shape \[{n}, {n}, {c}\], but has"):
            call()
    with pytest.raises(ValueError, match="m must have the shape"):
        layers.EvoformerBlock(weights, 2, 2)(a["m"][:, :, 1:], a["z"])
    with pytest.raises(ValueError, match="s must have the shape"):
        layers.InvariantPointAttention(under(a, "ipa.weights."), 3, 5, 4, 6)(
            a["ipa.s"][:, 1:], a["z"], a["ipa.rotation"], a["ipa.translation"]
        )


def test_se3_attention():
    a = load("se3")
    fibers = {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}
    block = layers.Se3AttentionBlock(under(a, "attention.weights."), *fibers, 3, 2, 2)
    out = block(graph.Graph(a["src"], a["dst"], 12, 12), a["xyz"], {0: a["x0"], 1: a["x1"]}, a["edge"])
    for degree in fibers[1]:
        close(out[degree], a[f"attention.out{degree}"])
    with pytest.raises(ValueError, match="edge must have"):
        block(graph.Graph(a["src"], a["dst"], 12, 12), a["xyz"], {0: a["x0"], 1: a["x1"]}, a["edge"][:, 1:])


def test_protein_mpnn():
    a = load("protein_mpnn")
    model = layers.ProteinMpnn(under(a, "weights."), 12)
    backbone = (a["xyz"], a["known"], a["index"], a["chain"], a["sequence"])
    logs = model.log_probabilities(*backbone, a["order"])
    known = a["known"] == 1
    close(logs[known], a["log_probabilities"][known])
    letters, score, recovery = model.sample(*backbone, temperature=1.0, seed=3)
    assert letters.shape == (44,) and score > 0 and 0 <= recovery <= 1


def test_graphs_from_coordinates(rng):
    xyz = rng.normal(size=(30, 3))
    distance = np.linalg.norm(xyz[:, None] - xyz[None], axis=-1) + 99 * np.eye(30)
    src, dst = layers.knn_graph(xyz, 4)
    assert src.dtype == np.int64
    for i in range(30):
        assert set(dst[src == i]) == set(np.argsort(distance[i])[:4])
    src, dst = layers.radius_graph(xyz, 1.0)
    assert len(src) == (distance <= 1).sum()
    with pytest.raises(ValueError, match="must be finite"):
        layers.knn_graph(np.full((2, 3), np.nan), 1)


def test_memory_does_not_grow_with_the_number_of_lengths():
    script = GOLDENS.parents[2] / "bench" / "science" / "dynamic_shapes.py"
    spec = importlib.util.spec_from_file_location("dynamic_shapes", script)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    edges, _, memory = bench.run(40, 10, 88, 16, time.process_time)
    assert len(set(edges)) == 40
    assert memory[-1] - memory[10] < 8  # MiB; without reuse, 30 proteins would add several times as much
