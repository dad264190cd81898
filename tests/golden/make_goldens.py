#!/usr/bin/env python3
"""Makes the tiny checkpoints of this folder and their golden.safetensors, or checks the committed ones.

python make_goldens.py                   make all
python make_goldens.py kimi-k2 ...       make these
python make_goldens.py --check [...]     recompute the goldens of the committed checkpoints and compare
python make_goldens.py --mutations       change single options and show how far the logits move
python make_goldens.py --refs DIR        convert DIR/<name>/golden.npz to refs/<name>.golden.safetensors and make those of
                                         DIR/gguf/<name>-q8_0.gguf
"""

import argparse
import time
from pathlib import Path

import torch
import transformers

from oracle import cases, folder, gguf_refs, golden, mutations, refs

HERE = Path(__file__).resolve().parent
MAX_DIFFERENCE = 2e-5  # of fp32 logits between machines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--refs", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.mutations:
        mutations.show(HERE)
        return
    if args.refs:
        refs.convert(args.refs, HERE / "refs")
        gguf_refs.convert(args.refs, HERE / "refs")
        return
    for name in args.names or cases.NAMES:
        start = time.monotonic()
        path = HERE / name
        if not args.check:
            folder.write(path, *cases.checkpoint(name))
        tensors, metadata = cases.run(name, path)
        if args.check:
            difference = golden.compare(path, tensors)
            assert difference < MAX_DIFFERENCE, f"{name}: {difference}"
            metadata["difference"] = f"{difference:.3g}"
        else:
            golden.write(path, tensors, metadata)
        size = sum(f.stat().st_size for f in path.iterdir()) / 1024
        print(f"{name:28} {size:6.0f} KiB {time.monotonic() - start:6.1f} s  {metadata}", flush=True)


if __name__ == "__main__":
    main()
