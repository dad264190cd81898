#!/usr/bin/env python3
"""Compares moesaic quantize with llm-compressor and llama-quantize: same model, calibration and run.

    python3 bench/quantizer/compare.py build/release/bin/moesaic [--python VENV/bin/python] [--llama SOURCE]

Moesaic and llm-compressor quantize moesaic-tiny and keep the same linears:
- W8A8 and W4A16 in groups of 32, by nearest rounding and by GPTQ (with Moesaic also W8A8 with smoothing: "smooth");
- W8A8 with static activations and smoothing (llm-compressor: SmoothQuant by its own pairs of DeepSeek's layers, static
  scales per tensor);
- W8A16 in groups of 32 and 64 and by output, with Moesaic only.
llama-quantize writes Q8_0 and Q4_0, the latter also with an importance matrix of the same calibration text, and keeps the
same linears in bf16. One program runs all results and the bf16 model over the same held-out answers. Prints
KL(bf16 || quantized) with all roundings and of the weights alone (--dtype f32), top-1 agreement, bytes of all tensors,
seconds and peak resident memory of the whole process (of both programs with an importance matrix), and the ratios.

The same program runs all results over the same held-out answers and compares them with the bf16 model. It prints
KL(bf16 || quantized), as it runs and with the weights alone in f32 (--dtype f32: activations are not rounded), top-1
agreement, bytes of all tensors, seconds and peak resident memory of the whole process (of both programs with an
importance matrix), and the ratios.

--python names a Python with llm-compressor. --llama names llama.cpp's source, whose converter runs in this Python (it
needs torch and transformers). LLAMA_CPP names the folder of its programs, llama-quantize and llama-imatrix. Needs
tokenizers, safetensors and numpy.
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

ROW_TOKENS = 512
RUNS = (("w8a8", "rtn"), ("w8a8", "gptq"), ("w8a8", "smooth"), ("w8a8", "static"), ("w8a16", "rtn"), ("w8a16", "mse"),
        ("w8a16", "gptq"), ("w8a16-g64", "gptq"), ("w8a16-channel", "gptq"), ("w4a16", "rtn"), ("w4a16", "mse"),
        ("w4a16", "gptq"))
METHODS = {"smooth": ["--method", "gptq", "--activations", "smoothed"], "static": ["--activations", "static"]}
# type, whether with an importance matrix (which Q8_0 does not use), our counterpart
LLAMA_RUNS = (("Q8_0", False, ("w8a8", "rtn")), ("Q8_0", False, ("w8a8", "gptq")), ("Q8_0", False, ("w8a16", "rtn")),
              ("Q8_0", False, ("w8a16", "mse")), ("Q8_0", False, ("w8a16", "gptq")), ("Q8_0", False, ("w8a16-g64", "gptq")),
              ("Q8_0", False, ("w8a16-channel", "gptq")), ("Q4_0", False, ("w4a16", "rtn")),
              ("Q4_0", False, ("w4a16", "mse")), ("Q4_0", True, ("w4a16", "gptq")))
KEPT = ["--pure", "--token-embedding-type", "bf16", "--output-tensor-type", "bf16", "--tensor-type", "attn_[kv]_b=bf16"]


def conversations_text(conversation, **flags):
    return "".join(text for text, _ in generate.segments(**conversation, **flags))


def write_calibration(path, count):
    """Writes conversations of a separate seed as tokens [count, length], and as text for llama-imatrix."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    sampler = generate.Sampler(random.Random("calibration"))
    rows = []
    while len(rows) < count:
        row = []
        while len(row) < ROW_TOKENS:
            text = conversations_text(sampler.conversation(ROW_TOKENS, generate.LAST))
            row += tokenizer.encode(text, add_special_tokens=False).ids
        rows.append(row[:ROW_TOKENS])
    safetensors.numpy.save_file({"tokens": numpy.array(rows, numpy.int32)}, path)
    path.with_suffix(".txt").write_text(tokenizer.decode(sum(rows, []), skip_special_tokens=False))


def write_held_out(path):
    rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
    path.write_text("".join(
        "".join(t for t, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)) + r["expected"] for r in rows))


def write_source(folder):
    """Writes moesaic-tiny without its multi-token-prediction layer, which transformers does not load."""
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


# A process inherits the peak memory of the one that forks it, so it is started from a small one.
LAUNCHER = """import json, resource, subprocess, sys, time
start = time.monotonic()
code = subprocess.call(sys.argv[2:])
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
json.dump({"code": code, "seconds": time.monotonic() - start, "peak": peak}, open(sys.argv[1], "w"))"""


def run(command):
    """Returns standard output, seconds and peak bytes of a program."""
    with tempfile.NamedTemporaryFile("r") as usage, tempfile.TemporaryFile("w+") as errors:
        launched = [sys.executable, "-S", "-E", "-c", LAUNCHER, usage.name, *map(str, command)]
        output = subprocess.run(launched, stdout=subprocess.PIPE, stderr=errors, text=True,
                                env={**os.environ, "HF_HUB_OFFLINE": "1"}).stdout
        took = json.load(usage)
        if took["code"] != 0:
            errors.seek(0)
            raise SystemExit(f"{' '.join(map(str, command))}:\n{errors.read()[-3000:]}")
    return output, took["seconds"], took["peak"]


def tensor_bytes(path):
    """Returns the bytes of the tensors of a folder or a GGUF file."""
    if path.is_file():
        from gguf import GGUFReader  # from llama.cpp's source

        return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
    total = 0
    for file in path.glob("*.safetensors"):
        with open(file, "rb") as data:
            total += file.stat().st_size - 8 - int.from_bytes(data.read(8), "little")
    return total


