#!/usr/bin/env python3
"""Quantizes random weights of Kimi-K2's layer shapes, many times larger than the memory limit, and compares the run with
the disk's rates and with --plan.

    python3 bench/quantize_bounds.py build/release/bin/moesaic build/bench/quantize --gib 8 --memory 1G

Prints a table: peak resident memory of the process as counted by the kernel (wait4), bytes moved divided by the minimum,
their rate divided by the disk's rate in the plan's measurement, and measured and planned time. The source is dropped from
the page cache before each run. --tokens N runs GPTQ on N random tokens instead, and prints its measured and planned
stages. --enforce makes the kernel kill a run that exceeds --memory. Needs Python 3.9 only, and disk space of 1.6 times
--gib.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time

HIDDEN, DENSE, EXPERT = 7168, 18432, 2048
RUNS = [(scheme, method) for method in ("rtn", "mse") for scheme in ("w8a8", "w8a16", "w4a16", "nvfp4", "fp8")]
CALIBRATED_RUNS = (("w4a16", "gptq"), ("nvfp4", "gptq"))
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def shapes(experts):
    heads, nope, rope, value, q_rank, kv_rank, vocab = 64, 128, 64, 128, 1536, 512, 1024
    names = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        names |= {prefix + "input_layernorm.weight": (HIDDEN,), prefix + "post_attention_layernorm.weight": (HIDDEN,),
                  attention + "q_a_proj.weight": (q_rank, HIDDEN), attention + "q_a_layernorm.weight": (q_rank,),
                  attention + "q_b_proj.weight": (heads * (nope + rope), q_rank),
                  attention + "kv_a_proj_with_mqa.weight": (kv_rank + rope, HIDDEN),
                  attention + "kv_a_layernorm.weight": (kv_rank,),
                  attention + "kv_b_proj.weight": (heads * (nope + value), kv_rank),
                  attention + "o_proj.weight": (HIDDEN, heads * value)}
    mlps = [("model.layers.0.mlp.", DENSE), ("model.layers.1.mlp.shared_experts.", EXPERT)]
    mlps += [(f"model.layers.1.mlp.experts.{expert}.", EXPERT) for expert in range(experts)]
    for prefix, width in mlps:
        names |= {prefix + "gate_proj.weight": (width, HIDDEN), prefix + "up_proj.weight": (width, HIDDEN),
                  prefix + "down_proj.weight": (HIDDEN, width)}
    names["model.layers.1.mlp.gate.weight"] = (experts, HIDDEN)
    names["model.layers.1.mlp.gate.e_score_correction_bias"] = (experts,)
    return names


def write_checkpoint(folder, gib):
    experts = round((gib * (1 << 30) - 1.2e9) / (6 * HIDDEN * EXPERT))
    tensors = shapes(experts)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 1024, "hidden_size": HIDDEN,
        "intermediate_size": DENSE, "moe_intermediate_size": EXPERT, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16"}))
    # bf16 of both signs between 2^-10 and 2^-6, repeated from random offsets of a pool: speed does not depend on values.
    numbers = random.Random(1)
    pool = bytearray(64 << 20)
    pool[0::2] = numbers.randbytes(32 << 20)
    pool[1::2] = numbers.randbytes(32 << 20).translate(bytes((0xBB if b & 1 else 0x3B) + (b >> 1 & 1) for b in range(256)))
    pool = memoryview(bytes(pool))
    shards = [[]]
    for name in sorted(tensors):
        if sum(size for _, size in shards[-1]) > 4e9:
            shards.append([])
        size = 2
        for n in tensors[name]:
            size *= n
        shards[-1].append((name, size))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file, header, at = f"model-{number:05}-of-{len(shards):05}.safetensors", {}, 0
        for name, size in shard:
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            while at > 0:
                start = numbers.randrange(0, 16 << 20) * 2
                piece = pool[start : start + min(at, 32 << 20)]
                out.write(piece)
                at -= len(piece)
            os.fsync(out.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def forget(folder):
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def number(text, pattern):
    value, unit = re.search(pattern, text).groups()
    return float(value) * UNITS[unit]


def seconds(text, pattern):
    """Parses a time of moesaic: "5.1 s", "12 min" or "3 h 05 min"."""
    hours, value, unit = re.search(pattern + r"(?:(\d+) h )?([\d.]+) (s|min)\b", text).groups()
    return int(hours or 0) * 3600 + float(value) * {"s": 1, "min": 60}[unit]


class Cage:
    """A memory cgroup (version 1 or 2) that kills what takes more than `limit` bytes, its page cache included and
    nothing of it swapped out. It exists within a `with`."""

    def __init__(self, limit):
        first = pathlib.Path("/sys/fs/cgroup/memory")
        if first.is_dir():
            parent, limits = first, {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        else:
            parent, limits = pathlib.Path("/sys/fs/cgroup"), {"memory.max": limit, "memory.swap.max": 0}
        self.folder, self.limits = parent / f"moesaic-bounds-{os.getpid()}", limits

    def __enter__(self):
        try:
            self.folder.mkdir()
        except OSError as error:
            raise SystemExit(f"--enforce: cannot create a memory cgroup: {error}") from None
        try:
            for name, limit in self.limits.items():
                path = self.folder / name
                if path.exists() or "sw" not in name:  # kernels without swap accounting lack these files
                    path.write_text(str(limit))
        except OSError as error:
            self.folder.rmdir()
            raise SystemExit(f"--enforce: cannot use the memory controller: {error}") from None
        return self

    def __exit__(self, *_):
        for _ in range(100):  # a killed process may still be exiting
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        print(f"{self.folder} could not be removed, because a process runs in it", file=sys.stderr)

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


def bytes_of(text):
    """Parses a size of --memory: "900M", "1.5G", "1GiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise SystemExit(f"--memory {text}: not a size like 900M or 1.5G, which --enforce needs")
    return int(float(match.group(1)) * UNITS[f"{match.group(2).upper()}iB" if match.group(2) else "B"])


