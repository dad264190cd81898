#!/usr/bin/env python3
"""Runs the benchmarks that bench/suites/*.csv list, and prints their output as Markdown. bench/run.sh calls it.

usage: run_suites.py [--quick] [SUITE ...]       (default: all suites, in the order of SUITES)

Columns of a suite:
  section   heading above the output; adjacent rows of one section share it
  output    markdown (printed as it is), text (in a code block), benchmark (likewise; stderr is dropped), or
            "file NAME" (stored as {work}/NAME, not printed)
  needs     "package NAME" (of {python}), "program NAME" or "file PATH", separated by "; ". Without one of them, the row is
            skipped, with a line that says so
  command   words as in a shell; {python}, {bin}, {root}, {work}, {results}, {shapes}, {traces}, {tokenizer}, {text}
            and {cpus} are replaced, other braces are kept. It runs in the root of the tree.
  full, quick   arguments that follow without and with --quick
"""
import argparse
import csv
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from find_program import find_program  # noqa: E402

SUITES = ("models", "quantizer", "operators", "tokenizer", "kernels", "long-context", "cache", "server", "comm",
          "parallel", "placement", "proxy", "science")
COLUMNS = ["section", "output", "needs", "command", "full", "quick"]


def read_suite(name):
    with (ROOT / "bench" / "suites" / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if list(row) != COLUMNS or None in row.values():
            sys.exit(f"bench/suites/{name}.csv: expected the columns {','.join(COLUMNS)} in {row}")
    return rows


def values():
    """Values of {NAME} in a command, by the environment variables of bench/run.sh."""
    environment = os.environ.get
    work = ROOT / "build" / "bench"
    text = pathlib.Path(environment("TEXT", "../shared/data/text/wikitext-2_valid.txt"))
    if not (ROOT / text).is_file():
        text = "models/moesaic-tiny/heldout.jsonl"
    paths = {"bin": pathlib.Path(environment("BUILD", "build/release")) / "bin",
             "results": environment("RESULTS", work / "results"), "shapes": environment("SHAPES", work / "shapes"),
             "traces": environment("TRACES", "../shared/data/traces"), "work": work, "root": ROOT,
             "tokenizer": environment("TOKENIZER", "models/moesaic-tiny"), "text": text}
    return {name: str((ROOT / path).resolve()) for name, path in paths.items()} | {
        "python": environment("PYTHON", "python3"), "cpus": str(len(os.sched_getaffinity(0)))}


def filled(text, known):
    for name, value in known.items():
        text = text.replace("{" + name + "}", value)
    return text


def missing(needs, python):
    """Why a row cannot run, or None."""
    for need in filter(None, needs.split("; ")):
        kind, _, name = need.partition(" ")
        if kind == "package":
            if subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode != 0:
                return f"{python} has no package {name}"
        elif kind == "program":
            if find_program(name) is None:
                return f"the program {name} cannot be found"
        elif not pathlib.Path(name).is_file():
            return f"{name} does not exist"
    return None


def run(row, arguments, known):
    command = [filled(word, known) for word in shlex.split(f"{row['command']} {arguments}")]
    kind, _, name = row["output"].partition(" ")
    sys.stdout.flush()
    if kind == "file":
        with open(pathlib.Path(known["work"]) / name, "w") as file:
            return subprocess.run(command, cwd=ROOT, stdout=file).returncode
    if kind != "markdown":
        print("```", flush=True)
    errors = subprocess.DEVNULL if kind == "benchmark" else None
    code = subprocess.run(command, cwd=ROOT, stderr=errors).returncode
    print("" if kind == "markdown" else "```", flush=True)
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    options = parser.parse_args()
    for name in options.suites:
        if name not in SUITES:
            parser.error(f"there is no suite \"{name}\"; the suites are {', '.join(SUITES)}")
    known = values()
    for folder in ("work", "results"):
        pathlib.Path(known[folder]).mkdir(parents=True, exist_ok=True)
    section = None
    for name in options.suites or SUITES:
        for row in read_suite(name):
            if row["section"] != section:
                section = row["section"]
                print(f"\n## {section}\n", flush=True)
            reason = missing(filled(row["needs"], known), known["python"])
            if reason:
                print(f"Skipped: {reason}.\n", flush=True)
                continue
            code = run(row, row["quick" if options.quick else "full"], known)
            if code:
                sys.exit(f"bench/suites/{name}.csv: exit status {code} of: {row['command']}")


if __name__ == "__main__":
    main()
