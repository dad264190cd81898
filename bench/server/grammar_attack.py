#!/usr/bin/env python3
"""Measures the impact of hostile grammars on other clients, as markdown.

  bench/server/grammar_attack.py build/release/bin/moesaic [--rounds 3] [--seconds 10] [--model PATH] [--flag ...]

One server. Four clients stream free text and measure the time between tokens; another asks /health fifty times a second.
Each round measures both for --seconds without an attack, then with eight clients that each send a hostile grammar every
--pause seconds, all eight together. With --pause 0 they send without a pause, which also measures how the clients and
the server share the processors. Medians (lowest to highest) of rounds; ratios are of the same round. Standard library
only.
"""
import argparse
import http.client
import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
STREAMS, ATTACKERS, HEALTH_SECONDS = 4, 8, 0.02


def hostile(number):
    """Returns request fields of the number-th attack; all sources differ, so no cache helps."""
    regexes = ["[" + "".join(chr(0x4e00 + (i * 7919 + number) % 20000) for i in range(16_000)) + "]+",
               "lit" * 330_000 + str(number),
               r"\w?" * 3000 + str(number),
               "(([a-z]{1,1000}){1,1000}){1,1000}" + str(number)]
    schemas = [{"allOf": [{"type": "string", "pattern": f"x{i}y{number}"} for i in range(60)]},
               {"type": "integer", "multipleOf": 9_999_991 + 2 * number},
               {"const": str(number) + "x" * 1_000_000},
               {"$ref": "#", "title": str(number)}]
    kind, which = divmod(number % 8, 4)
    return {"guided_regex": regexes[which]} if kind == 0 else {"guided_json": schemas[which]}


class Load:
    def __init__(self, port, pause, bodies):
        self.port, self.pause, self.bodies, self.stop = port, pause, bodies, threading.Event()
        self.start = time.monotonic()
        self.gaps, self.health, self.answers = [], [], {}
        self.lock = threading.Lock()

    def post(self, connection, body):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection.getresponse()

    def stream(self, seed):
        while not self.stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            response = self.post(connection, json.dumps({"prompt": f"Story {seed}", "max_tokens": 1000,
                                                         "ignore_eos": True, "stream": True, "seed": seed}))
            last = None
            while (line := response.readline()) and not self.stop.is_set():
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
            connection.close()

    def watch(self):
        while not self.stop.is_set():
            start = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()
            self.health.append(time.monotonic() - start)
            time.sleep(HEALTH_SECONDS)

    def attack(self, attacker):
        for turn, body in enumerate(self.bodies[attacker::ATTACKERS]):
            if self.stop.wait(max(0, self.start + turn * self.pause - time.monotonic())):
                return
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            try:
                status = self.post(connection, body).status
            except (ConnectionError, http.client.HTTPException):
                status = 0
            connection.close()
            with self.lock:
                self.answers[status] = self.answers.get(status, 0) + 1


def measure(port, seconds, pause=0, bodies=()):
    load = Load(port, pause, bodies)
    threads = [threading.Thread(target=load.stream, args=(i,)) for i in range(STREAMS)]
    threads.append(threading.Thread(target=load.watch))
    if bodies:
        threads += [threading.Thread(target=load.attack, args=(i,)) for i in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    load.stop.set()
    for thread in threads:
        thread.join()
    gaps = sorted(load.gaps)
    return {"p50": 1e3 * gaps[len(gaps) // 2], "p99": 1e3 * gaps[len(gaps) * 99 // 100], "worst": 1e3 * gaps[-1],
            "health": 1e3 * max(load.health), "answers": load.answers}


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--pause", type=float, default=1, help="seconds between two attacks of a client")
    parser.add_argument("--model", default=str(ROOT / "models" / "moesaic-tiny"))
    parser.add_argument("--flag", action="append", default=[], help="a flag of the server, as --flag=--grammar-threads=2")
    arguments = parser.parse_args()
    server = subprocess.Popen([arguments.binary, "serve", arguments.model, "--port", "0", "--no-access-log", *arguments.flag],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = int(server.stdout.readline().rpartition(":")[2])
        quiet, attacked = [], []
        for number in range(arguments.rounds):
            turns = arguments.seconds / arguments.pause if arguments.pause else 20 * arguments.seconds
            bodies = [json.dumps({"prompt": "x", "max_tokens": 64, **hostile(100_000 * number + i)}).encode()
                      for i in range(int(turns) * ATTACKERS)]  # made here: clients cost the server little
            quiet.append(measure(port, arguments.seconds))
            attacked.append(measure(port, arguments.seconds, arguments.pause, bodies))
            print(f"round {number + 1}: answers to the attack {attacked[-1]['answers']}", file=sys.stderr)
    finally:
        server.terminate()
        server.wait()
    print("| | without attack | with attack | ratio |\n|---|---|---|---|")
    for name, key in (("time between tokens, p50, ms", "p50"), ("p99, ms", "p99"), ("worst, ms", "worst"),
                      ("/health, worst, ms", "health")):
        before, after = ([run[key] for run in runs] for runs in (quiet, attacked))
        ratios = [b / a for a, b in zip(before, after)]
        print(f"| {name} | {spread(before)} | {spread(after)} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