class Bench:
    def __init__(self, arguments, folder):
        self.moesaic, self.folder, self.tokens = arguments.moesaic, folder, arguments.tokens
        self.text, self.source = folder / "held_out.txt", folder / "source"
        self.calibration = folder / "calibration.safetensors"
        write_held_out(self.text)
        write_calibration(self.calibration, arguments.rows)
        write_source(self.source)
        self.only = arguments.only and arguments.only.split(",")
        self.done = {}
        print("| scheme | method | by | KL, nats a token | of weights alone | top-1 | bytes | seconds | peak memory |")
        print("|---|---|---|---:|---:|---:|---:|---:|---:|")

    def wants(self, scheme):
        return not self.only or scheme.partition("-")[0] in self.only

    def quality(self, model, dtype):
        output, _, _ = run([self.moesaic, "perplexity", model, "--text", self.text, "--reference", self.source, "-c", "512",
                            "--max-tokens", self.tokens, "--dtype", dtype, "--reference-dtype", dtype, "--format", "json"])
        return json.loads(output)

    def side(self, scheme, method, by, commands, out):
        outputs, seconds, peaks = zip(*map(run, commands))
        quality, weights = self.quality(out, "auto"), self.quality(out, "f32")
        result = {"kl": quality["kl"], "weights' kl": weights["kl"], "bytes": tensor_bytes(out), "seconds": sum(seconds),
                  "peak": max(peaks)}
        note = ""
        if by == "llm-compressor":
            note = f" ({json.loads(outputs[0].splitlines()[-1])['quantizing_seconds']:.1f} without start and saving)"
        print(f"| {scheme} | {method} | {by} | {quality['kl']:.5f} ± {quality['kl_error']:.5f} | {weights['kl']:.5f} ± "
              f"{weights['kl_error']:.5f} | {quality['same_top']:.2%} | {result['bytes'] / 2**20:.2f} MiB | "
              f"{result['seconds']:.2f}{note} | {result['peak'] / 2**20:.0f} MiB |", flush=True)
        return result

    def mine(self, scheme, method):
        if (scheme, method) not in self.done:
            out = self.folder / f"{scheme}-{method}"
            flags = ["--calibration", self.calibration] if method in ("gptq", "smooth", "static") else []
            flags += METHODS.get(method, ["--method", method])
            command = [self.moesaic, "quantize", self.source, "-o", out, "--scheme", scheme, *flags]
            self.done[scheme, method] = self.side(scheme, method, "moesaic", [command], out)
        return self.done[scheme, method]

    def llmcompressor(self, python, scheme, method):
        out = self.folder / "theirs"
        shutil.rmtree(out, ignore_errors=True)
        command = [python, ROOT / "bench/quantizer/llmcompressor_side.py", self.source, out, scheme, method, self.calibration]
        return self.side(scheme, method, "llm-compressor", [command], out)

    def llama(self, programs, gguf, name, weighted):
        out, matrix = self.folder / f"{name}.gguf", self.folder / "imatrix.gguf"
        commands, flags = [], list(KEPT)
        if weighted:
            commands.append([programs / "llama-imatrix", "-m", gguf, "-f", self.calibration.with_suffix(".txt"), "-c",
                             ROW_TOKENS, "--parse-special", "--no-ppl", "-o", matrix])
            flags += ["--imatrix", matrix]
        commands.append([programs / "llama-quantize", *flags, gguf, out, name])
        return self.side(name, "imatrix" if weighted else "", "llama-quantize", commands, out)

    def ratios(self, what, mine, theirs):
        return f"{what}: " + ", ".join(f"{key} {mine[key] / theirs[key]:.3g}" for key in mine)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--python", help="a Python with llm-compressor; none: Moesaic alone")
    parser.add_argument("--llama", type=pathlib.Path, help="llama.cpp's source, for its converter")
    parser.add_argument("--only", help="schemes, e.g. w8a8,w8a16")
    parser.add_argument("--method", help="rtn, mse, gptq, smooth or static, alone beside llm-compressor")
    parser.add_argument("--rows", type=int, default=96, help="of 512 tokens of calibration, for all programs")
    parser.add_argument("--tokens", type=int, default=16384, help="of the held-out text")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        bench = Bench(arguments, folder)
        for scheme, method in RUNS:
            if not bench.wants(scheme) or arguments.method not in (None, method):
                continue
            mine = bench.mine(scheme, method)
            if arguments.python and method in ("rtn", "gptq", "static") and scheme in ("w8a8", "w4a16"):
                theirs = bench.llmcompressor(arguments.python, scheme, method)
                lines.append(bench.ratios(f"{scheme} {method}, moesaic of llm-compressor", mine, theirs))
        if arguments.llama:
            sys.path.insert(0, str(arguments.llama / "gguf-py"))
            gguf = folder / "bf16.gguf"
            run([sys.executable, ROOT / "bench/quantizer/to_gguf.py", arguments.llama, bench.source, gguf])
            for name, weighted, (scheme, method) in LLAMA_RUNS:
                if not bench.wants(scheme):
                    continue
                if (name, weighted) not in bench.done:
                    bench.done[name, weighted] = bench.llama(pathlib.Path(os.environ["LLAMA_CPP"]), gguf, name, weighted)
                what = f"{scheme} {method}, moesaic of llama-quantize {name}{' with imatrix' if weighted else ''}"
                lines.append(bench.ratios(what, bench.mine(scheme, method), bench.done[name, weighted]))
    print("\nRatios:")
    for line in lines:
        print(f"- {line}")


if __name__ == "__main__":
    main()
