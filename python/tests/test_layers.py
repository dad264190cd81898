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


def test_egnn_matches_goldens():
    a = load("egnn")
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3)
    g = graph.Graph(a["plain.src"], a["plain.dst"], 20, 20)
    h, x = layer(g, a["plain.h"], a["plain.x"], a["plain.edge"])
    close(h, a["plain.h_out"])
    close(x, a["plain.x_out"])
    with pytest.raises(ValueError, match=r"edge must have the shape \[90, 3\], but has \[89, 3\]"):
        layer(g, a["plain.h"], a["plain.x"], a["plain.edge"][1:])
    with pytest.raises(ValueError, match="no tensor"):
        layers.EgnnLayer({}, 10, 3)


@pytest.mark.parametrize(("weight_dtype", "bound"), [("bfloat16", 0.005), ("int8", 0.011)])
def test_weights_may_be_rounded(weight_dtype, bound):
    a = load("egnn")
    g = graph.Graph(a["plain.src"], a["plain.dst"], 20, 20)
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3, weight_dtype=weight_dtype)
    h, x = layer(g, a["plain.h"], a["plain.x"], a["plain.edge"])
    for got, want in ((h, a["plain.h_out"]), (x, a["plain.x_out"])):
        close(got, want, bound)
        assert np.abs(got - want).max() > 1e-5
    perceptron = under(a, "plain.weights.edge_mlp.")
    inputs = [g, a["plain.h"], a["plain.h"], a["plain.edge"], a["plain.x"], a["plain.x"]]
    exact, rounded = (
        layers.EdgeMlpReduce(perceptron, 10, 10, 3, distance=True, weight_dtype=name)(*inputs)
        for name in ("float32", weight_dtype)
    )
    close(rounded, exact, bound)
    assert np.abs(rounded - exact).max() > 1e-5
    with pytest.raises(ValueError, match='unknown weight_dtype "int4"; it is one of float32, bfloat16, int8'):
        layers.EgnnLayer(under(a, "plain.weights."), 10, 3, weight_dtype="int4")


def test_egnn_without_coordinate_perceptron_keeps_coordinates():
    a = load("egnn")
    for name in ("plain", "gated"):
        state = under(a, f"{name}.weights.")
        state = {key: value for key, value in state.items() if not key.startswith("coord_mlp.")}
        layer = layers.EgnnLayer(state, 10, 3)
        g = graph.Graph(a[f"{name}.src"], a[f"{name}.dst"], 20, 20)
        h, x = layer(g, a[f"{name}.h"], a[f"{name}.x"], a[f"{name}.edge"])
        close(h, a[f"{name}.h_out"])  # features do not depend on moves
        np.testing.assert_array_equal(x, a[f"{name}.x"])


def test_evoformer_matches_goldens():
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


def test_structure_module_matches_goldens():
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


def test_se3_attention_matches_goldens():
    a = load("se3")
    fibers = {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}
    block = layers.Se3AttentionBlock(under(a, "attention.weights."), *fibers, 3, 2, 2)
    out = block(graph.Graph(a["src"], a["dst"], 12, 12), a["xyz"], {0: a["x0"], 1: a["x1"]}, a["edge"])
    for degree in fibers[1]:
        close(out[degree], a[f"attention.out{degree}"])
    with pytest.raises(ValueError, match="edge must have"):
        block(graph.Graph(a["src"], a["dst"], 12, 12), a["xyz"], {0: a["x0"], 1: a["x1"]}, a["edge"][:, 1:])


def test_protein_mpnn_matches_goldens():
    a = load("protein_mpnn")
    model = layers.ProteinMpnn(under(a, "weights."), 12)
    backbone = (a["xyz"], a["known"], a["index"], a["chain"], a["sequence"])
    logs = model.log_probabilities(*backbone, a["order"])
    known = a["known"] == 1
    close(logs[known], a["log_probabilities"][known])
    letters, score, recovery = model.sample(*backbone, temperature=1.0, seed=3)
    assert letters.shape == (44,) and score > 0 and 0 <= recovery <= 1


NO_EDGES = np.zeros(0, np.int64)


def test_layers_run_without_edges():
    a = load("egnn")
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3)
    # Nodes 18 and 19 of the goldens have no incoming edge.
    h, x = layer(graph.Graph(NO_EDGES, NO_EDGES, 2, 2), a["plain.h"][18:], a["plain.x"][18:], np.zeros((0, 3)))
    close(h, a["plain.h_out"][18:])
    np.testing.assert_array_equal(x, a["plain.x"][18:])
    a = load("se3")
    weights = under(a, "attention.weights.")
    block = layers.Se3AttentionBlock(weights, {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}, 3, 2, 2)
    plan = graph.Graph(NO_EDGES, NO_EDGES, 12, 12)
    out = block(plan, a["xyz"], {0: a["x0"], 1: a["x1"]}, np.zeros((0, 3)))
    for degree, own in ((0, 5), (1, 3), (2, 0)):  # attended features are 0
        x = a[f"x{degree}"] if own else np.zeros((12, 0, 5), np.float32)
        close(out[degree], np.einsum("oc,ncm->nom", weights[f"project.weights.{degree}"][:, :own], x))
    a = under(load("protein_mpnn"), "weights.")
    nodes = np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 16)
    plan = graph.Graph(NO_EDGES, NO_EDGES, 3, 3)
    encoder = layers.MpnnEncoderLayer(under(a, "encoder_layers.0."))
    got, edge = encoder(plan, nodes, np.zeros((0, 16)))
    one = graph.Graph(np.array([0]), np.array([1]), 3, 3)
    want, _ = encoder(one, nodes, np.ones((1, 16)), edge_mask=np.zeros(1))  # the mask removes the message
    np.testing.assert_array_equal(got, want)
    assert edge.shape == (0, 16)


