"""Gradients of moesaic.layers: against PyTorch's of the transcriptions (src/science/goldens), and by gradcheck."""

from __future__ import annotations

import pathlib
import warnings

import numpy as np
import pytest

import moesaic
from moesaic import graph, layers

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
FOLDER = pathlib.Path(__file__).resolve().parents[2] / "src" / "science" / "goldens"
GOLDENS, MODELS = FOLDER / "gradients.npz", FOLDER / "model_gradients.npz"


def check(function, *inputs):
    """gradcheck in float32, as in test_torch.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about float32
        assert torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0.0)


def case(name, path=GOLDENS):
    """Tensors of one golden: inputs, parameters that need gradients, and the rest."""
    arrays = {key[len(name) + 1 :]: torch.from_numpy(x) for key, x in np.load(path).items() if key.startswith(name)}
    inputs = {key[11:]: arrays[key[11:]].requires_grad_() for key in arrays if key.startswith("grad.input.")}
    parameters = {key[8:]: x.requires_grad_() for key, x in arrays.items() if key.startswith("weights.")}
    return arrays, inputs, parameters


def expect(arrays, inputs, parameters, results):
    torch.autograd.backward(results, [arrays[f"seed{i}"] for i in range(len(results))])
    for kind, tensors in (("input", inputs), ("parameter", parameters)):
        for key, x in tensors.items():
            want = arrays[f"grad.{kind}.{key}"]
            scale = want.abs().max().item()
            if scale < 1e-10:  # rounding of 0: softmax ignores a bias that all keys share
                scale = 1
            torch.testing.assert_close(
                x.grad, want, rtol=0, atol=3e-5 * scale, msg=lambda text, key=key: f"{key}: {text}"
            )


needs_goldens = pytest.mark.skipif(not GOLDENS.is_file(), reason="the package is tested without the repository")


@needs_goldens
@pytest.mark.parametrize("name", ["plain", "gated"])
def test_egnn_gradients_match_goldens(name):
    arrays, inputs, parameters = case(f"egnn.{name}")
    options = {"normalize": True, "tanh": True, "mean_coordinates": False} if name == "gated" else {}
    layer = layers.EgnnLayer(parameters, 6, 3, **options)
    plan = graph.Graph(arrays["src"], arrays["dst"], 11, 11)
    expect(arrays, inputs, parameters, layer(plan, inputs["h"], inputs["x"], inputs["edge"]))


@needs_goldens
@pytest.mark.parametrize("name", ["plain", "gated"])
def test_egnn_without_coordinate_perceptron(name):
    """Gradients are those of a layer whose coordinate perceptron gives 0."""
    arrays, _, parameters = case(f"egnn.{name}")
    plan = graph.Graph(arrays["src"], arrays["dst"], 11, 11)
    found = []
    for missing in (False, True):
        state = {key: value.detach().clone() for key, value in parameters.items()}
        state["coord_mlp.2.weight"].zero_()
        if missing:
            state = {key: value for key, value in state.items() if not key.startswith("coord_mlp.")}
        rest = [state[key].requires_grad_() for key in sorted(state) if not key.startswith("coord_mlp.")]
        inputs = [arrays[key].detach().clone().requires_grad_() for key in ("h", "x", "edge")]
        h, x = layers.EgnnLayer(state, 6, 3)(plan, *inputs)
        found.append(torch.autograd.grad([h, x], [*inputs, *rest], [arrays["seed0"], arrays["seed1"]]))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 * max(1, want.abs().max().item()))


@needs_goldens
@pytest.mark.parametrize("name", ["tri_mul_out", "tri_mul_in"])
def test_triangle_multiplication_gradients_match_goldens(name):
    arrays, inputs, parameters = case(name)
    layer = layers.TriangleMultiplication(parameters, incoming=name == "tri_mul_in")
    expect(arrays, inputs, parameters, [layer(inputs["z"], arrays["mask"])])


@needs_goldens
@pytest.mark.parametrize("name", ["tri_att_start", "tri_att_end"])
def test_triangle_attention_gradients_match_goldens(name):
    arrays, inputs, parameters = case(name)
    layer = layers.TriangleAttention(parameters, 3, ending=name == "tri_att_end")
    expect(arrays, inputs, parameters, [layer(inputs["z"], arrays["mask"])])


@needs_goldens
@pytest.mark.parametrize("name", ["msa_att_row", "msa_att_col"])
def test_attention_of_alignments_gradients_match_goldens(name):
    arrays, inputs, parameters = case(name)
    layer = layers.MsaAttention(parameters, 3)
    expect(arrays, inputs, parameters, [layer(inputs["m"], inputs.get("z"), arrays["mask"])])


@needs_goldens
@pytest.mark.parametrize("name", ["mpnn_encoder", "mpnn_decoder"])
def test_protein_mpnn_layers_gradients_match_goldens(name):
    arrays, inputs, parameters = case(name)
    neighbor = arrays["neighbor"]
    n, k = neighbor.shape
    order = torch.randperm(n * k, generator=torch.Generator().manual_seed(3))  # edges of a destination are apart
    dst = torch.arange(n, dtype=torch.int32).repeat_interleave(k)
    plan = graph.Graph(neighbor.flatten()[order], dst[order], n, n)
    nodes, edge, masks = inputs["nodes"], inputs["edge"].flatten(0, 1)[order], {"node_mask": arrays["known"]}
    if name == "mpnn_encoder":
        layer = layers.MpnnEncoderLayer(parameters)
        nodes, edge = layer(plan, nodes, edge, **masks, edge_mask=arrays["both"].flatten()[order])
        results = [nodes, edge[order.argsort()].unflatten(0, (n, k))]
    else:
        results = [layers.MpnnDecoderLayer(parameters)(plan, nodes, inputs["src"], edge, **masks)]
    expect(arrays, inputs, parameters, results)


@needs_goldens
def test_se3_attention_gradients_match_goldens():
    arrays, inputs, parameters = case("se3")
    layer = layers.Se3AttentionBlock(parameters, {0: 2, 1: 3}, {0: 4, 1: 4, 2: 4}, 3, 2, 2)
    plan = graph.Graph(arrays["src"], arrays["dst"], 11, 11)
    out = layer(plan, inputs["xyz"], {0: inputs["x0"], 1: inputs["x1"]}, inputs["edge"])
    expect(arrays, inputs, parameters, list(out.values()))


@needs_goldens
def test_outer_product_mean_gradients_match_goldens():
    arrays, inputs, parameters = case("outer_product_mean")
    layer = layers.OuterProductMean(parameters)
    expect(arrays, inputs, parameters, [layer(inputs["m"], inputs["z"], arrays["mask"])])


@needs_goldens
@pytest.mark.parametrize(
    "name", ["tri_mul_out", "tri_att_start", "msa_att_row", "outer_product_mean", "ipa", "mpnn_encoder"]
)
def test_masks_that_require_gradients_raise(name):
    arrays, inputs, parameters = case(name)
    x = [value.detach() for value in inputs.values()]
    if name == "mpnn_encoder":
        n, k = arrays["neighbor"].shape
        plan = graph.Graph(arrays["neighbor"].flatten(), torch.arange(n, dtype=torch.int32).repeat_interleave(k), n, n)
        layer, x = layers.MpnnEncoderLayer(parameters), [plan, x[0], x[1].flatten(0, 1)]
        masks = {"node_mask": arrays["known"], "edge_mask": arrays["both"].flatten()}
    else:
        layer = {
            "tri_mul_out": lambda: layers.TriangleMultiplication(parameters),
            "tri_att_start": lambda: layers.TriangleAttention(parameters, 3),
            "msa_att_row": lambda: layers.MsaAttention(parameters, 3),
            "outer_product_mean": lambda: layers.OuterProductMean(parameters),
            "ipa": lambda: layers.InvariantPointAttention(parameters, 3, 5, 4, 6),
        }[name]()
        masks = {"mask": arrays["mask"]}
    for key, mask in masks.items():
        soft = mask.float().requires_grad_()
        with pytest.raises(ValueError, match=f"^{key} requires a gradient"):
            layer(*x, **{key: soft})
        with torch.no_grad():
            layer(*x, **{key: soft})


@needs_goldens
def test_masks_may_change_before_the_backward_pass():
    arrays, inputs, parameters = case("tri_mul_out")
    layer, grads = layers.TriangleMultiplication(parameters), []
    for change in (False, True):
        mask = arrays["mask"].float().clone()
        assert (mask == 0).any()
        out = layer(inputs["z"], mask)
        if change:
            mask.fill_(1)
        grads.append(torch.autograd.grad(out.square().sum(), inputs["z"])[0])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@needs_goldens
def test_invariant_point_attention_gradients_match_goldens():
    arrays, inputs, parameters = case("ipa")
    layer = layers.InvariantPointAttention(parameters, 3, 5, 4, 6)
    out = layer(inputs["s"], inputs["z"], inputs["rotation"], inputs["translation"], arrays["mask"])
    expect(arrays, inputs, parameters, [out])


@needs_goldens
def test_evoformer_block_gradients_match_goldens():
    arrays, inputs, parameters = case("evoformer", MODELS)
    block = layers.EvoformerBlock(parameters, 2, 2)
    expect(arrays, inputs, parameters, block(inputs["m"], inputs["z"], arrays["msa_mask"], arrays["pair_mask"]))
    with pytest.raises(ValueError, match=r"^pair_mask requires a gradient"):
        block(inputs["m"], inputs["z"], arrays["msa_mask"], arrays["pair_mask"].float().requires_grad_())


def structure_module(name, **options):
    arrays, inputs, parameters = case(f"structure.{name}", MODELS)
    geometry = {key[9:]: x for key, x in case("structure.full", MODELS)[0].items() if key.startswith("geometry.")}
    module = layers.StructureModule({**parameters, **geometry}, 2, 3, 2, 3, blocks=3, **options)
    return arrays, inputs, parameters, module


@needs_goldens
@pytest.mark.parametrize("name", ["stop", "full"])
def test_structure_module_gradients_match_goldens(name):
    arrays, inputs, parameters, module = structure_module(name, stop_rotations=name == "stop")
    out = module(inputs["single"], inputs["pair"], arrays["types"], arrays["mask"])
    names = ("frames", "angles", "unnormalized_angles", "sidechain_frames", "positions", "single")
    expect(arrays, inputs, parameters, [out[key] for key in names])


@needs_goldens
def test_frames_alone_have_gradients():
    found = []
    for types in (True, False):  # gradients of results that a loss does not use are 0
        arrays, inputs, _, module = structure_module("full", stop_rotations=False)
        out = module(inputs["single"], inputs["pair"], arrays["types"] if types else None)
        out["frames"].square().sum().backward()
        found.append(inputs["single"].grad)
    assert torch.equal(*found) and found[0].abs().max() > 0


@needs_goldens
def test_protein_mpnn_gradients_match_goldens():
    arrays, inputs, parameters = case("protein_mpnn", MODELS)
    model = layers.ProteinMpnn(parameters, len(arrays["known"]))
    rest = [arrays[key] for key in ("known", "index", "chain", "sequence", "order")]
    expect(arrays, inputs, parameters, [model.log_probabilities(inputs["xyz"], *rest)])


def edge_perceptron(generator):
    columns = 3 + 4 + 1 + 2
    state = {"0.weight": (6, columns), "0.bias": (6,), "2.weight": (5, 6), "2.bias": (5,)}
    parameters = {k: (0.4 * torch.randn(*s, generator=generator)).requires_grad_() for k, s in state.items()}
    src = torch.randint(0, 7, (25,), generator=generator)
    dst = torch.randint(0, 5, (25,), generator=generator)
    shapes = [(6, 3), (7, 4), (25, 2), (6, 3), (7, 3)]
    inputs = [(0.5 * torch.randn(*s, generator=generator)).requires_grad_() for s in shapes]
    return parameters, src, dst, inputs


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_edge_perceptrons_equal_pytorch(reduce):
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(4))
    h_dst, h_src, edge, dst_xyz, src_xyz = inputs
    layer = layers.EdgeMlpReduce(parameters, 3, 4, 2, distance=True, activation="gelu", reduce=reduce, scale=0.5)
    got = layer(graph.Graph(src, dst, 7, 6), *inputs)
    distance = (dst_xyz[dst] - src_xyz[src]).square().sum(-1, keepdim=True)
    x = torch.cat([h_dst[dst], h_src[src], distance, edge], -1)
    for i in (0, 2):
        x = torch.nn.functional.gelu(x @ parameters[f"{i}.weight"].T + parameters[f"{i}.bias"])
    want = torch.zeros(6, 5).index_add(0, dst, 0.5 * x)
    if reduce == "mean":
        want = want / torch.bincount(dst, minlength=6).clamp(min=1)[:, None]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    leaves = [*inputs, *parameters.values()]
    weights = torch.randn(6, 5, generator=torch.Generator().manual_seed(5))
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("weight_dtype", "bound"), [("bfloat16", 0.01), ("int8", 0.022)])
def test_gradients_of_rounded_weights_are_close(weight_dtype, bound):
    # Two products forward and two backward have at most eight roundings. Their standard deviation is 0.45% (int8: 1.1%)
    # of a typical value, as in layers_test.cc. The bounds are twice that for the largest gradient, more for others.
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(4))
    plan, leaves = graph.Graph(src, dst, 7, 6), [*inputs, *parameters.values()]
    grads = [
        torch.autograd.grad(
            layers.EdgeMlpReduce(parameters, 3, 4, 2, distance=True, weight_dtype=name)(plan, *inputs).sum(), leaves
        )
        for name in (weight_dtype, "float32")
    ]
    for rounded, exact in zip(*grads, strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0, atol=bound * max(1, exact.abs().max().item()))
    assert any((rounded - exact).abs().max() > 1e-5 for rounded, exact in zip(*grads, strict=True))


def test_edge_perceptron_passes_gradcheck():
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(6))
    plan = graph.Graph(src, dst, 7, 6)
    frozen = {key: x.detach() for key, x in parameters.items()}
    layer = layers.EdgeMlpReduce(frozen, 3, 4, 2, distance=True)
    check(lambda *x: layer(plan, *x), *inputs)
    assert not layer(plan, *(x.detach() for x in inputs)).requires_grad


def test_layers_follow_an_optimizer():
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(8))
    plan = graph.Graph(src, dst, 7, 6)
    fixed = [x.detach() for x in inputs]
    layer = layers.EdgeMlpReduce(parameters, 3, 4, 2, distance=True)
    optimizer = torch.optim.Adam(parameters.values(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(plan, *fixed) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_weights_may_be_inference_tensors():
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(9))
    fixed = [x.detach() for x in inputs]
    expected = layers.EdgeMlpReduce(parameters, 3, 4, 2, distance=True)(graph.Graph(src, dst, 7, 6), *fixed)
    with torch.inference_mode():
        copies = {name: value.clone() for name, value in parameters.items()}
        layer = layers.EdgeMlpReduce(copies, 3, 4, 2, distance=True)
        assert torch.equal(layer(graph.Graph(src, dst, 7, 6), *fixed), expected)


@pytest.mark.parametrize("inference", [False, True])
def test_writes_that_no_version_counts_need_refresh(inference):
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(9))
    plan, fixed = graph.Graph(src, dst, 7, 6), [x.detach() for x in inputs]
    with torch.inference_mode(inference):
        copies = {name: value.detach().clone() for name, value in parameters.items()}
        layer = layers.EdgeMlpReduce(copies, 3, 4, 2, distance=True)
        before = layer(plan, *fixed)
        for value in copies.values():
            value.data.mul_(0.5)
        layer.refresh()
        after = layer(plan, *fixed)
        assert not torch.equal(after, before)
        assert torch.equal(after, layers.EdgeMlpReduce(copies, 3, 4, 2, distance=True)(plan, *fixed))


def test_gradients_do_not_depend_on_threads_and_second_gradients_raise():
    parameters, src, dst, inputs = edge_perceptron(torch.Generator().manual_seed(9))
    plan = graph.Graph(src, dst, 7, 6)
    layer = layers.EdgeMlpReduce(parameters, 3, 4, 2, distance=True)
    before, found = moesaic.get_num_threads(), []
    for threads in (1, 3):
        moesaic.set_num_threads(threads)
        found.append(torch.autograd.grad(layer(plan, *inputs).square().sum(), [*inputs, *parameters.values()]))
    moesaic.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    (first,) = torch.autograd.grad(layer(plan, *inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(first.sum(), inputs[1])
