#!/usr/bin/env python3
"""Makes a MoE layer of a checkpoint overflow fp16. In bf16 and f32 the model computes the same.

In the routed experts of one layer, rows of up_proj are multiplied by FACTOR, a power of two, and columns of down_proj
divided by it. In bf16 and f32 every product and sum is scaled exactly, and the outputs are identical. But silu(gate) * up
is FACTOR times as large and exceeds the range of fp16 (65504), as in the last MoE layers of some large models. The default
layer is the last one with experts, without multi-token-prediction modules.

Usage: inject_overflow.py MODEL OUT [--factor 32768] [--layer N]
Standard library only. Takes bf16 experts with the names of DeepSeek and Qwen checkpoints.
"""

import argparse
import array
import json
import math
import re
import shutil
import sys
from pathlib import Path

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(up_proj|down_proj)\.weight")


def scaled(values: bytes, exponent: int) -> bytes:
    """Multiplies bf16 numbers by 2^exponent; zeros and subnormal numbers are unchanged."""
    words = array.array("H", values)
    for i, word in enumerate(words):
        biased = word >> 7 & 0xFF
        if biased == 0:
            continue
        if not 0 < biased + exponent < 0xFF:
            raise SystemExit("--factor moves weights out of the range of bf16; choose one nearer to 1")
        words[i] = word + (exponent << 7)
    return words.tobytes()


def last_moe_layer(folder: Path) -> int:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    found = set()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {int(match[1]) for match in map(EXPERT.fullmatch, header) if match and int(match[1]) < layers}
    if not found:
        raise SystemExit(f"{folder}: no layer has a tensor model.layers.N.mlp.experts.E.up_proj.weight")
    return max(found)


def inject(folder: Path, factor: float, layer: int) -> None:
    """Changes the checkpoint in `folder` in place."""
    exponent = int(math.log2(factor))
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            match = EXPERT.fullmatch(name)
            if not match or int(match[1]) != layer:
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, must be bf16")
            part = slice(*(begin + offset for offset in entry["data_offsets"]))
            data[part] = scaled(bytes(data[part]), exponent if match[2] == "up_proj" else -exponent)
        path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=32768)
    parser.add_argument("--layer", type=int)
    options = parser.parse_args()
    if options.factor <= 0 or math.frexp(options.factor)[0] != 0.5:
        parser.error("--factor must be a power of two, because others change the model")
    if sys.byteorder != "little":
        parser.error("this machine's byte order differs from that of the files")
    shutil.copytree(options.model, options.out)
    inject(options.out, options.factor, last_moe_layer(options.out) if options.layer is None else options.layer)


if __name__ == "__main__":
    main()
