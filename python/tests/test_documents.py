"""Runs the blocks of Python in docs/science.md, with inputs for the names that they use."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from moesaic import graph, layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "science.md"
GOLDENS = ROOT / "src" / "science" / "goldens"
EXAMPLES = ROOT / "examples" / "science"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the package is tested without the repository")


def blocks():
    """Returns the blocks of Python in the page."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(start, names):
    """Runs the block that begins with `start`; returns its variables."""
    (block,) = (block for block in blocks() if block.startswith(start))
    exec(compile(block, "docs/science.md", "exec"), names)
    return names


def test_every_block_is_run():
    starts = re.findall(r'run\(\s*"(.*?)"', pathlib.Path(__file__).read_text())
    assert all(any(block.startswith(start) for start in starts) for block in blocks())
    assert len(blocks()) == len(starts)


def test_example_of_message_passing_matches_numpy(rng):
    n, heads, d = 40, 4, 8
    xyz = rng.normal(size=(n, 3))
    edges = len(layers.knn_graph(xyz, k=30, seq_window=9)[0])

    def floats(*shape):
        return rng.normal(size=shape).astype(np.float32)

    h, q, k, v = (floats(n, heads, d) for _ in range(4))
    w, bias = floats(edges, heads), floats(edges, heads)
    got = run("from moesaic import", {"xyz": xyz, "n": n, "h": h, "w": w, "q": q, "k": k, "v": v, "bias": bias})
    sources, targets = got["src"], got["dst"]
    sums = np.zeros((n, heads, d))
    np.add.at(sums, targets, h[sources] * w[:, :, None])
    assert got["h_new"].shape == (n, heads, d)
    np.testing.assert_allclose(graph.u_mul_e_sum(got["plan"], h, w), sums, atol=1e-4)
    np.testing.assert_allclose(np.squeeze(got["scores"]), (q[targets] * k[sources]).sum(-1), atol=1e-4)
    assert got["out"].shape == (n, heads, d)


@pytest.mark.torch
def test_layers_record_gradients():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    module = torch.nn.ModuleDict(
        {
            "edge_mlp": torch.nn.Sequential(
                torch.nn.Linear(257, 32), torch.nn.SiLU(), torch.nn.Linear(32, 32), torch.nn.SiLU()
            ),
            "node_mlp": torch.nn.Sequential(torch.nn.Linear(160, 32), torch.nn.SiLU(), torch.nn.Linear(32, 128)),
            "coord_mlp": torch.nn.Sequential(
                torch.nn.Linear(32, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1, bias=False)
            ),
        }
    )
    h, x = torch.randn(20, 128), torch.randn(20, 3)
    src, dst = layers.knn_graph(x.numpy(), k=5)
    before = module.edge_mlp[0].weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    names = {"layers": layers, "module": module, "plan": graph.Graph(src, dst, 20, 20), "h": h, "x": x}
    run("layer = layers.EgnnLayer", {**names, "optimizer": optimizer})
    assert module.edge_mlp[0].weight.grad.abs().max() > 0
    assert not torch.equal(module.edge_mlp[0].weight, before)


@pytest.mark.torch
def test_equivariant_models_record_gradients(rng):
    torch = pytest.importorskip("torch")
    n = 20
    xyz, h = torch.from_numpy(rng.normal(size=(n, 3))), torch.from_numpy(rng.normal(size=(n, 8, 1)))
    src, dst = layers.knn_graph(xyz, k=5)
    names = {"layers": layers, "torch": torch, "plan": graph.Graph(src, dst, n, n), "xyz": xyz, "h": h}
    got = run("sizes = {", names)
    assert {d: tuple(x.shape) for d, x in got["out"].items()} == {0: (n, 1, 1), 1: (n, 1, 3)}
    assert got["state"]["graph_modules.4.to_kernel_self.0"].grad.abs().max() > 0


@pytest.mark.torch
def test_example_of_guidance_yields_gradients():
    torch = pytest.importorskip("torch")
    arrays = {key: torch.from_numpy(value) for key, value in np.load(GOLDENS / "protein_mpnn.npz").items()}
    state = {key[8:]: value for key, value in arrays.items() if key.startswith("weights.")}
    names = {key: arrays[key] for key in ("xyz", "known", "index", "chain", "sequence", "order")}
    names.update(layers=layers, torch=torch, n=len(arrays["known"]))
    names["checkpoint"] = {"model_state_dict": state, "num_edges": 12}
    got = run("model = layers.ProteinMpnn", names)
    assert got["xyz"].grad.shape == (names["n"], 4, 3)
    assert got["xyz"].grad.abs().max() > 0


def test_every_example_is_run():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'EXAMPLES / "(\w+\.py)"', pathlib.Path(__file__).read_text()))


@pytest.mark.parametrize("suffix", ["pdb", "cif"])
def test_the_helix_is_made_by_its_program(tmp_path, suffix):
    made = tmp_path / f"helix.{suffix}"
    subprocess.run([sys.executable, EXAMPLES / "make_helix.py", made], check=True)
    assert made.read_text() == (EXAMPLES / made.name).read_text()


@pytest.mark.torch
def test_message_passing_learns_its_scale(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "message_passing.py"), run_name="__main__")
    scale = float(re.search(r"the learned scale is ([\d.]+)", capsys.readouterr().out)[1])
    assert scale == pytest.approx(1, abs=0.05)


@pytest.mark.torch
def test_an_egnn_learns():
    pytest.importorskip("torch")
    error, variance = runpy.run_path(str(EXAMPLES / "train_egnn.py"))["train"](100)
    assert error < 0.8 * variance