def test_layers_run_without_nodes():
    empty = graph.Graph(NO_EDGES, NO_EDGES, 0, 0)
    a = load("egnn")
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3)
    h, x = layer(empty, np.zeros((0, 10)), np.zeros((0, 3)), np.zeros((0, 3)))
    assert h.shape == (0, 10) and x.shape == (0, 3)
    a = load("se3")
    fibers = {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}
    block = layers.Se3AttentionBlock(under(a, "attention.weights."), *fibers, 3, 2, 2)
    features = {0: np.zeros((0, 5, 1)), 1: np.zeros((0, 3, 3))}
    out = block(empty, np.zeros((0, 3)), features, np.zeros((0, 3)))
    assert {degree: x.shape for degree, x in out.items()} == {0: (0, 8, 1), 1: (0, 8, 3), 2: (0, 4, 5)}
    a = load("evoformer")
    m, z = layers.EvoformerBlock(under(a, "weights."), 2, 2)(np.zeros((3, 0, 12)), np.zeros((0, 0, 10)))
    assert m.shape == (3, 0, 12) and z.shape == (0, 0, 10)
    src, dst = layers.knn_graph(np.zeros((0, 3)), 4)
    assert len(src) == len(dst) == 0


def test_layers_run_on_one_residue():
    """The first of two residues, the second of which is padding, has the same results."""
    a = load("evoformer")
    block = layers.EvoformerBlock(under(a, "weights."), 2, 2)
    m, z, mask = a["m"][:2, :2], a["z"][:2, :2], np.array([[1, 0], [0, 0]])
    for got, want in zip(block(m[:1, :1], z[:1, :1]), block(m, z, mask, mask), strict=True):
        close(got, want[:1, :1], 2e-4)
    a = load("structure")
    module = layers.StructureModule(under(a, "weights."), 3, 5, 4, 6, blocks=3)
    one = module(a["single"][:1], a["pair"][:1, :1], a["types"][:1])
    two = module(a["single"][:2], a["pair"][:2, :2], a["types"][:2], np.array([1, 0]))
    for key in ("frames", "angles", "positions"):
        close(one[key], two[key][:, :1], 4e-4)
    a = load("protein_mpnn")
    model = layers.ProteinMpnn(under(a, "weights."), 12)
    at = np.flatnonzero(a["known"])[:1]
    backbone = a["xyz"][at], np.ones(1), np.zeros(1, int), np.ones(1, int), a["sequence"][at]
    logs = model.log_probabilities(*backbone, np.zeros(1, int))
    np.testing.assert_allclose(np.exp(logs).sum(), 1, rtol=1e-5)
    letters, score, _ = model.sample(*backbone, temperature=1.0, seed=3)
    after = model.log_probabilities(*backbone[:4], letters, np.zeros(1, int))
    np.testing.assert_allclose(score, -after[0, letters[0]], atol=1e-4)


def test_graphs_from_coordinates_match_numpy(rng):
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


