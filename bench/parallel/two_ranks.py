#!/usr/bin/env python3
"""Measures a model on two ranks of one thread each, against one process with two threads and with one.

    bench/parallel/two_ranks.py MODEL [--network] [--launches 5] [--layouts tp tp-bf16 tp-int8 pp ep]

Ranks talk through shared memory, or, with --network, through two network namespaces of this machine whose links are shaped to
1 Gbit/s in both directions (needs root, iproute2). The settings take turns in each launch, so that a change of the machine's
speed meets all of them. A probe, a fixed piece of work on two threads, runs before each: a row whose probe took longer than that
of others met a busy machine. Prints medians and quartiles in markdown, and each run's result to stderr. Needs nothing beyond
Python 3.9.

Layers of Qwen3-30B-A3B in Q8_0 (3.2 GB), and with int8 weights and activations (W8A8):

    python3 bench/make_shapes.py build/bench/shapes --shape qwen3-30b-a3b --type q8_0
    build/release/bin/moesaic convert build/bench/shapes/qwen3-30b-a3b-q8_0.gguf --dtype int8 --out build/bench/shapes/w8a8.moesaic
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from namespaces import NamespaceTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", ROOT / "build" / "release" / "bin" / "moesaic")).resolve()
LAYOUTS = {"tp": ("TP2", ["-tp", "2"]), "tp-bf16": ("TP2, sums in bf16", ["-tp", "2", "--tp-sum-dtype", "bf16"]),
           "tp-int8": ("TP2, sums in int8", ["-tp", "2", "--tp-sum-dtype", "int8"]), "pp": ("PP2", ["-pp", "2"]),
           "ep": ("TP2 x EP2", ["-tp", "2", "-ep"])}
# (name, flags of moesaic bench)
CASES = [("decode 1", ["-p", "0", "-n", "32", "-s", "1"]), ("decode 8", ["-p", "0", "-n", "16", "-s", "8"]),
         ("prefill 128", ["-p", "128", "-n", "0"]), ("prefill 512", ["-p", "512", "-n", "0"]),
         ("prefill 2048 in 4 chunks", ["-p", "2048", "-n", "0", "-b", "512"]),
         ("prefill 4096 in 8 chunks", ["-p", "4096", "-n", "0", "-b", "512"])]


# Two devices whose ports carry 1 Gbit/s in each direction.
GIGABIT = {"name": "two ranks at 1 Gbit/s", "source": "assumed: the limits that tc sets",
           "devices": {"core": {"flops": {"f32": 1e11}}},
           "tree": {"level": "cluster", "link": {"latency_us": 30, "gb_per_s": 0.125, "duplex": "full", "shared": True},
                    "children": [{"count": 2, "device": "core"}]}}


def speeds(text):
    return [rate for line in json.loads(text) for rate in line["samples"]]


def bench(model, flags, case, repetitions):
    command = [str(BINARY), "bench", model, *case, *flags, "-r", str(repetitions), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return speeds(done.stdout)


def bench_over(network, model, flags, case, repetitions):
    """Runs one rank in each namespace; returns the speeds that rank 0 measures."""
    try:
        return speeds(network.launch([BINARY, "bench", model, *case, *flags, "-r", repetitions, "-o", "json"]))
    except RuntimeError as error:
        sys.exit(str(error))


def probe():
    """Returns the milliseconds of hashing 16 MiB on each of two threads at once."""
    data, begin = bytes(1 << 24), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(2)))
    return (time.perf_counter() - begin) * 1e3


def quartiles(values):
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3


def measure(options, cases, settings, network):
    samples = {(case, name): [] for case, _ in cases for name, _, _ in settings}
    probes = {key: [] for key in samples}
    try:
        for launch in range(options.launches):
            for case, case_flags in cases:
                for name, over, flags in settings[::1 if launch % 2 == 0 else -1]:
                    run = (lambda *a: bench_over(over, *a)) if over else bench
                    probes[case, name].append(probe())
                    samples[case, name].append(statistics.median(run(options.model, flags, case_flags, options.repetitions)))
                    print(f"two_ranks.py: launch {launch + 1}, {case}, {name}: {samples[case, name][-1]:.1f} tokens/s, "
                          f"probe {probes[case, name][-1]:.0f} ms", file=sys.stderr, flush=True)
    finally:
        if network:
            network.close()
    return samples, probes


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--network", action="store_true", help="two namespaces with 1 Gbit/s instead of shared memory")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["tp", "pp", "ep"])
    parser.add_argument("--cases", nargs="+", choices=[name for name, _ in CASES], default=[name for name, _ in CASES])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("two_ranks.py: ended by a signal"))  # removes namespaces
    cases = [(name, flags) for name, flags in CASES if name in options.cases]
    settings = [("2 threads", None, ["-t", "2"]), ("1 thread", None, ["-t", "1"])]
    network = NamespaceTree(GIGABIT) if options.network else None
    assumed = []
    with tempfile.TemporaryDirectory() as folder:
        if network:
            topology = pathlib.Path(folder) / "gigabit.json"
            topology.write_text(json.dumps(GIGABIT))
            assumed = ["--topology", str(topology)]
        settings += [(LAYOUTS[name][0], network, [*LAYOUTS[name][1], *assumed, "-t", "1"]) for name in options.layouts]
        samples, probes = measure(options, cases, settings, network)
    def over(case, name, base):
        ratios = [ours / others for ours, others in zip(samples[case, name], samples[case, base])]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    print("| case | setting | tokens/s, median (quartiles) | over 2 threads, median (lowest to highest) | over 1 thread | probe, ms |")
    print("|---|---|---:|---:|---:|---:|")
    for case, _ in cases:
        for name, _, _ in settings:
            low, middle, high = quartiles(samples[case, name])
            state = "{1:.0f} ({0:.0f} to {2:.0f})".format(*quartiles(probes[case, name]))
            print(f"| {case} | {name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {over(case, name, '2 threads')} | "
                  f"{over(case, name, '1 thread')} | {state} |")


if __name__ == "__main__":
    main()
