#!/usr/bin/env python3
"""Compares the scheduling policies of the proxy on traces, and writes the tables of docs/proxy-policies.md.

    bench/proxy/goodput.py TRACES                  run all, write docs/proxy-policies.md between its two markers
    bench/proxy/goodput.py TRACES --print          run all, print the tables
    bench/proxy/goodput.py TRACES --only claude    run the scenarios with this word in their name, print the tables
    bench/proxy/goodput.py --from FILE             write the tables from results that --save stored

TRACES is a folder with the four traces, as their authors publish them; files may be gzipped. The simulation is in
virtual time and seeded: the load of the machine does not change a number.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "proxy-policies.md"
BEGIN, END = "<!-- begin: bench/proxy/goodput.py -->", "<!-- end: bench/proxy/goodput.py -->"
MOONCAKE = "mooncake_synthetic_trace.jsonl.gz"
AZURE = "AzureLLMInferenceTrace_code.csv.gz"
SWE = "swe-agent_demonstrations.tar.gz"
CLAUDE = "claude_code_sessions_20.jsonl.gz"
# Name, trace, options, rates in requests per second. The details are shown for the second rate.
SCENARIOS = (
    ("Mooncake synthetic", MOONCAKE, "", (8, 11, 14)),
    ("Mooncake synthetic, aggregated", MOONCAKE, "--engines 8", (13, 16, 20)),
    ("Azure code", AZURE, "--slo-ttft 1", (30, 50, 70)),
    ("SWE-agent runs", SWE, "--copies 10 --slo-ttft 0.5", (160, 240, 300)),
    ("Claude Code sessions", CLAUDE, "--prefill 2 --decode 2 --kv-tokens 3000000 --slo-ttft 4", (0.4, 0.8, 1.2)),
)
COLUMNS = (("policy", "policy"), ("goodput/s", "goodput"), ("in SLO %", "good"), ("TTFT p50", "ttft_ms.p50"),
           ("p90", "ttft_ms.p90"), ("p99 ms", "ttft_ms.p99"), ("TPOT p50", "tpot_ms.p50"), ("p99 ms", "tpot_ms.p99"),
           ("hit %", "hit_rate"), ("imbalance", "imbalance"), ("busy %", "utilization"), ("rejects", "rejected"))


def simulate(binary, folder, scenario, rate):
    _, trace, options, _ = scenario
    command = [binary, "proxy", "simulate", str(folder / trace), "--rate", str(rate), "--json", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)[0]


def cell(result, key):
    if key == "good":
        return f"{100 * result['good'] / result['requests']:.1f}"
    value = result
    for part in key.split("."):
        value = value[part]
    if isinstance(value, (str, int)):
        return str(value)
    percent = key in ("hit_rate", "utilization")
    digits = {"goodput": 2, "imbalance": 2, "hit_rate": 1, "tpot_ms.p50": 1, "tpot_ms.p99": 1}.get(key, 0)
    return f"{value * (100 if percent else 1):.{digits}f}"


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    def line(row):
        return "| " + " | ".join(row[0].ljust(widths[0]) if i == 0 else c.rjust(widths[i])
                                 for i, c in enumerate(row)) + " |"
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def summary(runs):
    rows = [("trace", "offered/s", "bound/s", "common cache/s", "moesaic", "omni", "ratio", "best other", "", "ratio")]
    for name, rate, run in runs:
        by_policy = {r["policy"]: r["goodput"] for r in run["results"]}
        ours = by_policy["moesaic"]
        others = {p: g for p, g in by_policy.items() if p != "moesaic"}
        best = max(others, key=others.get)
        ratio = [f"{ours / max(g, 1e-9):.2f}" if g > ours / 100 else "> 100" for g in (by_policy["omni"], others[best])]
        rows.append((name, f"{run['results'][0]['offered_rate']:.2f}", f"{run['goodput_bound']:.2f}", f"{run['common_cache_goodput']:.2f}", f"{ours:.2f}",
                     f"{by_policy['omni']:.2f}", ratio[0], f"{others[best]:.2f}", best, ratio[1]))
    return table(rows)


def details(runs):
    text = []
    for scenario in SCENARIOS:
        name, _, options, rates = scenario
        run = next((run for n, rate, run in runs if n == name and rate == rates[1]), None)
        if run is None:
            continue
        rows = [tuple(title for title, _ in COLUMNS)]
        rows += [tuple(cell(r, key) for _, key in COLUMNS) for r in run["results"]]
        options = " ".join(filter(None, (f"--rate {rates[1]}", options)))
        text.append(f"### {name}\n\n`{options}`: {run['requests']} requests, {100 * run['reusable']:.1f}% of the prompt "
                    f"tokens reusable.\n\n{table(rows)}\n")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="?", type=pathlib.Path)
    parser.add_argument("--binary", default=str(ROOT / "build" / "release" / "bin" / "moesaic"))
    parser.add_argument("--only", default="", help="part of a scenario's name; prints instead of writing")
    parser.add_argument("--print", action="store_true", help="print the tables instead of writing them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=pathlib.Path, help="file for the results as JSON")
    parser.add_argument("--from", dest="stored", type=pathlib.Path, help="results that --save stored")
    arguments = parser.parse_args()
    if arguments.stored:
        runs = [tuple(run) for run in json.loads(arguments.stored.read_text())]
    elif arguments.traces:
        wanted = [(s, rate) for s in SCENARIOS if arguments.only.lower() in s[0].lower() for rate in s[3]]
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            results = pool.map(lambda w: simulate(arguments.binary, arguments.traces, *w), wanted)
            runs = [(s[0], rate, run) for (s, rate), run in zip(wanted, results)]
    else:
        parser.error("TRACES or --from is needed")
    if arguments.save:
        arguments.save.write_text(json.dumps(runs, indent=1))
    text = f"{summary(runs)}\n\n{details(runs)}"
    if arguments.only or arguments.print:
        print(text)
        return
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:begin]}\n\n{text}\n{page[end:]}")


if __name__ == "__main__":
    main()
