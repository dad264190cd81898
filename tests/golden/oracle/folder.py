"""Reads and writes a checkpoint folder as the Hub has it: config.json and one or several safetensors files."""

import json
import shutil

from safetensors.torch import load_file, save_file


def write(path, config, tensors, shards=1):
    """Writes `tensors` in the order given, cut into `shards` files of about equal size."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(t.nbytes for t in tensors.values())
    parts, weight_map, done = [{} for _ in range(shards)], {}, 0
    for name, tensor in tensors.items():
        part = min(shards - 1, done * shards // total)
        done += tensor.nbytes
        parts[part][name] = tensor
        weight_map[name] = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
    for i, part in enumerate(parts):
        save_file(part, path / f"model-{i + 1:05d}-of-{shards:05d}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read(path):
    """config.json and all tensors of a folder."""
    tensors = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors |= load_file(file)
    return json.loads((path / "config.json").read_text()), tensors