def run(command, cage=None):
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=cage.enter if cage else None)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command} failed")
    return output, usage.ru_maxrss * 1024, time.monotonic() - start


def write_tokens(path, count, length=2048):
    ids = random.Random(3)
    rows = -(-count // length)
    data = struct.pack(f"<{rows * length}i", *(ids.randrange(1024) for _ in range(rows * length)))
    header = json.dumps({"tokens": {"dtype": "I32", "shape": [rows, length], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def measure(moesaic, source, out, scheme, method, memory, io, flags, cage):
    command = [moesaic, "quantize", str(source), "-o", str(out), "--scheme", scheme, "--method", method, "--memory", memory,
               "--io", io, *flags]
    plan, _, _ = run([*command, "--plan"])
    reads = number(plan, r"reads ([\d.]+) (\w+)/s")
    writes = number(plan, r"writes ([\d.]+) (\w+)/s")
    forget(source)
    output, peak, took = run(command, cage)
    moved_in, moved_out = number(output, r"([\d.]+) (\w+) read"), number(output, r"([\d.]+) (\w+) written")
    least = number(output, r"from ([\d.]+) (\w+);") + sum(p.stat().st_size for p in out.glob("*.safetensors"))
    if flags:
        stages = json.loads((out / "quantize.json").read_text())["stages"]
        print(f"{scheme} {method}: " + ", ".join(f"{s['name']} {s['seconds']:.1f} s" for s in stages))
        planned = re.search(r"Hessians.*forward.*", plan)
        print(f"planned: {planned.group(0).strip()}; " + re.search(r"^calibration +(.*)", plan, re.M).group(1))
    shutil.rmtree(out)
    bound = re.search(r"; limited by (.+)", plan)
    return {"peak": peak, "io": (moved_in + moved_out) / least, "seconds": took,
            "disk": (moved_in / reads + moved_out / writes) / took,
            "planned": seconds(plan, r"in all +" if flags else r"time +"),
            "bound": bound.group(1) if bound else "computing"}


def runs(arguments):
    return [(scheme, method) for scheme, method in (CALIBRATED_RUNS if arguments.tokens > 0 else RUNS)
            if arguments.only in (None, scheme) and arguments.method in (None, method)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gib", type=float, default=8, help="size of the checkpoint in GiB")
    parser.add_argument("--memory", default="1G")
    parser.add_argument("--io", default="direct", choices=("direct", "buffered"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted({scheme for scheme, _ in RUNS}), help="run only this scheme")
    parser.add_argument("--method", choices=("rtn", "mse", "gptq"), help="run only this method; gptq needs --tokens, which allows no other")
    parser.add_argument("--tokens", type=int, default=0, help="number of calibration tokens; > 0 runs GPTQ")
    parser.add_argument("--enforce", action="store_true",
                        help="run in a memory cgroup of --memory bytes, which kills a larger process; needs root")
    arguments = parser.parse_args()
    if not runs(arguments):
        parser.error("of --only, --method and --tokens no run is left: " + ", ".join(
            f"{scheme} by {method}" for scheme, method in (CALIBRATED_RUNS if arguments.tokens > 0 else RUNS)))
    limit = bytes_of(arguments.memory) if arguments.enforce else None
    source = arguments.folder / f"source-{arguments.gib:g}"
    if not source.exists():
        write_checkpoint(source, arguments.gib)
    print(f"{arguments.gib:g} GiB of bf16, --memory {arguments.memory}, --io {arguments.io}, {arguments.rounds} rounds "
          "(median, lowest to highest)\n")
    print("| scheme | method | seconds | planned | bound by | of the disk's rate | bytes moved / minimum | peak memory |")
    print("|---|---|---:|---:|---|---:|---:|---:|")
    flags = []
    if arguments.tokens > 0:
        tokens = arguments.folder / "tokens.safetensors"
        write_tokens(tokens, arguments.tokens)
        flags = ["--calibration", str(tokens), "--calibration-tokens", str(arguments.tokens)]
    with Cage(limit) if limit is not None else contextlib.nullcontext() as cage:
        report(arguments, source, flags, cage)


def report(arguments, source, flags, cage):
    for scheme, method in runs(arguments):
        rounds = [measure(arguments.moesaic, source, arguments.folder / "out", scheme, method, arguments.memory,
                          arguments.io, flags, cage) for _ in range(arguments.rounds)]
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0] if key != "bound"}
        spread = f"{min(r['seconds'] for r in rounds):.1f} to {max(r['seconds'] for r in rounds):.1f}"
        print(f"| {scheme} | {method} | {middle['seconds']:.1f} ({spread}) | {middle['planned']:.1f} | {rounds[0]['bound']} | "
              f"{middle['disk']:.0%} | {middle['io']:.3f} | {max(r['peak'] for r in rounds) / (1 << 20):.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
