#!/usr/bin/env python3
"""Adds outlier channels to a checkpoint. The model computes the same but is harder to quantize.

Some channels of each norm's weight are multiplied by FACTOR, a power of two, and the matching inputs of all linears that
read the norm are divided by it. In exact arithmetic the model is the same, but a few activations are FACTOR times as
large as the others, as in large trained models.

Usage: inject_outliers.py MODEL OUT [--factor 64] [--channels 4]
Needs torch and safetensors.
"""

import argparse
import math
import random
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

READERS = {
    "input_layernorm": r"self_attn\.(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)\.weight",
    "post_attention_layernorm": r"mlp\.(gate|gate_proj|up_proj|(experts\.\d+|shared_experts)\.(gate_proj|up_proj))\.weight",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=64)
    parser.add_argument("--channels", type=int, default=4)
    options = parser.parse_args()
    shutil.copytree(options.model, options.out)
    if options.factor <= 0 or math.frexp(options.factor)[0] != 0.5:
        parser.error("--factor must be a power of two, because others change the model")
    rng = random.Random(0)
    shards = {path: load_file(path) for path in sorted(options.out.glob("*.safetensors"))}
    weights = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    for name in list(weights):
        norm = re.fullmatch(r"(model\.layers\.\d+\.)(\w+)\.weight", name)
        if not norm or norm[2] not in READERS:
            continue
        channels = rng.sample(range(weights[name].shape[0]), options.channels)
        weights[name][channels] *= options.factor
        for reader in weights:
            if re.fullmatch(re.escape(norm[1]) + READERS[norm[2]], reader):
                weights[reader][:, channels] /= options.factor
    for path, shard in shards.items():
        save_file(shard, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
