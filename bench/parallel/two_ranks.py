#!/usr/bin/env python3
"""Measures a model on two ranks of one thread each, against one process with two threads and with one.

    bench/parallel/two_ranks.py MODEL [--network] [--launches 5] [--layouts tp pp ep]

Ranks talk through shared memory, or, with --network, through two network namespaces of this machine whose links are shaped to
1 Gbit/s in both directions (needs root, iproute2). The settings take turns in each launch, so that a change of the machine's
speed meets all of them. Prints medians and quartiles in markdown. Needs nothing beyond Python 3.9.
"""
import argparse
import json
import os
import pathlib
import secrets
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", ROOT / "build" / "release" / "bin" / "moesaic")).resolve()
LAYOUTS = {"tp": ("TP2", ["-tp", "2"]), "pp": ("PP2", ["-pp", "2"]), "ep": ("TP2 x EP2", ["-tp", "2", "-ep"])}
# (name, flags of moesaic bench)
CASES = [("decode 1", ["-p", "0", "-n", "32", "-s", "1"]), ("decode 8", ["-p", "0", "-n", "16", "-s", "8"]),
         ("prefill 128", ["-p", "128", "-n", "0"]), ("prefill 512", ["-p", "512", "-n", "0"]),
         ("prefill 2048 in 4 chunks", ["-p", "2048", "-n", "0", "-b", "512"]),
         ("prefill 4096 in 8 chunks", ["-p", "4096", "-n", "0", "-b", "512"])]


class Network:
    """Two network namespaces on a bridge, whose ports carry 1 Gbit/s in each direction."""

    def __init__(self):
        number = os.getpid() % 10000
        self.bridge, self.nodes = f"moe{number}", [f"moe{number}a", f"moe{number}b"]
        subnet = f"10.{number // 100 + 100}.{number % 100 + 100}"
        self.addresses = [f"{subnet}.{i + 2}" for i in range(2)]
        self.run(f"ip link add {self.bridge} type bridge")
        self.run(f"ip link set {self.bridge} up")
        for node, address in zip(self.nodes, self.addresses):
            self.run(f"ip netns add {node}")
            self.run(f"ip link add {node} type veth peer name eth0 netns {node}")
            self.run(f"ip link set {node} master {self.bridge} up")
            self.run(f"ip -n {node} address add {address}/24 dev eth0")
            self.run(f"ip -n {node} link set eth0 up")
            self.run(f"ip -n {node} link set lo up")
            self.run(f"ip netns exec {node} tc qdisc add dev eth0 root tbf rate 1gbit burst 128kb latency 50ms")
            self.run(f"tc qdisc add dev {node} root tbf rate 1gbit burst 128kb latency 50ms")

    @staticmethod
    def run(command, check=True):
        subprocess.run(command.split(), check=check, stderr=subprocess.DEVNULL if not check else None)

    def close(self):
        for node in self.nodes:
            self.run(f"ip link delete {node}", check=False)
            self.run(f"ip netns delete {node}", check=False)
        self.run(f"ip link delete {self.bridge}", check=False)


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
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "MOESAIC_RENDEZVOUS": f"{network.addresses[0]}:{port}", "MOESAIC_WORLD_SIZE": "2",
                   "MOESAIC_JOB_SECRET": secrets.token_hex(16), "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    ranks = []
    for rank, node in enumerate(network.nodes):
        command = ["ip", "netns", "exec", node, str(BINARY), "bench", model, *case, *flags, "-r", str(repetitions), "-o", "json"]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      env={**environment, "MOESAIC_RANK": str(rank)}))
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode != 0 for rank in ranks):
        sys.exit("\n".join(error for _, error in outputs))
    return speeds(outputs[0][0])


def quartiles(values):
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--network", action="store_true", help="two namespaces with 1 Gbit/s instead of shared memory")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--cases", nargs="+", default=[name for name, _ in CASES], help="names as in the table")
    options = parser.parse_args()
    cases = [(name, flags) for name, flags in CASES if name in options.cases]
    settings = [("2 threads", None, ["-t", "2"]), ("1 thread", None, ["-t", "1"])]
    network = Network() if options.network else None
    settings += [(LAYOUTS[name][0], network, [*LAYOUTS[name][1], "-t", "1"]) for name in options.layouts]
    samples = {(case, name): [] for case, _ in cases for name, _, _ in settings}
    try:
        for _ in range(options.launches):
            for case, case_flags in cases:
                for name, over, flags in settings:
                    run = (lambda *a: bench_over(over, *a)) if over else bench
                    samples[case, name].append(statistics.median(run(options.model, flags, case_flags, options.repetitions)))
    finally:
        if network:
            network.close()
    print("| case | setting | tokens/s, median (quartiles) | over 2 threads | over 1 thread |\n|---|---|---:|---:|---:|")
    for case, _ in cases:
        both, one = (statistics.median(samples[case, name]) for name in ("2 threads", "1 thread"))
        for name, _, _ in settings:
            low, middle, high = quartiles(samples[case, name])
            print(f"| {case} | {name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {middle / both:.2f} | {middle / one:.2f} |")


if __name__ == "__main__":
    main()
