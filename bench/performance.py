#!/usr/bin/env python3
"""Writes docs/performance.md from bench/results/<machine>/<commit>.json, and stores new results there.

    bench/performance.py                  write docs/performance.md
    bench/performance.py --check          exit with 1 if docs/performance.md differs from the results, or is too long
    bench/performance.py --add MACHINE [--about TEXT] [--folder build/bench/results]
                                          store the raw rounds of `./run bench` as results of this commit

A results file is one JSON object:

    machine      text: processor, cores, memory
    commit       abbreviated commit that was measured
    date         date of that commit
    runs         list of objects: suite (a name in ORDER), command, unit, conditions, rows, and optionally
                 rounds, peers (version and flags of each peer), commit_of ("documents": the run did not record its
                 commit; `commit` is the one that added the numbers to the documents)

A row has `model`, `test` and `moesaic`. It is compared with `peers` (other programs) or `baselines` (Moesaic with other
settings). Values are lists [median, lowest, highest] or [median]; `*_range` are lists [lowest, highest] of several runs.
`ratio` says how many times as good Moesaic is: of speeds Moesaic / peer, of times and errors peer / Moesaic. A row with
`detail` is not shown in docs/performance.md. `shown` names the baseline that is shown, if there are several.
"""
import argparse
import collections
import json
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
MAX_LINES = 150
ORDER = ("models", "speculation", "server", "long-context", "operators", "kernels", "cache", "quantizer")  # of rows
SHAPES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v2-lite": "DeepSeek-V2-Lite"}
# Tests that the page shows of a new run; the others are details, so that the page keeps its length.
SHOWN = re.compile(r"(pp64|pp512|tg32)( @ d4096)?|tg32 x (8|32)|.*, (512 tokens|16,384 keys), \d+ threads?")
LOWER_IS_BETTER = {"s", "ms", "us", "nats"}

HEAD = """<!-- Written by bench/performance.py from bench/results: edit these, and run it again. -->
# Performance

This page compares the speed of Moesaic with other programs on the same machine and the same files. Use it to estimate
the speed of your hardware, or to check that a change of the code made nothing slower.

- **Ratio** is Moesaic's speed / the peer's, or the peer's time or error / Moesaic's: above 1, Moesaic is better. It is the
  median of the ratios within each round, so it can differ from the quotient of the two medians.
- **Best peer** is the fastest other program in that run. In italics it is Moesaic itself with the named setting.
- Values are medians, in tokens per second where the test names no unit. "A to B" is the range of several runs. The
  JSON files in [bench/results](../bench/results) also have the spread, the flags, and the load of the machine.
- `pp512` is a prompt of 512 tokens and `tg32` a decode of 32 tokens. `@ d4096` means after 4,096 cached tokens, and
  `x 8` means 8 sequences in one batch (the sum of their tokens).
- Models have the layer shapes of the named release, random weights, and fewer layers: 5 of 48 for Qwen3-30B-A3B (8 as
  q4_0), 6 of 27 for DeepSeek-V2-Lite (9 as q4_0). *As W8A8* means `--dtype int8`. qwen3-moe-small has 4 layers of a
  small Qwen3-MoE, and moesaic-tiny is [trained](../models/moesaic-tiny/README.md).
"""

TAIL = """
## Reproduce it

```console
$ ./run bench            # all suites of bench/suites, 5 rounds: about two hours on two cores, 36 GB of models in build/
$ ./run bench --quick    # the main cases, 3 rounds: about ten minutes without peers
$ LLAMA_CPP=FOLDER IK_LLAMA_CPP=FOLDER PYTHON=python-with-torch-and-tokenizers ./run bench
$ bench/performance.py --add MACHINE --about "2 cores of a ..."    # store the rounds, then run it without flags
```

`FOLDER` has the programs of a native build of the peer. A peer that is not named is not measured, and no peer is
downloaded. The sides run in turns, and the side that begins changes from round to round. `bench/suites/*.csv` lists the
commands; `bench/run.sh SUITE` runs one suite.

## Limits of these numbers

- All machines have two virtual cores. No result is from a machine with many cores or several NUMA nodes.
- No complete large model was run: memory was too small. Start-up and page-cache effects of large files are not shown.
- The hosts are shared, so absolute speeds change by up to a third from day to day. Compare ratios, not tokens per second.
- vLLM and SGLang were not run as servers. GPUs are not supported.
- This page shows a selection of bench/results. Not shown: llm-compressor's `rtn` is closer to bf16 (KL ratio 0.95 for w8a8, 0.98 for w4a16).
- `†`: the run did not record its commit. The commit of the results file added the numbers to the documents.
- Each row is from the newest commit that measured it. Older commits are not repeated on newer code.

Analysis of these numbers, and experiments that failed: [attention](design/attention.md), [MoE and
matrix products](design/moe.md), [KV tiers](design/kv-tiers.md), [quantization](design/gptq.md).
"""


