#!/usr/bin/env python3
"""One round of message passing on a protein-like chain: neighbours, weighted sums, attention, and their gradients.

Needs the package (pip install ./python); with PyTorch it also trains a weight.
"""
import importlib.util

import numpy as np

from moesaic import graph, layers


def main():
    rng = np.random.default_rng(1)
    xyz = np.cumsum(rng.normal(size=(100, 3)), axis=0)
    dst, src = layers.knn_graph(xyz, k=8, seq_window=3)
    plan = graph.Graph(src, dst, 100, 100)
    print(f"{plan.num_edges} edges between {plan.num_dst} residues")
    h = rng.normal(size=(100, 16)).astype(np.float32)
    distance = np.linalg.norm(xyz[src] - xyz[dst], axis=1).astype(np.float32)
    weights = graph.segment_softmax(plan, -distance)
    smooth = graph.u_mul_e_sum(plan, h, weights)
    print(f"weights of residue 0 sum to {weights[dst == 0].sum():.3f}; features shrink from {h.std():.3f} to {smooth.std():.3f}")
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: no training")
        return
    import torch

    features, target = torch.from_numpy(h), torch.from_numpy(smooth)
    scale = torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.Adam([scale], lr=0.1)
    for _ in range(100):
        mixed = graph.u_mul_e_sum(plan, features, graph.edge_softmax(plan, -scale * torch.from_numpy(distance)))
        loss = (mixed - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"the learned scale is {scale.item():.3f} (the data were made with 1)")


if __name__ == "__main__":
    main()
