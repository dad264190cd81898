"""Gradients of the layers by PyTorch: of their inputs and parameters, for random gradients of their results."""
import torch

import egnn
import evoformer


def case(name, module, inputs, fixed, call):
    """inputs get gradients, fixed ones do not. call(module, inputs) returns a tuple of results."""
    inputs = {key: value.clone().requires_grad_() for key, value in inputs.items()}
    results = call(module, inputs)
    seeds = [torch.randn_like(x) for x in results]
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(results, [*inputs.values(), *parameters.values()], seeds)
    arrays = {f"{name}.{key}": value.detach() for key, value in (inputs | fixed).items()}
    arrays |= {f"{name}.seed{i}": seed for i, seed in enumerate(seeds)}
    arrays |= {f"{name}.weights.{key}": value.detach() for key, value in parameters.items()}
    keys = [f"input.{key}" for key in inputs] + [f"parameter.{key}" for key in parameters]
    return arrays | {f"{name}.grad.{key}": value for key, value in zip(keys, found)}


def goldens():
    arrays = {}
    nodes, edges = 11, 47
    for name, attention, options in (("plain", False, {}), ("gated", True, {"normalize": True, "tanh": True, "mean": False})):
        layer = evoformer.randomize(egnn.Egnn(6, 13, 3, attention))
        src, dst = torch.randint(0, nodes, (edges,)), torch.randint(0, nodes - 1, (edges,))
        src[src == dst] = nodes - 1  # PyTorch's gradient of a distance of 0 is not a number
        inputs = {"h": torch.randn(nodes, 6), "x": torch.randn(nodes, 3), "edge": torch.randn(edges, 3)}
        arrays |= case(f"egnn.{name}", layer, inputs, {"src": src, "dst": dst},
                       lambda module, i: module(i["h"], i["x"], src, dst, i["edge"], **options))
    residues, c = 9, 10
    mask = (torch.rand(residues, residues) > 0.2).double()
    for name, incoming in (("tri_mul_out", False), ("tri_mul_in", True)):
        layer = evoformer.randomize(evoformer.TriangleMultiplication(c, 7, incoming))
        arrays |= case(name, layer, {"z": torch.randn(residues, residues, c)}, {"mask": mask},
                       lambda module, i: (i["z"] + module(i["z"], mask),))
    ipa = evoformer.randomize(evoformer.InvariantPointAttention(14, c, 3, 5, 4, 6))
    rotation = torch.linalg.qr(torch.randn(residues, 3, 3))[0]
    inputs = {"s": torch.randn(residues, 14), "z": torch.randn(residues, residues, c),
              "rotation": rotation * torch.linalg.det(rotation)[:, None, None], "translation": 3 * torch.randn(residues, 3) + 20}
    keys = torch.ones(residues)
    arrays |= case("ipa", ipa, inputs, {"mask": keys},
                   lambda module, i: (module(i["s"], i["z"], i["rotation"], i["translation"], keys),))
    return {name: value.numpy() for name, value in arrays.items()}
