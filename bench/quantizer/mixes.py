#!/usr/bin/env python3
"""Compares mixed precision with one precision of the same size on moesaic-tiny.

Writes each uniform checkpoint, then a mix whose weight files are not larger. `moesaic perplexity --kl-base` compares both
with the bf16 model on the held-out answers. Calibration text consists of training conversations of a separate seed.
Prints bytes, KL in nats per token with its standard error, the predicted KL of the mix, and the ratio. `--keep-mtp` keeps
the multi-token-prediction module in both. The main model's KL does not depend on it, so a mix rounds it most.

Usage: mixes.py MOESAIC [--methods rtn,mse,gptq] [--mix w4a16-g64,nvfp4,fp8,w8a8,bf16] [--keep-mtp]
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(MODEL))

import generate  # noqa: E402

UNIFORM = {"w4a16 g32": ["--scheme", "w4a16-g32"],
           "nvfp4": ["--scheme", "nvfp4"],
           "fp8": ["--scheme", "fp8"]}
TOKENS = "16384"


def write_texts(folder: Path) -> None:
    sampler = generate.Sampler(random.Random("calibration"))
    texts = ("".join(text for text, _ in generate.segments(**sampler.conversation(512, generate.LAST)))
             for _ in range(200))
    (folder / "calibration.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    records = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    (folder / "heldout.txt").write_text("".join(
        "".join(text for text, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)) + r["expected"]
        for r in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--methods", default="rtn,mse,gptq")
    parser.add_argument("--mix", default="w4a16-g64,nvfp4,fp8,w8a8,bf16")
    parser.add_argument("--keep-mtp", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())

    def moesaic(*flags) -> str:
        return subprocess.run([arguments.moesaic, *map(str, flags)], check=True, capture_output=True, text=True).stdout

    def quantized(*flags) -> tuple[int, float, float, float]:
        """Returns the size of the weight files, KL, its error, and the predicted KL."""
        out = folder / "out"
        keep = ["--keep", "bf16", r"layers\.4\."] if arguments.keep_mtp else []
        moesaic("quantize", MODEL, "-o", out, *flags, *keep)
        moesaic("verify", out, "--source", MODEL)
        kl = json.loads(moesaic("perplexity", out, folder / "heldout.txt", "--kl-base", folder / "base", "--max-tokens",
                                  TOKENS, "--format", "json"))
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        report = out / "quantize.json"
        mix = json.loads(report.read_text()).get("mix", {}) if report.exists() else {}
        shutil.rmtree(out)
        return size, kl["kl"], kl["kl_error"], mix.get("predicted_loss", 0)

    try:
        write_texts(folder)
        moesaic("perplexity", MODEL, folder / "heldout.txt", "--save-logits", folder / "base", "--max-tokens", TOKENS)
        calibration = ["--calibration", folder / "calibration.jsonl"]
        print(f"mixes of {arguments.mix}")
        print(f"{'method':8}{'uniform':12}{'bytes':>9}{'KL':>10}{'':>10}{'mix bytes':>11}{'KL':>10}{'':>10}"
              f"{'predicted':>11}{'mix/uniform':>13}")
        for method in arguments.methods.split(","):
            for name, scheme in UNIFORM.items():
                flags = ["--method", method, *(calibration if method == "gptq" else [])]
                size, kl, error, _ = quantized(*scheme, *flags)
                mixed, mixed_kl, mixed_error, predicted = quantized("--mix", arguments.mix, "--budget", size, "--method",
                                                                    method, *calibration)
                assert mixed <= size, (mixed, size)
                print(f"{method:8}{name:12}{size:9}{kl:10.5f} ±{error:7.5f} {mixed:11}{mixed_kl:10.5f} ±{mixed_error:7.5f} "
                      f"{predicted:11.5f}{mixed_kl / kl:13.3f}", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
