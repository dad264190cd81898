#!/usr/bin/env python3
"""Builds the AllReduce benchmark for SMPI, and simulates it on two nodes of two ranks. The benchmark compares results with sums of its
inputs; this test compares simulated times with the bound and with flat rings.

Usage: smpi_test.py BUILD_FOLDER. Without SimGrid, it prints the reason and exits with status 77 (skipped).
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = ROOT / "bench" / "comm" / "smpi_program.sh"
TOPOLOGY = HERE / "two_by_two.json"


def simulate(build):
    with tempfile.TemporaryDirectory() as folder:
        bench = pathlib.Path(folder) / "all_reduce_bench"
        subprocess.run([PROGRAM, "build", build, "comm_all_reduce_bench", bench, "bench/comm/all_reduce_bench.cc"], check=True)
        words = ["--transport", "mpi", "--topology", TOPOLOGY, "--bytes", str(1 << 20), "--rounds", "1", "--calls", "1",
                 "--no-warm-up", "--against", "flat-block,flat-round-robin"]
        return subprocess.run([PROGRAM, "run", build, TOPOLOGY, bench, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    missing = [program for program in ("smpicxx", "smpirun", "ninja") if shutil.which(program) is None]
    if missing:
        print(f"SKIPPED: {', '.join(missing)} cannot be found; install libsimgrid-dev and ninja-build")
        return SKIPPED
    if not (build / "build.ninja").exists():
        print(f"SKIPPED: {build} is not a build folder of Ninja, whose commands name the libraries to link")
        return SKIPPED
    output = simulate(build)
    print(output)
    times = {}
    for line in output.splitlines():
        words = line.split()
        if words[0] == "bound":
            times["bound"] = float(words[2])
        if words[0] == "sample":
            times[words[2]] = float(words[3])
    # The planner predicts 99% of the bound, and 1.49 and 2.97 times the speed of the rings.
    assert 0.99 * times["bound"] < times["plan"] < times["bound"] / 0.85, times
    assert times["flat-block"] > 1.2 * times["plan"], times
    assert times["flat-round-robin"] > 2.2 * times["plan"], times
    return 0


if __name__ == "__main__":
    sys.exit(main())
