"""The layers of the SE(3)-Transformer and models of them: against a plain program in float64, and under rotations."""

from __future__ import annotations

import functools
import math
import pathlib

import numpy as np
import pytest
from numpy.polynomial import Legendre

import moesaic
from moesaic import graph, layers

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "src" / "science" / "goldens" / "se3.npz"
needs_goldens = pytest.mark.skipif(not GOLDENS.is_file(), reason="the package is tested without the repository")
NODES, EDGE_INPUTS = 14, 3
SIZES = {
    "num_layers": 2,
    "fiber_in": {0: 5, 1: 2},
    "fiber_hidden": {0: 8, 1: 8, 2: 8},
    "fiber_out": {0: 3, 1: 2, 2: 1},
    "edge_inputs": EDGE_INPUTS,
    "channels_div": 2,
}


def harmonics(degree, directions):
    """Real spherical harmonics [n, 2 degree + 1] with the polar axis y, of norm 1 on the sphere."""
    x, y, z = (directions / np.linalg.norm(directions, axis=1, keepdims=True)).T
    columns = []
    for m in range(-degree, degree + 1):
        k = abs(m)
        scale = (2 * degree + 1) / (4 * math.pi) * math.factorial(degree - k) / math.factorial(degree + k)
        around = (z + 1j * x) ** k
        columns.append(
            math.sqrt(scale * (2 if m else 1))
            * Legendre.basis(degree).deriv(k)(y)
            * (around.imag if m < 0 else around.real)
        )
    return np.stack(columns, 1)


def lowering(degree):
    """J_- of a representation, with rows and columns in the order m = -degree .. degree."""
    m = np.arange(-degree + 1, degree + 1)
    return np.diag(np.sqrt(degree * (degree + 1) - m * (m - 1)), 1)


def complex_coupling(l1, l2, l3):
    """Clebsch-Gordan coefficients [2 l1 + 1, 2 l2 + 1, 2 l3 + 1]: the highest state, lowered step by step."""
    n1, n2 = 2 * l1 + 1, 2 * l2 + 1
    lower = np.kron(lowering(l1), np.eye(n2)) + np.kron(np.eye(n1), lowering(l2))
    m = (np.arange(-l1, l1 + 1)[:, None] + np.arange(-l2, l2 + 1)[None]).reshape(-1)
    highest = np.eye(n1 * n2)[:, m == l3]
    state = highest @ np.linalg.svd(lower.T @ highest)[2][-1]  # J_+ maps it to 0
    state *= np.sign(state.reshape(n1, n2)[-1].sum())  # its component with m1 = l1 is positive
    states = [state]
    for m3 in range(l3, -l3, -1):
        states.insert(0, lower @ states[0] / math.sqrt(l3 * (l3 + 1) - m3 * (m3 - 1)))
    return np.stack(states, -1).reshape(n1, n2, 2 * l3 + 1)


def real_basis(degree):
    """Complex components (rows) of real ones (columns), in e3nn's convention."""
    q = np.zeros((2 * degree + 1, 2 * degree + 1), complex)
    q[degree, degree] = 1
    for m in range(1, degree + 1):
        q[degree - m, degree + m], q[degree - m, degree - m] = math.sqrt(0.5), -1j * math.sqrt(0.5)
        q[degree + m, degree + m], q[degree + m, degree - m] = (-1) ** m * np.array([1, 1j]) * math.sqrt(0.5)
    return (-1j) ** degree * q


@functools.cache
def wigner_3j(l1, l2, l3):
    q = [real_basis(degree) for degree in (l1, l2, l3)]
    w = np.einsum("ia,kb,nc,ikn->abc", q[0], q[1], q[2].conj(), complex_coupling(l1, l2, l3)).real
    return w / np.linalg.norm(w)


def layer_norm(x, weight, bias):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def under(state, prefix):
    return {key[len(prefix) :]: x for key, x in state.items() if key.startswith(prefix)}


def radial(net, x):
    linears = ("0", "3", "6") if "6.weight" in net else ("0", "2", "4")
    for at in linears[:2]:
        x = x @ net[f"{at}.weight"].T + net[f"{at}.bias"]
        if "6.weight" in net:
            x = layer_norm(x, net[f"{int(at) + 1}.weight"], net[f"{int(at) + 1}.bias"])
        x = np.maximum(x, 0)
    return x @ net[f"{linears[2]}.weight"].T


