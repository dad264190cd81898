#!/usr/bin/env python3
"""Replays workloads of agents on several servers and prints one table of hit rates, latencies and throughput.

  run.py agent --model MODEL --server "LRU=build/release/bin/moesaic serve {model} --port {port}" \\
               --server "llama.cpp=llama-server -m {model} --port {port} -c 131072 -np 8"
  run.py streams --concurrency 8 --sessions 32 --first 512 --output 128 ...
  run.py reuse --first 16384 --share 0.7 --sessions 3 --output 1 ...
  run.py mooncake --trace mooncake_synthetic_trace.jsonl.gz --longest 8000 ...
  run.py swe --trace swe-agent_demonstrations.tar.gz ...

Servers alternate and are restarted for each repetition, so that a slow phase of the machine affects all of them.
Prompts are token ids, so all servers read the same tokens. Standard library only.
"""
import argparse
import asyncio
import json
import pathlib
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import client
import workload

START_SECONDS = 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def start(command, model, log):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(shlex.split(command.format(model=model, port=port)), stdout=log, stderr=log)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"{command}: ended with {process.returncode}; see {log.name}")
        try:
            urllib.request.urlopen(url + "/health", timeout=2).close()
            return process, url
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    process.kill()
    sys.exit(f"{command}: not ready after {START_SECONDS} s; see {log.name}")


def stop(process):
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def build(arguments, url):
    """Returns the sessions; needs a server only to tokenize recorded text."""
    if arguments.workload == "agent":
        return workload.agent(arguments.vocabulary, arguments.sessions, arguments.system, arguments.first, arguments.last,
                              arguments.turns, arguments.output)
    if arguments.workload == "streams":
        return workload.streams(arguments.vocabulary, arguments.sessions, arguments.first, arguments.output)
    if arguments.workload == "reuse":
        return workload.reuse(arguments.vocabulary, arguments.sessions, arguments.first, arguments.share,
                              arguments.output)
    if arguments.workload == "mooncake":
        return workload.mooncake(arguments.trace, arguments.vocabulary, arguments.sessions, arguments.scale,
                                 arguments.speedup, arguments.longest)
    tokens = {}

    def tokenize(text):
        if text not in tokens:
            tokens[text] = post(url, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return tokens[text]

    return workload.swe_agent(arguments.trace, tokenize, arguments.output, arguments.longest)


def percentile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def summarize(outcomes, seconds):
    good = [outcome for outcome in outcomes if not outcome.error]
    gaps = [gap for outcome in good for gap in outcome.gaps]
    prompt = sum(outcome.prompt for outcome in good)
    return {
        "calls": len(good),
        "failed": len(outcomes) - len(good),
        "hit": sum(outcome.cached for outcome in good) / max(1, prompt),
        "ttft_p50": percentile([outcome.first for outcome in good], 0.50),
        "ttft_p90": percentile([outcome.first for outcome in good], 0.90),
        "ttft_p99": percentile([outcome.first for outcome in good], 0.99),
        "ttft_cold": statistics.median([o.first for o in good if o.cached < 0.05 * o.prompt] or [float("nan")]),
        "ttft_warm": statistics.median([o.first for o in good if o.cached >= 0.05 * o.prompt] or [float("nan")]),
        "itl_p50": percentile(gaps, 0.50),
        "itl_p99": percentile(gaps, 0.99),
        "output_rate": sum(outcome.output for outcome in good) / seconds,
        "prompt_rate": prompt / seconds,
        "seconds": seconds,
    }


def table(results, ceiling):
    print(f"\nceiling of the hit rate (infinite cache): {ceiling:.3f}\n")
    print("| server | hit rate | TTFT p50 | p90 | p99 | cold | with a hit | ITL p50 | p99 | output tokens/s "
          "| prompt tokens/s | failed |")
    print("|" + "---|" * 12)
    for name, runs in results.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rates = [run["output_rate"] for run in runs]
        spread = f" ({min(rates):.1f}–{max(rates):.1f})" if len(rates) > 1 else ""
        print(f"| {name} | {median['hit']:.3f} | {median['ttft_p50']:.2f} s | {median['ttft_p90']:.2f} s "
              f"| {median['ttft_p99']:.2f} s | {median['ttft_cold']:.2f} s | {median['ttft_warm']:.2f} s "
              f"| {median['itl_p50'] * 1000:.0f} ms | {median['itl_p99'] * 1000:.0f} ms "
              f"| {median['output_rate']:.1f}{spread} | {median['prompt_rate']:.0f} | {median['failed']:.0f} |")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["agent", "streams", "reuse", "mooncake", "swe"])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND",
                        help="command of a server; {model} and {port} are replaced")
    parser.add_argument("--model", required=True, help="replacement of {model}")
    parser.add_argument("--vocabulary", type=int, default=32000, help="upper limit of random token ids")
    parser.add_argument("--concurrency", type=int, default=8, help="number of concurrent sessions")
    parser.add_argument("--repeat", type=int, default=1, help="number of runs of each server")
    parser.add_argument("--sessions", type=int, default=16,
                        help="sessions, pairs of prompts (reuse), or requests of the Mooncake trace")
    parser.add_argument("--system", type=int, default=4096, help="agent: tokens of the shared system prompt")
    parser.add_argument("--first", type=int, default=8192, help="tokens of a session's first call")
    parser.add_argument("--last", type=int, default=18432, help="agent: tokens of a session's last call")
    parser.add_argument("--share", type=float, default=0.7, help="reuse: share of a prompt that is taken from the previous one")
    parser.add_argument("--turns", type=int, default=10, help="agent: number of calls per session")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--trace", type=pathlib.Path, help="mooncake, swe: the recorded file")
    parser.add_argument("--scale", type=int, default=8, help="mooncake: divides all lengths")
    parser.add_argument("--speedup", type=float, default=1.0, help="mooncake: divides all times")
    parser.add_argument("--longest", type=int, help="mooncake, swe: skip calls with more tokens")
    parser.add_argument("--blocks", type=pathlib.Path,
                        help="write the prompts' blocks here, for cache_trace_sim: what each policy, and Belady's rule, "
                             "would find in caches of any size")
    parser.add_argument("--json", type=pathlib.Path, help="file to write all runs to")
    return parser.parse_args()


def main():
    arguments = parse()
    servers = dict(server.split("=", 1) for server in arguments.server)
    results, sessions = {name: [] for name in servers}, None
    for repetition in range(arguments.repeat):
        for name, command in servers.items():
            with open(f"{name.replace('/', '_')}.log", "wb") as log:
                process, url = start(command, arguments.model, log)
                try:
                    sessions = sessions or build(arguments, url)
                    model = json.load(urllib.request.urlopen(url + "/v1/models", timeout=10))["data"][0]["id"]
                    outcomes, seconds = asyncio.run(client.replay(url, model, sessions, arguments.concurrency))
                finally:
                    stop(process)
            errors = [outcome.error for outcome in outcomes if outcome.error]
            if errors:
                print(f"{name}: {len(errors)} of {len(outcomes)} calls failed, the first with {errors[0]}", file=sys.stderr)
            results[name].append(summarize(outcomes, seconds))
            print(f"run {repetition + 1}: {name}: {results[name][-1]['output_rate']:.1f} output tokens/s", file=sys.stderr)
    total, hits = workload.reusable(sessions)
    table(results, hits / total)
    if arguments.blocks:
        arguments.blocks.write_text("".join(json.dumps({"hash_ids": blocks}) + "\n"
                                            for blocks in workload.block_names(sessions) if blocks))
    if arguments.json:
        arguments.json.write_text(json.dumps({"ceiling": hits / total, "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
