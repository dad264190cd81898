"""PyTorch transcriptions of the SE(3)-Transformer's layers (arXiv 2006.10503) in the layout of NVIDIA's program, on e3nn."""
import math

import torch
from e3nn import o3
from torch import nn


def basis(offsets, degree_in, degree_out):
    """[edges, 2 in + 1, frequencies, 2 out + 1]: Clebsch-Gordan coefficients times harmonics."""
    parts = []
    for degree in range(abs(degree_in - degree_out), degree_in + degree_out + 1):
        harmonics = o3.spherical_harmonics(degree, offsets, normalize=True)
        coupling = o3.wigner_3j(degree, degree_in, degree_out, dtype=torch.float64).to(offsets.dtype)
        parts.append(torch.einsum("nf,fio->nio", harmonics, coupling))
    return torch.stack(parts, 2)


class Radial(nn.Module):
    def __init__(self, inputs, outputs, norms):
        super().__init__()
        def norm():
            return [nn.LayerNorm(32)] if norms else []
        self.net = nn.Sequential(nn.Linear(inputs, 32), *norm(), nn.ReLU(), nn.Linear(32, 32), *norm(), nn.ReLU(),
                                 nn.Linear(32, outputs, bias=False))

    def forward(self, x):
        return self.net(x)


class Conv(nn.Module):
    def __init__(self, fiber_in, fiber_out, edge_inputs, self_interaction, norms):
        super().__init__()
        self.fiber_in, self.fiber_out = fiber_in, fiber_out
        self.conv = nn.ModuleDict({f"{i},{o}": nn.ModuleDict({"radial_func": Radial(
            edge_inputs + 1, (2 * min(i, o) + 1) * fiber_in[i] * fiber_out[o], norms)}) for o in fiber_out for i in fiber_in})
        if self_interaction:
            self.to_kernel_self = nn.ParameterDict({str(o): torch.randn(fiber_out[o], fiber_in[o]) / math.sqrt(fiber_in[o])
                                                    for o in fiber_out if o in fiber_in})
        self.self_interaction = self_interaction

    def forward(self, nodes, src, dst, offsets, edge):
        inputs = torch.cat([edge, offsets.norm(dim=-1, keepdim=True)], -1)
        out = {}
        for o, c_out in self.fiber_out.items():
            total = 0
            for i, c_in in self.fiber_in.items():
                products = nodes[i][src] @ basis(offsets, i, o).flatten(2)  # [edges, c_in, frequencies * (2 o + 1)]
                products = products.reshape(len(src), -1, 2 * o + 1)
                weights = self.conv[f"{i},{o}"]["radial_func"](inputs).reshape(len(src), c_out, -1)
                total = total + weights @ products
            if self.self_interaction and o in self.fiber_in:
                total = total + self.to_kernel_self[str(o)] @ nodes[o][dst]
            out[o] = total
        return out


class Linear(nn.Module):
    def __init__(self, fiber_in, fiber_out):
        super().__init__()
        self.weights = nn.ParameterDict({str(d): torch.randn(c, fiber_in[d]) / math.sqrt(fiber_in[d]) for d, c in fiber_out.items()})

    def forward(self, x):
        return {int(d): weight @ x[int(d)] for d, weight in self.weights.items()}


class NormLayer(nn.Module):
    def __init__(self, fiber):
        super().__init__()
        self.layer_norms = nn.ModuleDict({str(d): nn.LayerNorm(c) for d, c in fiber.items()})

    def forward(self, x):
        out = {}
        for degree, norm in self.layer_norms.items():
            lengths = x[int(degree)].norm(dim=-1, keepdim=True).clamp(min=2.0**-24)
            out[int(degree)] = x[int(degree)] / lengths * norm(lengths.squeeze(-1)).relu()[..., None]
        return out


class AttentionBlock(nn.Module):
    def __init__(self, fiber_in, fiber_out, edge_inputs, heads, div):
        super().__init__()
        self.fiber_in, self.heads = fiber_in, heads
        self.value = {d: c // div for d, c in fiber_out.items()}
        self.key = {d: c for d, c in self.value.items() if d in fiber_in}
        self.to_key_value = Conv(fiber_in, {d: c + self.key.get(d, 0) for d, c in self.value.items()}, edge_inputs, True, True)
        self.to_query = Linear(fiber_in, self.key)
        self.project = Linear({d: c + fiber_in.get(d, 0) for d, c in self.value.items()}, fiber_out)

    def forward(self, nodes, src, dst, offsets, edge):
        def heads(x, fiber):
            return torch.cat([x[d].reshape(len(x[d]), self.heads, -1) for d in fiber], -1)

        fused = self.to_key_value(nodes, src, dst, offsets, edge)
        value = {d: fused[d][:, :c] for d, c in self.value.items()}
        key = {d: fused[d][:, c:] for d, c in self.key.items()}
        query = heads(self.to_query(nodes), self.key)
        scores = (heads(key, self.key) * query[dst]).sum(-1) / math.sqrt(sum(c * (2 * d + 1) for d, c in self.key.items()))
        weights = scores.exp()
        weights = weights / torch.zeros(len(query), self.heads).index_add_(0, dst, weights)[dst]
        joined = {}
        for d, c in self.value.items():
            messages = weights[..., None, None] * value[d].reshape(len(src), self.heads, c // self.heads, -1)
            attended = torch.zeros(len(query), *messages.shape[1:]).index_add_(0, dst, messages).reshape(len(query), c, -1)
            joined[d] = torch.cat([nodes[d], attended], 1) if d in nodes else attended
        return self.project(joined)


def goldens(state):
    arrays = {f"w3j.{a}{b}{c}": o3.wigner_3j(a, b, c, dtype=torch.float64) for a, b, c in
              [(0, 1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 3), (3, 2, 4), (4, 4, 4)]}
    nodes, edges = 12, 50
    directions = torch.randn(9, 3)
    arrays |= {"directions": directions, "harmonics": torch.cat([o3.spherical_harmonics(d, directions, normalize=True) for d in range(7)], -1)}
    src, dst = torch.randint(0, nodes, (edges,)), torch.randint(0, nodes - 1, (edges,))
    dst = torch.where(src == dst, (dst + 1) % (nodes - 1), dst)
    keep = src != dst
    src, dst = src[keep], dst[keep]
    xyz, edge = torch.randn(nodes, 3), torch.randn(len(src), 3)
    offsets = xyz[src] - xyz[dst]
    fiber_in, fiber_out = {0: 5, 1: 3}, {0: 8, 1: 8, 2: 4}
    features = {d: torch.randn(nodes, c, 2 * d + 1) for d, c in fiber_in.items()}
    arrays |= {"src": src, "dst": dst, "xyz": xyz, "edge": edge, "x0": features[0], "x1": features[1]}
    conv, block, norm = Conv(fiber_in, fiber_out, 3, True, False), AttentionBlock(fiber_in, fiber_out, 3, 2, 2), NormLayer(fiber_in)
    with torch.no_grad():
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.2, 1.0)
        messages = conv(features, src, dst, offsets, edge)
        for d, c in fiber_out.items():
            arrays[f"conv.out{d}"] = torch.zeros(nodes, c, 2 * d + 1).index_add_(0, dst, messages[d])
        arrays |= {f"attention.out{d}": value for d, value in block(features, src, dst, offsets, edge).items()}
        arrays |= {f"norm.out{d}": value for d, value in norm(features).items()}
    return ({name: value.numpy() for name, value in arrays.items()} | state(conv, "conv.weights.") | state(block, "attention.weights.")
            | state(norm, "norm.weights."))
