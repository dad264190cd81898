#!/usr/bin/env python3
"""Runs growing agent sessions on several servers: time to first token and tokens/s by turn.

  sessions.py --model MODEL --vocabulary 16384 --turns 20 --last 20480 --output 64 --rounds 3 \\
    --server "dense=moesaic serve {model} --port {port} --threads 2" \\
    --server "sparse=moesaic serve {model} --port {port} --threads 2 --kv-sparsity decode --kv-sparsity-budget 2048" \\
    --server "llama-server=llama-server -m {model} --port {port} -c 24576 -np 1 -fa on -t 2"

All servers run at once. Each turn goes to one server after another, so that only one works at a time and a slow phase
affects all of them. A turn's prompt has the previous ones, artificial answers of the requested length, and new tokens, so
each server computes the new part and reads the rest from its cache. Every round is a new session and starts with the next
server. A call with other tokens warms up each server.

Tokens/s exclude the first token of a turn. With --sessions N there are N concurrent sessions. Each turn sends N prompts
one after another (time to first token, with CPU caches filled by the others), then requests all N answers at once, so that
each step reads the cache of all. Tokens/s then count all sessions from the last first token to the first end. Standard library only.
"""
import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "agent"))
import client  # noqa: E402
import run  # noqa: E402
import workload  # noqa: E402


def session(number, vocabulary, turns, first, last, output):
    """Returns calls whose prompts grow from `first` to `last` - `output` tokens; the last answer reaches `last`."""
    stream = random.Random(f"session {number}")
    prompt, calls = workload._tokens(stream, first, vocabulary), []
    growth = (last - output - first) / max(1, turns - 1)
    for turn in range(turns):
        wanted = round(first + turn * growth)
        prompt = prompt + workload._tokens(stream, wanted - len(prompt), vocabulary)
        calls.append(workload.Call(prompt, output))
    return calls


def call(url, model, what):
    outcome = client.Outcome()
    asyncio.run(client.complete(url, model, what, {}, outcome))
    if outcome.error:
        raise SystemExit(f"{url}: {outcome.error}")
    return outcome


@dataclasses.dataclass
class Turn:
    first: list  # seconds to the first token of each session
    rate: float  # tokens per second after the first, over all sessions
    total: float  # seconds


def turn_of(url, model, calls):
    """The same turn of one or more sessions."""
    if len(calls) == 1:
        outcome = call(url, model, calls[0])
        return Turn([outcome.first], (outcome.output - 1) / (outcome.total - outcome.first), outcome.total)
    began = time.perf_counter()
    first = [call(url, model, workload.Call(what.prompt, 1)).first for what in calls]
    outcomes = [client.Outcome() for _ in calls]
    answering = time.perf_counter()

    async def answers():
        async def one(what, outcome):
            outcome.sent = time.perf_counter() - answering
            await client.complete(url, model, what, {}, outcome)

        await asyncio.gather(*map(one, calls, outcomes))

    asyncio.run(answers())
    for outcome in outcomes:
        if outcome.error:
            raise SystemExit(f"{url}: {outcome.error}")
    # Counts tokens between the last session's first token and the first session's end.
    begin = max(o.sent + o.first for o in outcomes)
    end = min(o.sent + o.total for o in outcomes)
    if begin >= end:
        raise SystemExit(f"{url}: answers did not overlap; more --output or fewer --sessions")
    # Servers may send several tokens per chunk, or an empty last chunk.
    tokens = 0
    for o in outcomes:
        chunks = itertools.accumulate(o.gaps, initial=o.sent + o.first)
        tokens += o.output / (1 + len(o.gaps)) * sum(begin < at <= end for at in chunks)
    return Turn(first, tokens / (end - begin), time.perf_counter() - began)


def spread(values, digits):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(results, calls, groups):
    """results[server][round][turn], of which calls[turn] was sent"""
    names = list(results)
    turns = len(calls)
    print(f"| turns, prompt tokens | {' | '.join(f'{n}: TTFT s | tokens/s' for n in names)} |")
    print("|---|" + "---|---|" * len(names))
    for part in range(groups):
        among = range(part * turns // groups, (part + 1) * turns // groups)
        cells = [f"{among[0] + 1} to {among[-1] + 1}, {len(calls[among[0]].prompt)} to {len(calls[among[-1]].prompt)}"]
        for name in names:
            taken = [run_[turn] for run_ in results[name] for turn in among]
            cells += [spread([first for turn in taken for first in turn.first], 2), spread([turn.rate for turn in taken], 1)]
        print("| " + " | ".join(cells) + " |")
    cells = ["all turns, s"]
    for name in names:
        cells += [spread([sum(o.total for o in run_) for run_ in results[name]], 1), ""]
    print("| " + " | ".join(cells) + " |")
    # Compares the same turn of the same round, so that a slow phase affects both.
    for name in names[1:]:
        for part in range(groups):
            among = range(part * turns // groups, (part + 1) * turns // groups)
            ratios = [a[turn].rate / b[turn].rate for a, b in zip(results[name], results[names[0]]) for turn in among]
            print(f"\ntokens/s of {name} by {names[0]}, turns {among[0] + 1} to {among[-1] + 1}: {spread(ratios, 2)}", end="")
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND",
                        help="command of a server; {model} and {port} are replaced")
    parser.add_argument("--model", required=True, help="replacement of {model}")
    parser.add_argument("--vocabulary", type=int, default=16384, help="upper limit of token ids")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--last", type=int, default=20480, help="tokens including the last answer")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, each with new sessions")
    parser.add_argument("--sessions", type=int, default=1, help="number of concurrent sessions")
    parser.add_argument("--groups", type=int, default=4, help="number of rows of the table")
    parser.add_argument("--json", type=pathlib.Path, help="file to write all turns to")
    arguments = parser.parse_args()

    servers = dict(server.split("=", 1) for server in arguments.server)
    shape = (arguments.vocabulary, arguments.turns, arguments.first, arguments.last, arguments.output)
    up, results = {}, {name: [] for name in servers}
    try:
        for name, command in servers.items():
            with open(f"{name.replace('/', '_')}.log", "wb") as log:
                process, url = run.start(command, arguments.model, log)
            model = json.load(run.urllib.request.urlopen(url + "/v1/models", timeout=10))["data"][0]["id"]
            up[name] = process, url, model
            call(url, model, workload.Call(workload._tokens(random.Random(name), 256, arguments.vocabulary), 16))
        for number in range(arguments.rounds):
            order = list(servers)[number % len(servers):] + list(servers)[:number % len(servers)]
            for name in order:
                results[name].append([])
            sessions = [session(number * arguments.sessions + i, *shape) for i in range(arguments.sessions)]
            for turn, calls in enumerate(zip(*sessions)):
                for name in order:
                    _, url, model = up[name]
                    results[name][-1].append(turn_of(url, model, calls))
                latest = {name: results[name][-1][-1] for name in servers}
                print(f"round {number + 1}, turn {turn + 1}: "
                      + ", ".join(f"{name} {statistics.median(of.first):.2f} s, {of.rate:.1f} tokens/s"
                                  for name, of in latest.items()), file=sys.stderr, flush=True)
    finally:
        for process, _, _ in up.values():
            run.stop(process)
    table(results, session(0, *shape), arguments.groups)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: [[vars(o) for o in turns] for turns in runs]
                                              for name, runs in results.items()}) + "\n")


if __name__ == "__main__":
    main()
