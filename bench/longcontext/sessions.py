#!/usr/bin/env python3
"""An agent's session that grows turn by turn, on several servers in turns: time to the first token and tokens/s by turn.

  sessions.py --model MODEL --vocabulary 16384 --turns 20 --last 20480 --output 64 --rounds 3 \\
    --server "dense=moesaic serve {model} --port {port} --threads 2" \\
    --server "sparse=moesaic serve {model} --port {port} --threads 2 --kv-sparsity decode --kv-sparsity-budget 2048" \\
    --server "llama-server=llama-server -m {model} --port {port} -c 24576 -np 1 -fa on -t 2"

All servers are up at once; a turn goes to one after another, so that only one works at a time and a slow minute falls on
all of them. Each turn's prompt holds the ones before it, made-up answers of the length asked for, and new tokens, so each
server computes the new part and reads the rest from its cache. Every round is a new session, and begins with the next
server. A server's first turn of the first round is as the others'; one call before it, of other tokens, warms it up.

Tokens/s are those behind the first token of a turn. Standard library only.
"""
import argparse
import asyncio
import json
import pathlib
import random
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "agent"))
import client  # noqa: E402
import run  # noqa: E402
import workload  # noqa: E402


def session(number, vocabulary, turns, first, last, output):
    """Calls whose prompts grow from `first` to `last` - `output` tokens; the last answer reaches `last`."""
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


def rate(outcome):
    """Tokens a second behind the first."""
    return (outcome.output - 1) / (outcome.total - outcome.first)


def spread(values, digits):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(results, calls, groups):
    """results[server][round][turn]"""
    names = list(results)
    turns = len(calls)
    print(f"| turns, prompt tokens | {' | '.join(f'{n}: TTFT s | tokens/s' for n in names)} |")
    print("|---|" + "---|---|" * len(names))
    for part in range(groups):
        among = range(part * turns // groups, (part + 1) * turns // groups)
        cells = [f"{among[0] + 1} to {among[-1] + 1}, {len(calls[among[0]].prompt)} to {len(calls[among[-1]].prompt)}"]
        for name in names:
            taken = [run_[turn] for run_ in results[name] for turn in among]
            cells += [spread([o.first for o in taken], 2), spread([rate(o) for o in taken], 1)]
        print("| " + " | ".join(cells) + " |")
    cells = ["whole session, s"]
    for name in names:
        cells += [spread([sum(o.total for o in run_) for run_ in results[name]], 1), ""]
    print("| " + " | ".join(cells) + " |")
    # Of the same turn of the same round, so that a slow minute does not part them.
    for name in names[1:]:
        for part in range(groups):
            among = range(part * turns // groups, (part + 1) * turns // groups)
            ratios = [rate(a[turn]) / rate(b[turn]) for a, b in zip(results[name], results[names[0]]) for turn in among]
            print(f"\ntokens/s of {name} by {names[0]}, turns {among[0] + 1} to {among[-1] + 1}: {spread(ratios, 2)}", end="")
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND",
                        help="how to start a server; {model} and {port} are filled in")
    parser.add_argument("--model", required=True, help="what {model} becomes")
    parser.add_argument("--vocabulary", type=int, default=16384, help="token ids lie below this")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--last", type=int, default=20480, help="tokens with the last answer")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="sessions")
    parser.add_argument("--groups", type=int, default=4, help="rows of the table")
    parser.add_argument("--json", type=pathlib.Path, help="write all turns here as well")
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
            for turn, what in enumerate(session(number, *shape)):
                for name in order:
                    _, url, model = up[name]
                    results[name][-1].append(call(url, model, what))
                print(f"round {number + 1}, turn {turn + 1}: "
                      + ", ".join(f"{n} {results[n][-1][-1].first:.2f} s, {rate(results[n][-1][-1]):.1f} tokens/s"
                                  for n in servers), file=sys.stderr, flush=True)
    finally:
        for process, _, _ in up.values():
            run.stop(process)
    table(results, session(0, *shape), arguments.groups)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: [[vars(o) for o in turns] for turns in runs]
                                              for name, runs in results.items()}) + "\n")


if __name__ == "__main__":
    main()