def load(folder):
    """[(machine's folder, contents)], the newest first."""
    files = [(path.parent.name, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]
    return sorted(files, key=lambda file: file[1]["date"], reverse=True)


def number(value):
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.3g}"


def cell(row, key, name=None):
    """The value of `key` in `row` (of the peer or baseline `name`) as text."""
    for suffix in ("", "_range"):
        value = row.get(key + suffix)
        value = value.get(name) if name and value else value
        if value and suffix:
            return " to ".join(number(v) for v in dict.fromkeys(value))
        if value:
            return number(value[0])
    return None


def ratio_cell(row):
    values = row.get("ratio_range") or row["ratio"][:1]
    if not row.get("ratio_range") and len(row["ratio"]) == 2:  # a range of one run
        values = row["ratio"]
    return "**" + " to ".join(f"{value:.3g}" if value >= 10 else f"{value:.2f}" for value in dict.fromkeys(values)) + "**"


def best(row, unit):
    """(key, name) of the side that `row` is compared with, or None."""
    peers = row.get("peers") or row.get("peers_range")
    if peers:
        choose = min if unit in LOWER_IS_BETTER or not unit else max
        return "peers", choose(peers, key=lambda name: peers[name][0])
    for key in ("baselines", "baselines_range"):
        if row.get(key):
            return "baselines", row.get("shown") or next(iter(row[key]))
    return None


def line_of(row, run):
    unit = row.get("unit", run["unit"])
    compared = best(row, unit)
    if compared is None or row.get("detail"):
        return None
    key, name = compared
    test = row["test"] + (f", {unit}" if unit not in ("tokens/s", "") else "")
    test += " †" if run.get("commit_of") == "documents" else ""
    shown = f"*{name}*" if key == "baselines" else name
    cells = [row["model"], test, cell(row, "moesaic"), f"{cell(row, key, name)} ({shown})", ratio_cell(row)]
    return "| " + " | ".join(cells) + " |"


def page(files):
    """The text of docs/performance.md."""
    tables = collections.defaultdict(dict)  # machine's text -> {(model, test): line}
    commits = collections.defaultdict(list)
    for _, data in files:
        for run in data["runs"]:
            for row in run["rows"]:
                line = line_of(row, run)
                key = row["model"], row["test"], row.get("unit", run["unit"])
                if line and key not in tables[data["machine"]]:
                    tables[data["machine"]][key] = run["suite"], line
                    commits[data["machine"]].append(data["commit"])
    text = HEAD
    for machine, lines in sorted(tables.items(), key=lambda item: -len(item[1])):
        text += f"\n## {machine}\n\nCommits: {', '.join(dict.fromkeys(commits[machine]))}.\n\n"
        text += "| model | test | Moesaic | best peer | ratio |\n|---|---|---:|---|---:|\n"
        order = {suite: place for place, suite in enumerate(ORDER)}
        # Rows of a suite and of a model are adjacent; otherwise newest first.
        ordered = sorted(lines.items(), key=lambda item: (order.get(item[1][0], 99), item[0][0]))
        text += "".join(line + "\n" for _, (_, line) in ordered)
    return text + TAIL


def spread(values):
    return [round(v, 3) for v in (statistics.median(values), min(values), max(values))]


def ratios(ours, theirs, lower):
    return spread([b / a if lower else a / b for a, b in zip(ours, theirs)])


