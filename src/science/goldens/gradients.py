"""Gradients of the layers by PyTorch: of their inputs and parameters, for random gradients of their results."""
import torch

import egnn
import evoformer
import mpnn
import se3


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
    for name, ending in (("tri_att_start", False), ("tri_att_end", True)):
        layer = evoformer.randomize(evoformer.TriangleAttention(c, 3, 4, ending))
        arrays |= case(name, layer, {"z": torch.randn(residues, residues, c)}, {"mask": mask},
                       lambda module, i: (i["z"] + module(i["z"], mask),))
    present = (torch.rand(6, residues) > 0.2).double()
    present[0] = 1  # no column is empty: its softmax is defined otherwise
    for name, row in (("msa_att_row", True), ("msa_att_col", False)):
        layer = evoformer.randomize(evoformer.MsaAttention(11, c, 3, 4, row))
        inputs = {"m": torch.randn(6, residues, 11)} | ({"z": torch.randn(residues, residues, c)} if row else {})
        arrays |= case(name, layer, inputs, {"mask": present},
                       lambda module, i: (i["m"] + module(i["m"], i.get("z"), present),))
    layer = evoformer.randomize(evoformer.OuterProductMean(11, c, 5))
    inputs = {"m": torch.randn(6, residues, 11), "z": torch.randn(residues, residues, c)}
    arrays |= case("outer_product_mean", layer, inputs, {"mask": present}, lambda module, i: (i["z"] + module(i["m"], present),))
    fiber_in, fiber_out = {0: 2, 1: 3}, {0: 4, 1: 4, 2: 4}
    block = se3.AttentionBlock(fiber_in, fiber_out, 3, 2, 2)
    for name, parameter in block.named_parameters():  # so that norms matter
        if name.endswith(("net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias")):
            torch.nn.init.uniform_(parameter, 0.3, 1.0)
    src, dst = torch.randint(0, nodes, (edges,)), torch.randint(0, nodes - 1, (edges,))
    src[src == dst] = nodes - 1
    inputs = {"x0": torch.randn(nodes, 2, 1), "x1": torch.randn(nodes, 3, 3), "edge": torch.randn(edges, 3),
              "xyz": 2 * torch.randn(nodes, 3)}
    arrays |= case("se3", block, inputs, {"src": src, "dst": dst},
                   lambda module, i: tuple(module({0: i["x0"], 1: i["x1"]}, src, dst, i["xyz"][src] - i["xyz"][dst], i["edge"]).values()))
    hidden, neighbors = 8, 4
    neighbor = torch.stack([torch.randperm(residues)[:neighbors] for _ in range(residues)])
    known = torch.ones(residues)
    known[3] = 0
    inputs = {"nodes": torch.randn(residues, hidden), "edge": torch.randn(residues, neighbors, hidden)}
    fixed = {"neighbor": neighbor, "known": known, "both": known[:, None] * known[neighbor]}
    arrays |= case("mpnn_encoder", evoformer.randomize(mpnn.Layer(hidden, 2 * hidden, True)), inputs, fixed,
                   lambda module, i: module.encode(i["nodes"], i["edge"], neighbor, known))
    inputs |= {"src": torch.randn(residues, 2 * hidden)}
    arrays |= case("mpnn_decoder", evoformer.randomize(mpnn.Layer(hidden, 3 * hidden, False)), inputs, fixed,
                   lambda module, i: (module.update(i["nodes"], torch.cat([i["edge"], i["src"][neighbor]], -1), known),))
    return {name: value.numpy() for name, value in arrays.items()}
