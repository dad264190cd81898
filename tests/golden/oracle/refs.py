"""Converts golden.npz files of older reference checkpoints to the names this folder uses."""

import numpy
import torch
from safetensors.torch import save_file


def convert(source, target):
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("*/golden.npz")):
        npz, tensors = numpy.load(file), {}
        for i in range(sum(k.startswith("ids") for k in npz)):
            ids, logits, p = npz[f"ids{i}"], npz[f"logits{i}"], f"prompt_{i}."
            logits = logits[-8:] if len(ids) >= 64 else logits  # for size
            tensors |= {
                p + "ids": torch.from_numpy(ids),
                p + "rows": torch.arange(len(ids) - len(logits), len(ids), dtype=torch.int32),
                p + "logits": torch.from_numpy(logits),
                p + "greedy": torch.from_numpy(npz[f"greedy{i}"]),
                p + "margins": torch.from_numpy(npz[f"margin{i}"]),
                p + "nll": torch.from_numpy(npz[f"nll{i}"]),
            }
        save_file(tensors, target / f"{file.parent.name}.golden.safetensors")
