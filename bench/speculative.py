#!/usr/bin/env python3
"""Measures the speed-up of speculative decoding on the shipped model, as markdown.

  bench/speculative.py build/release/bin/moesaic [--rounds 5]

One server (bf16, one thread) per method answers the held-out prompts greedily, in alternation with the others; then
prompts of random tokens, sampled with seeds at temperature 1.5. All answers must equal those of `off`. Speeds are tokens
per second from the first to the last token of each answer by the server's clocks (/metrics). They are medians (lowest to
highest) over rounds without the first; ratios are within a round. Standard library only.
"""
import argparse
import json
import pathlib
import random
import statistics
import sys
import tempfile
import urllib.request

BENCH = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "agent"))
import run  # noqa: E402

MODEL = BENCH.parent / "models" / "moesaic-tiny"
METHODS = ["off", "mtp", "ngram", "mtp+ngram"]
GROUPS = {"all": ("short", "long"), "prompts up to 64 tokens": ("short",), "random": ("random",)}


def chats():
    """Returns (path, body) of each held-out prompt."""
    for line in (MODEL / "heldout.jsonl").read_text().splitlines():
        body = json.loads(line) | {"temperature": 0, "max_tokens": 512}
        del body["category"], body["expected"]
        for tool_call in (call for message in body["messages"] for call in message.get("tool_calls", [])):
            tool_call["function"]["arguments"] = json.dumps(tool_call["function"]["arguments"])  # as OpenAI has it
        yield "/v1/chat/completions", body


def random_tokens():
    """Returns the same for 16 prompts of 64 random tokens, with answers of 128."""
    generator = random.Random(1)
    return [("/v1/completions", {"prompt": generator.choices(range(1536), k=64), "max_tokens": 128,
                                 "temperature": 1.5, "seed": seed, "ignore_eos": True}) for seed in range(16)]


def ask(url, call):
    """Returns (answer, tokens of the prompt)."""
    answer = run.post(url, *call)
    choice = answer["choices"][0]
    for tool_call in choice.get("message", {}).get("tool_calls") or []:
        del tool_call["id"]  # differs for each answer
    return choice, answer["usage"]["prompt_tokens"]


def clocks(url):
    """Returns (decode seconds, decoded tokens without the first ones) of all answers so far."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    time = "vllm:request_decode_time_seconds"
    return values[time + "_sum"], values["vllm:generation_tokens_total"] - values[time + "_count"]


def measure(url, calls):
    """Returns the increase of `clocks`; fails if an answer differs from that without drafts."""
    before = clocks(url)
    for call, said in calls:
        if (answer := ask(url, call)[0]) != said:
            sys.exit(f"{url} said\n{answer}\ninstead of\n{said}\nto {json.dumps(call[1])[:500]}")
    return [after - start for after, start in zip(clocks(url), before)]


def table(rounds):
    """Prints the table. `rounds` has the results of `measure` by method and part, for each round."""
    def total(i, round_, method, name):
        return sum(round_[method][part][i] for part in GROUPS[name])

    def rate(*key):
        return total(1, *key) / total(0, *key)

    heads = [f"{name}, {total(1, rounds[0], 'off', name):,.0f} tokens | ratio" for name in GROUPS]
    print(f"| `--speculative` | {' | '.join(heads)} |\n{'|---' * (1 + 2 * len(GROUPS))}|")
    for method in METHODS:
        cells = []
        for name in GROUPS:
            speeds = [rate(round_, method, name) for round_ in rounds]
            ratio = statistics.median(rate(round_, method, name) / rate(round_, "off", name) for round_ in rounds)
            cells += [f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})", f"{ratio:.2f}"]
        print(f"| `{method}` | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    started = {}  # (process, address) by method
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
        try:
            for method in METHODS:
                started[method] = run.start(
                    f"{arguments.moesaic} serve {{model}} --port {{port}} --dtype bf16 --threads 1 "
                    f"--no-prefix-cache --speculative {method}", MODEL, log)
            parts = {"short": [], "long": [], "random": []}
            for call in [*chats(), *random_tokens()]:
                said, tokens = ask(started["off"][1], call)
                part = "random" if "messages" not in call[1] else "short" if tokens <= 64 else "long"
                parts[part].append((call, said))
            rounds = [{method: {part: measure(started[method][1], calls) for part, calls in parts.items()}
                       for method in METHODS} for _ in range(arguments.rounds + 1)]
        finally:
            for process, _ in started.values():
                run.stop(process)
    pathlib.Path(log.name).unlink()
    table(rounds[1:])


if __name__ == "__main__":
    main()