def shapes_run(data):
    """A run of the suite "models" from the raw rounds of bench/peers/shapes.py."""
    speeds, flags = collections.defaultdict(lambda: collections.defaultdict(list)), {}
    for run in data["runs"]:
        if run["round"] == 0:  # a trial of flags
            continue
        flags[run["side"]] = run["flags"]
        for test, value in run["results"].items():
            speeds[run["shape"], run["weights"], run["threads"], test][run["side"]].append(value)
    rows = []
    for (shape, weights, threads, test), sides in speeds.items():
        lower = test.startswith("start")
        row = {"model": f"{SHAPES.get(shape, shape)}, {weights}", "test": test, "threads": threads,
               "moesaic": spread(sides.pop("Moesaic")), "peers": {name: spread(v) for name, v in sides.items()}}
        if lower:
            row["unit"] = "s"
        if not SHOWN.fullmatch(test):
            row["detail"] = True
        rounds = speeds[shape, weights, threads, test]
        compared = best(row, "s" if lower else "tokens/s")
        if compared:
            raw = [r["results"][test] for r in data["runs"] if r["round"] and r["side"] == "Moesaic"
                   and (r["shape"], r["weights"], r["threads"]) == (shape, weights, threads) and test in r["results"]]
            row["ratio"] = ratios(raw, rounds[compared[1]], lower)
        rows.append(row)
    return {"suite": "models", "command": "bench/peers/shapes.py", "unit": "tokens/s",
            "conditions": f"load average {data['about']['load'][0]:.1f} at the start", "peers": flags, "rows": rows}


def operators_run(data):
    """A run of the suite "operators" from the raw rounds of bench/peers/operators.py."""
    rows = []
    for operator in data:
        rounds = dict(operator["us"])
        ours = rounds.pop("Moesaic")
        peers = {f"PyTorch eager, {name}": values for name, values in rounds.items()}
        # "router, DeepSeek-V3, 512 tokens" is the operator, its model, and its size.
        words = re.sub(r"\d{4,}", lambda size: f"{int(size[0]):,}", operator["operator"]).split(", ")
        threads = operator["threads"]
        row = {"model": words[1], "test": ", ".join([words[0], *words[2:], f"{threads} thread{'s' * (threads > 1)}"]),
               "moesaic": spread(ours), "peers": {name: spread(values) for name, values in peers.items()}}
        if not SHOWN.fullmatch(row["test"]):
            row["detail"] = True
        row["ratio"] = ratios(ours, peers[best(row, "us")[1]], lower=True)
        rows.append(row)
    return {"suite": "operators", "command": "bench/peers/operators.py", "unit": "us",
            "conditions": f"PyTorch {data[0]['torch']}, {data[0]['threads']} threads", "rows": rows}


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()


def add(options):
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("the tree has uncommitted changes: results belong to a commit")
    commit = git("rev-parse", "--short", "HEAD")
    path = RESULTS / options.add / f"{commit}.json"
    about = options.about or next((data["machine"] for name, data in load(RESULTS) if name == options.add), None)
    if not about:
        sys.exit(f"bench/results has no machine {options.add}: describe it with --about")
    runs = [reader(json.loads((options.folder / name).read_text())) for name, reader in
            (("shapes.json", shapes_run), ("operators.json", operators_run)) if (options.folder / name).exists()]
    if not runs:
        sys.exit(f"{options.folder} has neither shapes.json nor operators.json: run ./run bench first")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": about, "commit": commit, "date": git("log", "-1", "--format=%as"), "runs": runs}
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(path.relative_to(ROOT))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", metavar="MACHINE")
    parser.add_argument("--about", help="description of a new machine")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "bench" / "results")
    options = parser.parse_args()
    if options.add:
        add(options)
        return
    text = page(load(RESULTS))
    if text.count("\n") > MAX_LINES:
        sys.exit(f"docs/performance.md would have {text.count(chr(10))} lines; the limit is {MAX_LINES}. Mark rows as "
                 'details with "detail": true in bench/results.')
    if not options.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit("docs/performance.md differs from bench/results: run bench/performance.py")


if __name__ == "__main__":
    main()