def test_shapes_of_arguments_are_checked(rng):
    wrong = rng.normal(size=(30, 2)), rng.normal(size=(3, 30)), rng.normal(size=30)
    for xyz in wrong:
        for build in (lambda x: layers.knn_graph(x, 4), lambda x: layers.radius_graph(x, 1.0)):
            with pytest.raises(ValueError, match=rf"xyz must have the shape \[{len(xyz)}, 3\], but has"):
                build(xyz)
    a = load("egnn")
    layer = layers.EgnnLayer(under(a, "plain.weights."), 10, 3)
    g = graph.Graph(a["plain.src"], a["plain.dst"], 20, 20)
    for name, inputs in (
        ("h", (a["plain.h"].T, a["plain.x"], a["plain.edge"])),
        ("x", (a["plain.h"], a["plain.x"].T, a["plain.edge"])),
        ("edge", (a["plain.h"], a["plain.x"], a["plain.edge"].T)),
    ):
        with pytest.raises(ValueError, match=f"{name} must have the shape"):
            layer(g, *inputs)
    a = load("evoformer")
    ipa = layers.InvariantPointAttention(under(a, "ipa.weights."), 3, 5, 4, 6)
    s, z, rotation, translation, mask = a["ipa.s"], a["z"], a["ipa.rotation"], a["ipa.translation"], a["ipa.mask"]
    n = len(s)
    for name, inputs in (
        ("rotation", (s, z, rotation.reshape(3, 3, n), translation, mask)),
        ("translation", (s, z, rotation, translation.T, mask)),
        ("mask", (s, z, rotation, translation, mask[:, None])),
    ):
        with pytest.raises(ValueError, match=f"{name} must have the shape"):
            ipa(*inputs)
    with pytest.raises(ValueError, match="pair_mask must have the shape"):
        layers.EvoformerBlock(under(a, "weights."), 2, 2)(a["m"], a["z"], a["msa_mask"], a["pair_mask"].reshape(-1))
    a = load("se3")
    block = layers.Se3AttentionBlock(under(a, "attention.weights."), {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}, 3, 2, 2)
    g = graph.Graph(a["src"], a["dst"], 12, 12)
    with pytest.raises(ValueError, match=r"features of degree 1 must have the shape \[12, channels, 3\]"):
        block(g, a["xyz"], {0: a["x0"], 1: a["x1"].transpose(0, 2, 1)[:, :, :2]}, a["edge"])
    with pytest.raises(ValueError, match="xyz must have the shape"):
        block(g, a["xyz"].T, {0: a["x0"], 1: a["x1"]}, a["edge"])


def test_read_only_arrays_are_read():
    """Arrays of np.load(.., mmap_mode="r"), np.broadcast_to and others cannot be written."""
    a = load("egnn")
    options = under(a, "plain.weights."), 10, 3
    g = graph.Graph(a["plain.src"], a["plain.dst"], 20, 20)
    inputs = a["plain.h"], a["plain.x"], a["plain.edge"]
    want = layers.EgnnLayer(*options)(g, *inputs)
    for x in (*options[0].values(), *inputs):
        x.flags.writeable = False
    for got, expected in zip(layers.EgnnLayer(*options)(g, *inputs), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    ends = np.array([0, 9, 20], np.int32)
    want = [layers.knn_graph(np.array(a["plain.x"]), 3, sets=ends), layers.radius_graph(np.array(a["plain.x"]), 9.0)]
    ends.flags.writeable = False
    got = [layers.knn_graph(a["plain.x"], 3, sets=ends), layers.radius_graph(a["plain.x"], 9.0)]
    for mine, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, expected)
    a = load("evoformer")
    z, mask = a["z"], np.broadcast_to(np.float32(1), a["z"].shape[:2])
    z.flags.writeable = False
    layer = layers.TriangleMultiplication(under(a, "weights.tri_mul_out."))
    np.testing.assert_array_equal(layer(z, mask), layer(np.array(z)))


def test_integers_are_not_rounded_or_wrapped():
    a = load("protein_mpnn")
    model = layers.ProteinMpnn(under(a, "weights."), 12)
    arguments = {key: a[key] for key in ("xyz", "known", "index", "chain", "sequence", "order")}
    for key in ("index", "chain", "sequence", "order"):
        wide = arguments[key].astype(np.int64)
        wide[0] += 2**32
        with pytest.raises(ValueError, match=f"{key} must fit int32, but has {wide[0]}"):
            model.log_probabilities(**{**arguments, key: wide})
        with pytest.raises(TypeError, match=f"{key} must have integers, not float32"):
            model.log_probabilities(**{**arguments, key: arguments[key].astype(np.float32)})
    with pytest.raises(ValueError, match=r"known must be 0 or 1, but has 0\.5"):
        model.log_probabilities(**{**arguments, "known": arguments["known"] * 0.5})
    got = [model.log_probabilities(**{**arguments, "known": arguments["known"].astype(t)}) for t in (bool, np.float32)]
    np.testing.assert_array_equal(*got)
    with pytest.raises(ValueError, match=r"xyz must have the shape \[44, 4, 3\], but has \[44, 12\]"):
        model.log_probabilities(**{**arguments, "xyz": arguments["xyz"].reshape(44, 12)})
    with pytest.raises(ValueError, match="chain must be a vector"):
        model.sample(a["xyz"], a["known"], a["index"], a["chain"][:, None], a["sequence"])
    with pytest.raises(ValueError, match="sets must fit int32"):
        layers.knn_graph(np.zeros((3, 3)), 1, sets=np.array([0, 2**32 + 3]))
    with pytest.raises(TypeError, match="sets must have integers"):
        layers.knn_graph(np.zeros((3, 3)), 1, sets=[0.0, 3.0])


def test_memory_does_not_grow_with_the_number_of_lengths():
    script = GOLDENS.parents[2] / "bench" / "science" / "dynamic_shapes.py"
    spec = importlib.util.spec_from_file_location("dynamic_shapes", script)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    edges, _, memory = bench.run(40, 10, 88, 16, time.process_time)
    assert len(set(edges)) == 40
    assert memory[-1] - memory[10] < 8  # MiB; without reuse, 30 proteins would add several times as much
