#!/usr/bin/env python3
"""Serves a shipped MoE model on four ranks and compares the work of the busiest rank before and after rebalancing.

Usage: rebalance_bench.py MOESAIC MODEL [--prompts FILE] [--redundant 2]

The workload is of one domain: every request has the same kind of prompt. One server keeps its experts in the default order,
the other one rebalances until its plans gain nothing. Both answer the same requests, whose texts and log probabilities must
be equal. Ranks wait for each other in every layer, so the time of the experts is the sum over layers of the busiest rank's
rows: that ratio is printed, since four ranks on fewer cores do not run at the same time.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request

PROMPTS = [f"{a} + {b} = {a + b}. {b} + {a} = {a + b}. {a} * {b} = {a * b}. {a} - {b} =" for a in range(11, 15) for b in range(2, 6)]
FLAGS = ("-dp", "4", "-ep", "--threads", "1", "--dtype", "f32", "--expert-load-window", "0.2", "--port", "0", "--served-model-name", "m")

LOG_LINES = 20  # of the server, printed when it fails
INTERVAL = "3"  # seconds between plans: a shorter one saves less than moves of weights cost


class Server:
    def __init__(self, binary, model, *flags):
        # Replicas are chosen by load, so that timing decides which one answers: one request at a time is in flight.
        self.process = subprocess.Popen([binary, "serve", model, *FLAGS, *flags], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True,
                                        env=os.environ | {"MOESAIC_TUNING": "off"})
        self.log = collections.deque(maxlen=LOG_LINES)
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"http://[\w.:]+", line)
            if found:
                self.url = found.group()
                threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()  # a full pipe stops the server
                self.await_model()
                return
        raise SystemExit(f"the server ended with code {self.process.wait()}:\n{''.join(self.log)}")

    def await_model(self):
        while self.process.poll() is None:
            try:
                self.get("/health")
                return
            except urllib.error.HTTPError:  # 503: the model is being loaded
                time.sleep(0.1)
        raise SystemExit(f"the server ended with code {self.process.returncode}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read().decode()

    def state(self):
        return json.loads(self.get("/state"))["experts"]

    def metric(self, name):
        return {line.split(" ")[0]: float(line.split(" ")[1]) for line in self.get("/metrics").splitlines()
                if line.startswith(name)}

    def answer(self, prompt, max_tokens=24):
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3, "ignore_eos": True}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return json.loads(answer.read())["choices"][0]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{error}: {error.read().decode()}\n{''.join(self.log.copy())}")

    def run(self, prompts):
        return [self.answer(prompt) for prompt in prompts]

    def busiest(self):
        """Mean over layers of the busiest rank's recent rows over the mean."""
        return statistics.mean(max(row) for row in self.state()["rank_load"]["over_mean"])


def settle(server, prompts, limit_s=120, runs=Server.run):
    """Answers requests until two plans in a row gain nothing."""
    epoch, without_gain, end = None, 0, time.monotonic() + limit_s
    while time.monotonic() < end:
        runs(server, prompts)
        total = sum(server.metric('moesaic:expert_plans_total{result="no_gain"}').values())
        state = server.state()
        if state["epoch"] != epoch or state["state"] != "idle":
            epoch, without_gain = state["epoch"], total
        elif total >= without_gain + 2:
            return
        time.sleep(0.2)
    print(f"plans still gain after {limit_s} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=pathlib.Path, help="one prompt per line")
    parser.add_argument("--redundant", type=int, default=2)
    arguments = parser.parse_args()
    for path in (arguments.binary, arguments.model, arguments.prompts):
        if path is not None and not pathlib.Path(path).exists():
            parser.error(f"{path} does not exist")
    prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else PROMPTS
    redundant = ("--redundant-experts", str(arguments.redundant))
    with Server(arguments.binary, arguments.model, "--rebalance-experts", "86400", *redundant) as server:
        before_answers = server.run(prompts)
        server.run(prompts)
        time.sleep(1)  # the last window ends
        server.run(prompts[:1])
        before, moved = server.busiest(), server.state()["epoch"]
    if moved:
        raise SystemExit("the server that should keep its experts has moved some")
    with Server(arguments.binary, arguments.model, "--rebalance-experts", INTERVAL, *redundant) as server:
        settle(server, prompts)
        after_answers = server.run(prompts)
        after = server.busiest()
        moves = server.metric("moesaic:moved_experts_total")
        for event in server.state()["history"][-6:]:
            print("  ", event)
    same = before_answers == after_answers
    print(f"busiest rank over the mean, mean over layers: {before:.3f} before, {after:.3f} after: experts take "
          f"1/{before / after:.2f} of the time; {int(sum(moves.values()))} experts moved; answers {'equal' if same else 'DIFFER'}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
