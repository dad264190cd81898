#!/usr/bin/env python3
"""moesaic quantize beside llm-compressor and llama-quantize: the same model, the same calibration, one run.

    python3 bench/quantizer/compare.py build/release/bin/moesaic --python VENV/bin/python [--gguf model-f16.gguf]

For W8A8 and W4A16 in groups of 32, by nearest rounding and by GPTQ, both programs quantize moesaic-tiny with the same
linears left alone; the folders are then run by the same program over the same held-out answers, beside the bf16 model.
Prints KL(bf16 || quantized), top-1 agreement, bytes, seconds and peak resident memory of the whole process, and the
ratios. --python names a Python that has llm-compressor; LLAMA_CPP names the folder of llama-quantize, which is compared
where --gguf names a model in f16 or f32. Needs tokenizers, safetensors and numpy.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import numpy
import safetensors.numpy
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(TINY))
import generate  # noqa: E402

ROWS, ROW_TOKENS = 96, 512
RUNS = (("w8a8", "rtn"), ("w8a8", "gptq"), ("w4a16", "rtn"), ("w4a16", "mse"), ("w4a16", "gptq"))


def conversations_text(conversation, **flags):
    return "".join(text for text, _ in generate.segments(**conversation, **flags))


def write_calibration(path):
    """Conversations of a seed of their own, as tokens [rows, length]."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    sampler = generate.Sampler(random.Random("calibration"))
    rows = []
    while len(rows) < ROWS:
        row = []
        while len(row) < ROW_TOKENS:
            text = conversations_text(sampler.conversation(ROW_TOKENS, generate.LAST))
            row += tokenizer.encode(text, add_special_tokens=False).ids
        rows.append(row[:ROW_TOKENS])
    safetensors.numpy.save_file({"tokens": numpy.array(rows, numpy.int32)}, path)


def write_held_out(path):
    rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
    path.write_text("".join(
        "".join(t for t, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)) + r["expected"] for r in rows))


def write_source(folder):
    """moesaic-tiny without its multi-token-prediction layer, which transformers does not load."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    beyond = f"model.layers.{config['num_hidden_layers']}."
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    data = (TINY / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__" or name.startswith(beyond):
            continue
        part = data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        header[name] = {**entry, "data_offsets": [len(body), len(body) + len(part)]}
        body += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


# A process begins with the peak of the one that it is forked from; this one is small.
LAUNCHER = """import json, resource, subprocess, sys, time
start = time.monotonic()
code = subprocess.call(sys.argv[2:])
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
json.dump({"code": code, "seconds": time.monotonic() - start, "peak": peak}, open(sys.argv[1], "w"))"""


def run(command):
    """Standard output, seconds and peak bytes of a program."""
    with tempfile.NamedTemporaryFile("r") as told, tempfile.TemporaryFile("w+") as errors:
        launched = [sys.executable, "-S", "-E", "-c", LAUNCHER, told.name, *map(str, command)]
        output = subprocess.run(launched, stdout=subprocess.PIPE, stderr=errors, text=True,
                                env={**os.environ, "HF_HUB_OFFLINE": "1"}).stdout
        took = json.load(told)
        if took["code"] != 0:
            errors.seek(0)
            raise SystemExit(f"{' '.join(map(str, command))}:\n{errors.read()[-3000:]}")
    return output, took["seconds"], took["peak"]


def weights_bytes(path):
    path = pathlib.Path(path)
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.glob("*.safetensors"))


class Bench:
    def __init__(self, arguments, folder):
        self.moesaic, self.folder, self.tokens = arguments.moesaic, folder, arguments.tokens
        self.text = folder / "held_out.txt"
        write_held_out(self.text)
        print("| scheme | method | by | KL, nats a token | top-1 | bytes | seconds | peak memory |")
        print("|---|---|---|---:|---:|---:|---:|---:|")

    def quality(self, model, reference):
        output, _, _ = run([self.moesaic, "perplexity", model, "--text", self.text, "--reference", reference, "-c", "512",
                            "--max-tokens", self.tokens, "--format", "json"])
        return json.loads(output)

    def side(self, scheme, method, by, command, out, reference):
        shutil.rmtree(out, ignore_errors=True)
        output, seconds, peak = run(command)
        quality = self.quality(out, reference)
        result = {"kl": quality["kl"], "bytes": weights_bytes(out), "seconds": seconds, "peak": peak}
        note = ""
        if by == "llm-compressor":
            note = f" ({json.loads(output.splitlines()[-1])['quantizing_seconds']:.1f} without start and saving)"
        print(f"| {scheme} | {method} | {by} | {quality['kl']:.5f} ± {quality['kl_error']:.5f} | {quality['same_top']:.2%} | "
              f"{result['bytes'] / 2**20:.2f} MiB | {seconds:.2f}{note} | {peak / 2**20:.0f} MiB |", flush=True)
        return result

    def ratios(self, what, mine, theirs):
        return f"{what}: " + ", ".join(f"{key} {mine[key] / theirs[key]:.3g}" for key in ("kl", "bytes", "seconds", "peak"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--python", help="a Python with llm-compressor; none: Moesaic alone")
    parser.add_argument("--gguf", type=pathlib.Path, help="a model in f16 or f32 for llama-quantize")
    parser.add_argument("--only", help="scheme, e.g. w8a8")
    parser.add_argument("--tokens", type=int, default=16384, help="of the held-out text")
    arguments = parser.parse_args()
    has_gptq = "gptq" in run([arguments.moesaic, "quantize", "--help"])[0]
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        calibration = folder / "calibration.safetensors"
        write_calibration(calibration)
        source = folder / "source"
        write_source(source)
        bench = Bench(arguments, folder)
        for scheme, method in RUNS:
            mine = theirs = None
            if arguments.only not in (None, scheme):
                continue
            if method != "gptq" or has_gptq:
                flags = ["--calibration", calibration] if method == "gptq" else []
                mine = bench.side(scheme, method, "moesaic",
                                  [arguments.moesaic, "quantize", source, "-o", folder / "mine", "--scheme", scheme,
                                   "--method", method, *flags], folder / "mine", source)
            if arguments.python and method != "mse":
                theirs = bench.side(scheme, method, "llm-compressor",
                                    [arguments.python, ROOT / "bench/quantizer/llmcompressor_side.py", source,
                                     folder / "theirs", scheme, method, calibration], folder / "theirs", source)
            if mine and theirs:
                lines.append(bench.ratios(f"{scheme} {method}, moesaic of llm-compressor", mine, theirs))
        quantize = pathlib.Path(os.environ.get("LLAMA_CPP", "")) / "llama-quantize"
        if arguments.gguf and quantize.is_file():
            for name, scheme, method in (("Q8_0", "w8a8", "rtn"), ("Q4_0", "w4a16", "mse")):
                out = folder / f"{name}.gguf"
                theirs = bench.side(name, "", "llama-quantize", [quantize, arguments.gguf, out, name], out, arguments.gguf)
                mine = bench.side(scheme, method, "moesaic",
                                  [arguments.moesaic, "quantize", arguments.gguf, "-o", folder / "mine", "--scheme", scheme,
                                   "--method", method], folder / "mine", arguments.gguf)
                lines.append(bench.ratios(f"{scheme} {method}, moesaic of llama-quantize {name}", mine, theirs))
    print("\nRatios:")
    for line in lines:
        print(f"- {line}")


if __name__ == "__main__":
    main()