@functools.lru_cache(100)
def basis(degree_in, degree_out, offsets, dtype):
    """Products [n, frequencies, 2 in + 1, 2 out + 1] of harmonics and coupling coefficients; offsets are bytes."""
    directions = np.frombuffer(offsets, dtype).reshape(-1, 3)
    frequencies = range(abs(degree_in - degree_out), degree_in + degree_out + 1)
    products = [
        np.einsum("nj,jik->nik", harmonics(j, directions), wigner_3j(j, degree_in, degree_out)) for j in frequencies
    ]
    return np.stack(products, 1).astype(dtype)


def conv_edges(state, fiber_out, src, dst, xyz, x, edge):
    """Features of the edges: products of source features and harmonics, weighted by the radial perceptron."""
    offsets = xyz[src] - xyz[dst]
    invariant = np.concatenate([edge, np.linalg.norm(offsets, axis=1, keepdims=True)], 1)
    out = {}
    for o, c_out in fiber_out.items():
        total = np.zeros((len(src), c_out, 2 * o + 1), xyz.dtype)
        for i, features in x.items():
            products = np.einsum("nci,nfik->ncfk", features[src], basis(i, o, offsets.tobytes(), offsets.dtype))
            weights = radial(under(state, f"conv.{i},{o}.radial_func.net."), invariant)
            total += weights.reshape(len(src), c_out, -1) @ products.reshape(len(src), -1, 2 * o + 1)
        if f"to_kernel_self.{o}" in state:
            total += state[f"to_kernel_self.{o}"] @ x[o][dst]
        out[o] = total
    return out


def sums(values, dst):
    out = np.zeros((NODES, *values.shape[1:]), values.dtype)
    np.add.at(out, dst, values)
    return out


def conv(state, fiber_out, src, dst, xyz, x, edge):
    return {d: sums(m, dst) for d, m in conv_edges(state, fiber_out, src, dst, xyz, x, edge).items()}


def linear(state, x):
    return {int(key[8:]): weight @ x[int(key[8:])] for key, weight in state.items()}


def norm(state, x):
    out, at = {}, 0
    for d, features in x.items():
        c = features.shape[1]
        if "group_norm.weight" in state:
            weight, bias = state["group_norm.weight"][at : at + c], state["group_norm.bias"][at : at + c]
        else:
            weight, bias = state[f"layer_norms.{d}.weight"], state[f"layer_norms.{d}.bias"]
        lengths = np.maximum(np.linalg.norm(features, axis=-1), 2.0**-24)
        out[d] = features * (np.maximum(layer_norm(lengths, weight, bias), 0) / lengths)[..., None]
        at += c
    return out


