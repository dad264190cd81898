#!/usr/bin/env python3
"""Writes the goldens of the layers of src/science: inputs, weights and results of PyTorch transcriptions.

Usage: make_goldens.py [FOLDER]. Needs numpy, torch and e3nn (versions in requirements.txt); the tests need none of them.
The transcriptions follow the papers and the published programs, in float64, on random weights.
"""
import collections
import pathlib
import sys

import numpy as np
import torch

import egnn
import evoformer
import gradients
import mpnn
import se3
import structure


def state(module, prefix=""):
    return {f"{prefix}{name}": value.detach().numpy() for name, value in module.state_dict().items()}


def egnn_goldens():
    nodes, edges, hidden = 20, 90, 24
    arrays = {}
    for name, attention, options in (("plain", False, {}), ("gated", True, {"normalize": True, "tanh": True, "mean": False})):
        layer = egnn.Egnn(10, hidden, 3, attention)
        for parameter in layer.coord_mlp[2].parameters():  # larger than the program's, so that coordinates move
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        h, x, edge = torch.randn(nodes, 10), torch.randn(nodes, 3), torch.randn(edges, 3)
        src, dst = torch.randint(0, nodes, (edges,)), torch.randint(0, nodes - 2, (edges,))
        h_out, x_out = layer(h, x, src, dst, edge, **options)
        arrays |= {f"{name}.{key}": value.numpy() for key, value in
                   {"h": h, "x": x, "edge": edge, "src": src, "dst": dst, "h_out": h_out.detach(), "x_out": x_out.detach()}.items()}
        arrays |= state(layer, f"{name}.weights.")
    return arrays


def save(path, arrays):
    """Writes floats as f32 and integers as i32."""
    narrow = {name: np.asarray(value, np.float32 if np.asarray(value).dtype.kind == "f" else np.int32) for name, value in arrays.items()}
    np.savez_compressed(path, **narrow)
    print(f"{path}: {path.stat().st_size} bytes")


def checkpoint_golden(path):
    """A file in the layout of ProteinMPNN's checkpoints."""
    matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensors = {"a.weight": matrix, "a.transposed": matrix.T, "half": torch.tensor([0.5, -2]).half(),
               "bfloat": torch.tensor([0.5, -2]).bfloat16(), "long": torch.tensor([7, -9]), "scalar": torch.tensor(3.0),
               "part": matrix.flatten()[2:4], "empty": torch.zeros(0, 4)}
    state_dict = collections.OrderedDict(tensors)
    state_dict._metadata = {"": {"version": 1}}  # as Module.state_dict() has
    torch.save({"num_edges": 48, "noise_level": 0.2, "model_state_dict": state_dict, "note": "text", "list": [1, 2]}, path)
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(20261125)
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    checkpoint_golden(folder / "checkpoint.pt")
    save(folder / "egnn.npz", egnn_goldens())
    save(folder / "protein_mpnn.npz", mpnn.goldens(state))
    save(folder / "evoformer.npz", evoformer.goldens(state))
    save(folder / "se3.npz", se3.goldens(state))
    save(folder / "structure.npz", structure.goldens(state))
    save(folder / "gradients.npz", gradients.goldens())
    save(folder / "model_gradients.npz", gradients.model_goldens())


if __name__ == "__main__":
    main()
