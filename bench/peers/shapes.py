#!/usr/bin/env python3
"""Compares prefill, decode and start-up on real layer shapes with llama.cpp and ik_llama.cpp on the same files.

usage: shapes.py MOESAIC SHAPES_FOLDER [--llama FOLDER] [--ik FOLDER] [--json FILE] [--rounds N] [--quick] ...

Missing files are made by make_shapes.py. The sides alternate, and the order changes from round to round. Each round is a
separate process, with an untimed repetition before the timed one if the program has one. Prints medians over rounds with
the lowest and highest, and the median of the ratios within a round to the peer with the higher median.

Every side runs with its best flags. Before the rounds each candidate set of flags (sides.py) is run once, and the one with
the best geometric mean over the work's tests is used. Depths use the flags of the smallest depth.

FOLDERs have the peers' own programs, built natively on the measured machine: llama-bench, llama-batched-bench and
llama-completion of llama.cpp; llama-bench, llama-batched-bench, llama-sweep-bench and llama-cli of ik_llama.cpp. Without
them only Moesaic is measured.

ik_llama.cpp needs two changes for the comparison. Its llama-batched-bench gives all sequences token 0, which uses the same
experts (tokens must be random, as in the other programs). And it identifies DeepSeek-V2-Lite by 26 or 27 layers only.
"""
import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import sides


@dataclasses.dataclass
class Job:
    file: pathlib.Path
    shape: str
    kind: str
    threads: int
    dtype: str  # its format on this side


class Record:
    """All runs of a side, written after each run so that an interrupted session keeps them."""

    def __init__(self, path, about):
        self.path, self.data = path, {"about": about, "runs": []}

    def add(self, run):
        self.data["runs"].append(run)
        if self.path:
            self.path.write_text(json.dumps(self.data, indent=1))


def run_once(side, work, flags, job, number, record):
    """`number` is the round; 0 while flags are tried."""
    print(f"{job.shape} {job.kind}, {job.threads} threads, {work}, round {number}: {side.name} {flags}",
          file=sys.stderr)
    name, *arguments = work.split()
    load, begin = os.getloadavg()[0], time.time()
    speeds = getattr(side, name)(job, flags, *map(int, arguments))
    record.add({"shape": job.shape, "weights": job.kind, "threads": job.threads, "work": work, "round": number,
                "side": side.name, "flags": flags, "load": load, "seconds": round(time.time() - begin, 1),
                "results": speeds})
    return speeds


def worth(speeds):
    """Returns the geometric mean over tests; seconds count inversely."""
    return math.exp(statistics.mean(math.log(1 / v if test == sides.START else v) for test, v in speeds.items()))


def best_flags(side, work, job, found, options, record):
    name = work.split()[0]
    candidates = side.candidates.get(name, [""])
    if (side.name, name) in found:
        return found[side.name, name]
    if len(candidates) > 1 and options.tune:
        tried = {flags: worth(run_once(side, work, flags, job, 0, record)) for flags in candidates}
        found[side.name, name] = max(tried, key=tried.get)
    else:
        found[side.name, name] = candidates[0]
    return found[side.name, name]


def median_cell(values):
    digits = 2 if statistics.median(values) < 10 else 1
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def row(job, test, results, ours, peers):
    speeds = results[ours.name, test]
    share = f"{100 * statistics.median(ours.shares[test]):.0f}%" if ours.shares.get(test) else "-"
    cells = [job.shape, job.kind, str(job.threads), test, median_cell(speeds), share]
    cells += [median_cell(results[peer.name, test]) if (peer.name, test) in results else "-" for peer in peers]
    measured = [results[peer.name, test] for peer in peers if (peer.name, test) in results]
    if measured:
        seconds = test == sides.START
        better = min(measured, key=statistics.median) if seconds else max(measured, key=statistics.median)
        ratios = [b / a if seconds else a / b for a, b in zip(speeds, better)]
        cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


def works_of(job, options):
    if job.shape.endswith("-start"):
        return ["start"]
    works = ["plain"]
    if job.threads == max(options.threads):
        works += [f"deep {depth}" for depth in sorted(options.depths)] + ["batched"] * bool(options.batches)
    return [work for work in works if work.split()[0] in options.works]


def run_rounds(work, order, flags, job, options, record):
    """Returns {(name of the side, test): [speed by round]}."""
    deep = work.startswith("deep") and int(work.split()[1]) > 8192
    results = collections.defaultdict(list)
    for number in range(1, (options.deep_rounds if deep else options.rounds) + 1):
        for side in order if number % 2 == 1 else reversed(order):
            for test, value in run_once(side, work, flags[side.name], job, number, record).items():
                results[side.name, test].append(value)
    return results


