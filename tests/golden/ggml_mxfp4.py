#!/usr/bin/env python3
"""Writes ggml_mxfp4.safetensors: MXFP4 blocks as gguf-py, ggml's own Python package, dequantises them.

`blocks` (u8 [512, 17]) has every scale twice, with every code at every place; `values` (f32 [512, 32]) is what they are.
Needs numpy, safetensors and gguf (0.19.0 made the file).
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from safetensors.numpy import save_file


def main() -> None:
    number, place = np.arange(512)[:, None], np.arange(16)[None, :]
    low, high = (number + place) % 16, (5 * number + 3 * place + 7) % 16
    blocks = np.concatenate([number % 256, low | high << 4], axis=1).astype(np.uint8)
    values = dequantize(blocks, GGMLQuantizationType.MXFP4)
    save_file({"blocks": blocks, "values": values.astype(np.float32)},
              Path(__file__).parent / "ggml_mxfp4.safetensors")


if __name__ == "__main__":
    main()