def attention(state, fiber_out, heads, div, src, dst, xyz, x, edge):
    value = {d: c // div for d, c in fiber_out.items()}
    key = {d: c for d, c in value.items() if d in x}
    both = {d: c + key.get(d, 0) for d, c in value.items()}
    messages = conv_edges(under(state, "to_key_value."), both, src, dst, xyz, x, edge)
    query = linear(under(state, "to_query."), x)

    def by_head(features):
        return np.concatenate([features[d].reshape(len(features[d]), heads, -1) for d in key], -1)

    keys = by_head({d: messages[d][:, value[d] :] for d in key})
    logits = (keys * by_head(query)[dst]).sum(-1) / math.sqrt(sum(c * (2 * d + 1) for d, c in key.items()))
    weights = np.exp(logits)
    weights /= sums(weights, dst)[dst]
    joined = {}
    for d, c in value.items():
        split = messages[d][:, :c].reshape(len(src), heads, c // heads, 2 * d + 1)
        attended = sums(weights[:, :, None, None] * split, dst).reshape(NODES, c, 2 * d + 1)
        joined[d] = np.concatenate([x[d], attended], 1) if d in x else attended
    return linear(under(state, "project."), joined)


def model(state, heads, src, dst, xyz, x, edge, sizes=None):
    sizes = sizes or SIZES
    modules = 1 + max(int(key.split(".")[1]) for key in state)
    for i in range(modules - 1):
        own = under(state, f"graph_modules.{i}.")
        if "project.weights.0" in own:
            x = attention(own, sizes["fiber_hidden"], heads, sizes["channels_div"], src, dst, xyz, x, edge)
        else:
            x = norm(own, x)
    return conv(under(state, f"graph_modules.{modules - 1}."), sizes["fiber_out"], src, dst, xyz, x, edge)


def wide(arrays):
    return {key: np.asarray(x, np.float64) for key, x in arrays.items()}


def close(got, want, tolerance):
    assert got.keys() == want.keys()
    for d in want:
        np.testing.assert_allclose(got[d], want[d], rtol=0, atol=tolerance * max(1, np.abs(want[d]).max()))


def example(rng, fiber_in=None):
    """A random graph without loops, in which the last two nodes have no incoming edge, with its features."""
    src, dst = rng.integers(0, NODES, 90), rng.integers(0, NODES - 2, 90)
    src[src == dst] = NODES - 1
    xyz = rng.normal(size=(NODES, 3)).astype(np.float32)
    fiber = SIZES["fiber_in"] if fiber_in is None else fiber_in
    x = {d: rng.normal(size=(NODES, c, 2 * d + 1)).astype(np.float32) for d, c in fiber.items()}
    edge = rng.normal(size=(90, EDGE_INPUTS)).astype(np.float32)
    return src, dst, xyz, x, edge


def trained(rng, sizes=None, **options):
    """Weights whose norms are not those of the initialization."""
    state = layers.Se3Transformer.initial_state(**(sizes or SIZES), **options)
    return {key: (x + 0.2 * rng.normal(size=x.shape)).astype(np.float32) for key, x in state.items()}


def rotation(rng):
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q *= np.sign(np.diag(r))
    return q * np.linalg.det(q)


def representation(degree, turn, rng):
    """The matrix D with Y(R v) = D Y(v)."""
    v = rng.normal(size=(40, 3))
    return np.linalg.lstsq(harmonics(degree, v), harmonics(degree, v @ turn.T), rcond=None)[0].T


@needs_goldens
def test_the_reference_has_the_conventions_of_e3nn():
    a = np.load(GOLDENS)
    found = np.concatenate([harmonics(degree, a["directions"]) for degree in range(7)], 1)
    np.testing.assert_allclose(found, a["harmonics"], atol=1e-6)
    names = [key for key in a if key.startswith("w3j.")]
    assert len(names) > 5
    for name in names:
        np.testing.assert_allclose(wigner_3j(*map(int, name[4:])), a[name], atol=1e-6)


@needs_goldens
def test_convolutions_and_norms_equal_pytorch():
    a = dict(np.load(GOLDENS))
    fibers, x = ({0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}), {0: a["x0"], 1: a["x1"]}
    layer = layers.Se3Conv(under(a, "conv.weights."), *fibers, 3)
    got = layer(graph.Graph(a["src"], a["dst"], 12, 12), a["xyz"], x, a["edge"])
    close(got, {d: a[f"conv.out{d}"] for d in fibers[1]}, 1e-5)
    got = layers.Se3Norm(under(a, "norm.weights."), fibers[0])(x)
    close(got, {d: a[f"norm.out{d}"] for d in fibers[0]}, 1e-5)


@pytest.mark.parametrize("use_layer_norm", [False, True])
def test_layers_equal_the_reference(rng, use_layer_norm):
    src, dst, xyz, x, edge = example(rng)
    plan, out = graph.Graph(src, dst, NODES, NODES), SIZES["fiber_out"]
    state = under(trained(rng, use_layer_norm=use_layer_norm), "graph_modules.0.to_key_value.")
    both = {0: 8, 1: 8, 2: 4}
    got = layers.Se3Conv(state, SIZES["fiber_in"], both, EDGE_INPUTS)(plan, xyz, x, edge)
    close(got, conv(wide(state), both, src, dst, xyz.astype(float), wide(x), edge), 1e-5)
    state = {f"weights.{d}": rng.normal(size=(out[d], c)).astype(np.float32) for d, c in SIZES["fiber_in"].items()}
    fiber = {d: out[d] for d in x}
    close(layers.Se3Linear(state, SIZES["fiber_in"], fiber)(x), linear(wide(state), wide(x)), 1e-5)
    state = {
        f"layer_norms.{d}.{part}": rng.normal(size=c) for d, c in fiber_of(x).items() for part in ("weight", "bias")
    }
    close(layers.Se3Norm(state, fiber_of(x))(x), norm(state, wide(x)), 1e-5)
    zeros = {d: np.zeros_like(features) for d, features in x.items()}
    close(layers.Se3Norm(state, fiber_of(x))(zeros), zeros, 0)


def fiber_of(x):
    return {d: features.shape[1] for d, features in x.items()}


@pytest.mark.parametrize("options", [{}, {"use_layer_norm": False}, {"norm": False}])
def test_models_equal_the_reference(rng, options):
    src, dst, xyz, x, edge = example(rng)
    state = trained(rng, **options)
    transformer = layers.Se3Transformer(state, **SIZES, heads=2, norm=options.get("norm", True))
    got = transformer(graph.Graph(src, dst, NODES, NODES), xyz, x, edge)
    want = model(wide(state), 2, src, dst, xyz.astype(float), wide(x), edge)
    close(got, want, 1e-5)
    assert min(np.abs(want[d][:-2]).max() for d in want) > 0.1


def test_models_with_other_fibers(rng):
    """Hidden degrees that the input lacks, and numbers of channels that differ, whose norms are layer_norms."""
    sizes = {**SIZES, "fiber_in": {0: 4}, "fiber_hidden": {0: 8, 1: 4}, "fiber_out": {1: 1}, "num_layers": 3}
    src, dst, xyz, x, edge = example(rng, sizes["fiber_in"])
    state = layers.Se3Transformer.initial_state(**sizes, seed=3)
    assert state["graph_modules.1.layer_norms.1.weight"].shape == (4,)
    got = layers.Se3Transformer(state, **sizes, heads=2)(graph.Graph(src, dst, NODES, NODES), xyz, x, edge)
    close(got, model(wide(state), 2, src, dst, xyz.astype(float), wide(x), edge, sizes), 1e-5)


def test_models_are_equivariant(rng):
    src, dst, xyz, x, edge = example(rng)
    plan = graph.Graph(src, dst, NODES, NODES)
    transformer = layers.Se3Transformer(trained(rng), **SIZES, heads=4)
    before = transformer(plan, xyz, x, edge)
    for _ in range(4):
        turn, shift = rotation(rng), 3 * rng.normal(size=3)
        turned = {d: features @ representation(d, turn, rng).T for d, features in x.items()}
        after = transformer(plan, xyz @ turn.T + shift, turned, edge)
        close(after, {d: features @ representation(d, turn, rng).T for d, features in before.items()}, 1e-4)


def test_results_do_not_depend_on_threads(rng):
    src, dst, xyz, x, edge = example(rng)
    state, count, found = trained(rng), moesaic.get_num_threads(), []
    for threads in (1, 2):
        moesaic.set_num_threads(threads)
        transformer = layers.Se3Transformer(state, **SIZES, heads=2)
        found.append(transformer(graph.Graph(src, dst, NODES, NODES), xyz, x, edge))
    moesaic.set_num_threads(count)
    for d in found[0]:
        np.testing.assert_array_equal(found[0][d], found[1][d])


def test_initial_weights_have_the_published_distributions():
    state = layers.Se3Transformer.initial_state(**SIZES, seed=1)
    again, other = (layers.Se3Transformer.initial_state(**SIZES, seed=seed) for seed in (1, 2))
    for key, x in state.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, again[key])
    assert not np.array_equal(state["graph_modules.4.to_kernel_self.0"], other["graph_modules.4.to_kernel_self.0"])
    net = "graph_modules.0.to_key_value.conv.1,2.radial_func.net"
    assert state[f"{net}.0.weight"].shape == (32, EDGE_INPUTS + 1)
    assert state[f"{net}.6.weight"].shape == (3 * 2 * 4, 32)  # values of degree 2: the input has no keys of it
    assert 0.17 < np.abs(state[f"{net}.3.weight"]).max() <= 32**-0.5
    assert state["graph_modules.1.group_norm.bias"].shape == (24,)
    assert "graph_modules.0.to_key_value.to_kernel_self.0" not in state


def test_bad_input_raises(rng):
    src, dst, xyz, x, edge = example(rng)
    plan, state = graph.Graph(src, dst, NODES, NODES), trained(rng)
    transformer = layers.Se3Transformer(state, **SIZES)
    with pytest.raises(ValueError, match="features of degree 1 must have 84 elements, but have 0"):
        transformer(plan, xyz, {0: x[0]}, edge)
    with pytest.raises(ValueError, match=r"features of degree 1 must have the shape \[14, channels, 3\]"):
        transformer(plan, xyz, {**x, 1: x[1][:, :, :2]}, edge)
    with pytest.raises(ValueError, match="edge features are missing"):
        transformer(plan, xyz, x)
    with pytest.raises(ValueError, match=r"xyz must have the shape \[14, 3\]"):
        transformer(plan, xyz[1:], x, edge)
    with pytest.raises(ValueError, match="one degree or more"):
        transformer(plan, xyz, {}, edge)
    with pytest.raises(ValueError, match=r'graph_modules\.3: the weights have no tensor "layer_norms\.0\.weight"'):
        kept = {key: value for key, value in state.items() if "graph_modules.3" not in key}
        layers.Se3Transformer(kept, **SIZES)
    with pytest.raises(ValueError, match=r"graph_modules\.5\.\*, but 2 layers make 5 modules"):
        layers.Se3Transformer({**state, "graph_modules.5.weights.0": np.ones((3, 3))}, **SIZES)
    with pytest.raises(ValueError, match='"group_norm" needs degrees with 4 channels each, but degree 1 has 3'):
        layers.Se3Norm({"group_norm.weight": np.ones(7), "group_norm.bias": np.ones(7)}, {0: 4, 1: 3})
    with pytest.raises(ValueError, match="cannot make degree 2"):
        layers.Se3Linear({}, {0: 2}, {2: 1})
    with pytest.raises(ValueError, match="degrees up to 8"):
        layers.Se3Norm({}, {9: 1})
    with pytest.raises(ValueError, match="features of degree 1 must have"):
        layers.Se3Norm(under(state, "graph_modules.1."), SIZES["fiber_hidden"])({0: np.zeros((3, 8, 1))})


@pytest.mark.torch
@pytest.mark.parametrize(("use_layer_norm", "fiber_hidden"), [(True, {0: 4, 1: 4}), (False, {0: 4, 1: 4, 2: 6})])
def test_gradients_equal_differences_of_the_reference(rng, use_layer_norm, fiber_hidden):
    torch = pytest.importorskip("torch")
    src, dst, xyz, x, edge = example(rng)
    sizes = {**SIZES, "fiber_hidden": fiber_hidden, "fiber_out": {0: 2, 1: 2}, "channels_div": 1}
    named = {"xyz": xyz, "edge": edge} | {f"x{d}": features for d, features in x.items()}
    arrays = named | trained(rng, sizes, use_layer_norm=use_layer_norm)
    leaves = {key: torch.from_numpy(value).requires_grad_() for key, value in arrays.items()}
    seed = {d: rng.normal(size=(NODES, c, 2 * d + 1)) for d, c in sizes["fiber_out"].items()}
    state = {key: value for key, value in leaves.items() if key not in named}
    transformer = layers.Se3Transformer(state, **sizes, heads=2)

    def run():
        plan = graph.Graph(src, dst, NODES, NODES)
        out = transformer(plan, leaves["xyz"], {d: leaves[f"x{d}"] for d in x}, leaves["edge"])
        total = sum((torch.from_numpy(seed[d]).float() * out[d]).sum() for d in out)
        return torch.autograd.grad(total, list(leaves.values()))

    def loss(values):
        weights = {key: value for key, value in values.items() if key not in named}
        features = {d: values[f"x{d}"] for d in x}
        out = model(weights, 2, src, dst, values["xyz"], features, values["edge"], sizes)
        return sum((seed[d] * out[d]).sum() for d in out)

    grads, count = [], moesaic.get_num_threads()
    for threads in (1, 2):
        moesaic.set_num_threads(threads)
        grads.append(run())
    moesaic.set_num_threads(count)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    values, step = wide(arrays), 1e-6
    for (key, value), grad in zip(values.items(), grads[0], strict=True):
        direction, found = rng.normal(size=value.shape), grad.double().numpy()
        moved = [loss({**values, key: value + sign * step * direction}) for sign in (1, -1)]
        difference = (moved[0] - moved[1]) / (2 * step)
        # Relative to the norm of the gradient; differences have the rounding of the loss.
        assert abs((found * direction).sum() - difference) < 1e-3 * np.linalg.norm(found) + 1e-5, key


@pytest.mark.torch
def test_models_learn(rng):
    torch = pytest.importorskip("torch")
    src, dst, xyz, x, edge = example(rng)
    plan = graph.Graph(src, dst, NODES, NODES)
    state = layers.Se3Transformer.initial_state(**SIZES, seed=4)
    parameters = {key: torch.nn.Parameter(torch.from_numpy(value)) for key, value in state.items()}
    transformer = layers.Se3Transformer(parameters, **SIZES, heads=2)
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    target = torch.from_numpy(xyz - xyz.mean(0))[:, None]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        out = transformer(plan, xyz, x, edge)
        loss = (out[1][:-2, :1] - target[:-2]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
