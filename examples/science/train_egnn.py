#!/usr/bin/env python3
"""Trains an EGNN layer to predict how extended a chain is: its radius of gyration. Every step has a new graph.

Usage: train_egnn.py [STEPS]. Needs the package (pip install ./python) and PyTorch.
"""
import sys

import torch

from moesaic import graph, layers

HIDDEN, NEIGHBOURS = 32, 12


class Model(torch.nn.Module):
    """Parameters of the layer under its published names, and linear layers around it."""

    def __init__(self):
        super().__init__()
        linear, silu = torch.nn.Linear, torch.nn.SiLU
        self.embedding, self.result = linear(1, HIDDEN), linear(HIDDEN, 1)
        self.egnn = torch.nn.ModuleDict({
            "edge_mlp": torch.nn.Sequential(linear(2 * HIDDEN + 1, HIDDEN), silu(), linear(HIDDEN, HIDDEN), silu()),
            "node_mlp": torch.nn.Sequential(linear(2 * HIDDEN, HIDDEN), silu(), linear(HIDDEN, HIDDEN)),
            "coord_mlp": torch.nn.Sequential(linear(HIDDEN, HIDDEN), silu(), linear(HIDDEN, 1, bias=False)),
        })
        self.layer = layers.EgnnLayer(dict(self.egnn.named_parameters()), node_inputs=HIDDEN)

    def forward(self, xyz):
        n = len(xyz)
        dst, src = layers.knn_graph(xyz, NEIGHBOURS)
        features, _ = self.layer(graph.Graph(src, dst, n, n), self.embedding(torch.ones(n, 1)), xyz)
        return self.result(features).mean()


def chain(generator):
    """A random walk of 24 to 48 residues whose steps turn little or much, and its radius of gyration, in nanometers."""
    n = int(torch.randint(24, 49, (1,), generator=generator))
    steps = torch.randn(n, 3, generator=generator) + 3 * torch.rand(1, generator=generator) * torch.randn(3, generator=generator)
    xyz = torch.cumsum(0.38 * torch.nn.functional.normalize(steps, dim=1), 0)
    return xyz, (xyz - xyz.mean(0)).square().sum(1).mean().sqrt()


def train(steps):
    """Returns the mean squared error of the last fifth of the steps, and the variance of all radii."""
    torch.manual_seed(1)
    generator, model = torch.Generator().manual_seed(2), Model()
    optimizer, errors, radii = torch.optim.Adam(model.parameters(), lr=3e-3), [], []
    for _ in range(steps):
        batch = [chain(generator) for _ in range(8)]
        loss = torch.stack([(model(xyz) - radius).square() for xyz, radius in batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
        radii += [radius.item() for _, radius in batch]
    fifth = max(1, steps // 5)
    return sum(errors[-fifth:]) / fifth, torch.tensor(radii).var().item()


def main():
    error, variance = train(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print(f"mean squared error of the last steps: {error:.3f}; variance of the radii, which a constant would leave: {variance:.3f}")


if __name__ == "__main__":
    main()