def measure(job, options, record, winners):
    ours = sides.Moesaic(options.moesaic, options)
    peers = [kind(folder, options) for kind, folder in
             ((sides.LlamaCpp, options.llama), (sides.IkLlamaCpp, options.ik)) if folder]
    found = {}
    for work in works_of(job, options):
        flags = {side.name: best_flags(side, work, job, found, options, record) for side in [ours, *peers]}
        ours.shares.clear()  # drops the runs that tried flags
        results = run_rounds(work, [ours, *peers], flags, job, options, record)
        for side, test in results:
            if side == ours.name:
                print(row(job, test, results, ours, peers), flush=True)
        winners += [(job, work, name, words) for name, words in flags.items() if words]


def numbers(text):
    return [int(number) for number in text.split(",") if number]


def options_of():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic", type=pathlib.Path)
    parser.add_argument("shapes", type=pathlib.Path)
    for name, environment in (("llama", "LLAMA_CPP"), ("ik", "IK_LLAMA_CPP")):
        parser.add_argument(f"--{name}", type=pathlib.Path, default=os.environ.get(environment) or None,
                            help=f"default: ${environment}")
    parser.add_argument("--json", type=pathlib.Path, help="every run, with its flags and load average")
    parser.add_argument("--shape", action="append", help="default: qwen3-30b-a3b, deepseek-v2-lite, and one to start")
    parser.add_argument("--type", action="append", choices=sides.DTYPES, help="default: q8_0 and q4_0")
    parser.add_argument("--dtype", help="run the files as this here (int8: W8A8), peers as they are stored; "
                                        "default: bf16 files as bf16, others as they are stored")
    parser.add_argument("--work", dest="works", action="append", choices=("plain", "deep", "batched", "start"))
    parser.add_argument("--threads", type=numbers, default=[os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deep-rounds", type=int, help="of depths beyond 8192; default: --rounds")
    parser.add_argument("--prompts", type=numbers, default=[64, 128, 512, 2048])
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--depths", type=numbers, default=[4096, 16384])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32], help="empty: no batched decode")
    parser.add_argument("--no-tune", dest="tune", action="store_false", help="run each side's first set of flags")
    parser.add_argument("--quick", action="store_true", help="3 rounds of pp128, pp512, tg32 of q8_0, without tuning")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompts, options.decode, options.batches, options.depths = 3, [128, 512], 32, [], []
        options.type, options.tune, options.works = ["q8_0"], False, ["plain"]
    for name in ("moesaic", "shapes", "llama", "ik"):  # sides run in other folders
        path = getattr(options, name)
        setattr(options, name, path and pathlib.Path(path).resolve())
    options.works = options.works or ["plain", "deep", "batched", "start"]
    options.deep_rounds = options.deep_rounds or options.rounds
    options.type = options.type or ["q8_0", "q4_0"]
    options.shape = options.shape or ["qwen3-30b-a3b", "deepseek-v2-lite"] + ["qwen3-30b-a3b-start"] * (
        "start" in options.works)
    return options


def make_file(shape, kind, folder):
    path = folder / f"{shape}-{kind}.gguf"
    if not path.exists():
        maker = pathlib.Path(__file__).parent.with_name("make_shapes.py")
        subprocess.run([sys.executable, maker, folder, "--shape", shape, "--type", kind], check=True, stdout=sys.stderr)
    return path


def main():
    options = options_of()
    about = {"begin": time.strftime("%F %R UTC", time.gmtime()), "cores": os.cpu_count(), "load": os.getloadavg(),
             "moesaic": sides.run([options.moesaic, "--version"])[0].strip()}
    record, winners = Record(options.json, about), []
    head = ["shape", "weights", "threads", "test", "Moesaic t/s", "of peak"]
    head += ["llama.cpp t/s"] * bool(options.llama) + ["ik_llama.cpp t/s"] * bool(options.ik)
    head += ["ratio to the better"] * bool(options.llama or options.ik)
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    for shape in options.shape:
        for kind in options.type if not shape.endswith("-start") else ["q8_0"]:
            for threads in options.threads:
                job = Job(make_file(shape, kind, options.shapes), shape, kind, threads,
                          options.dtype or sides.DTYPES[kind])
                measure(job, options, record, winners)
    if winners:
        print(f"\n`{sides.START}` is in seconds. Flags that won:\n")
    for job, work, side, words in winners:
        print(f"- {job.shape} {job.kind}, {job.threads} threads, {work}: {side} `{words}`")


if __name__ == "__main__":
    main()
