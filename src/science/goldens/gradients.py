"""Gradients of the layers by PyTorch: of their inputs and parameters, for random gradients of their results."""
import torch

import egnn
import evoformer
import mpnn
import se3
import structure


def case(name, module, inputs, fixed, call, padded=False):
    """inputs get gradients, fixed ones do not. call(module, inputs) returns a tuple of results.

    With padded, results [.., n, ..] of the last of n residues have no gradient: those of padding are not defined.
    """
    inputs = {key: value.clone().requires_grad_() for key, value in inputs.items()}
    results = call(module, inputs)
    seeds = [torch.randn_like(x) for x in results]
    for seed in seeds if padded else ():
        (seed[:, -1] if seed.dim() > 2 else seed[-1]).zero_()
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


def model_goldens():
    """Gradients of whole models."""
    sequences, residues, c_m, c_z = 5, 7, 6, 5
    msa_mask, pair_mask = (torch.rand(sequences, residues) > 0.2).double(), (torch.rand(residues, residues) > 0.2).double()
    msa_mask[:, 0] = msa_mask[0] = pair_mask[:, 0] = pair_mask[0] = 1  # no row or column without a key
    block = evoformer.randomize(evoformer.EvoformerBlock(c_m, c_z, 4, 2, 3))
    inputs = {"m": torch.randn(sequences, residues, c_m), "z": torch.randn(residues, residues, c_z)}
    arrays = case("evoformer", block, inputs, {"msa_mask": msa_mask, "pair_mask": pair_mask},
                  lambda module, i: module(i["m"], i["z"], msa_mask, pair_mask))
    geometry = structure.random_geometry(5)
    module = evoformer.randomize(structure.StructureModule(8, 6, 2, 3, 2, 3, 7, 2, geometry, blocks=3, transitions=2))
    types, mask = torch.randint(0, 5, (residues,)), torch.ones(residues)
    mask[-1] = 0
    inputs = {"single": torch.randn(residues, 8), "pair": torch.randn(residues, residues, 6)}
    for name, stop in (("full", False), ("stop", True)):
        arrays |= case(f"structure.{name}", module, inputs, {"types": types, "mask": mask},
                       lambda module, i: tuple(module(i["single"], i["pair"], types, mask, stop).values()), padded=True)
    arrays |= {f"structure.full.geometry.{name}": value for name, value in geometry.items()}
    size = 13
    xyz, known = mpnn.random_backbone(size, [4, 9])
    chain = torch.tensor([1] * 7 + [2] * 6)
    fixed = {"known": known.int(), "index": torch.arange(size) + 100 * (chain - 1), "chain": chain,
             "sequence": torch.randint(0, 21, (size,)), "order": torch.randperm(size)}
    rest = [known, *list(fixed.values())[1:]]
    model = evoformer.randomize(mpnn.ProteinMpnn(6, 2, size))  # all are neighbours: unknown ones have equal distances
    arrays |= case("protein_mpnn", model, {"xyz": xyz}, fixed, lambda module, i: (module(i["xyz"], *rest)[0],))
    return {name: value.numpy() for name, value in arrays.items()}
