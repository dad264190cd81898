#!/usr/bin/env python3
"""Runs mpi4py's own tests of communicators and collectives on 4 ranks, without and with libmoesaic_mpi.so, and compares the
outcomes: a test that passes without the library must pass with it.

Usage: mpi4py_suite.py [--all] LIBRARY MPIRUN [FLAGS...]. Without --all, the slowest tests, of collectives on duplicated
communicators and NumPy arrays, are left out. mpi4py and pip are those of the interpreter that runs this script.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "server"))
from source_distribution import fetch  # noqa: E402
from with_clients import missing  # noqa: E402

SOURCES = pathlib.Path(sys.prefix).with_name("mpi4py_sources")
VERSION = "4.1.2"
SHA256 = "56860286dc45f20e8821e93cb06669e30462348bf866f685553fa4b712d58d02"
RANKS = 4
RUN_SECONDS = 1500
# Ranks that spawn processes need a launcher with free slots.
ALL = ["-e", "spawn|dynproc|util_pool"]
SOME = ["-i", r"test_(cco_(buf|vec|obj)(_inter)?|comm(_inter|_topo)?|threads|attributes|op|errhandler|exceptions)\.py",
        "-x", "test_cco_*Dup.*", "--no-numpy"]
CANARY = "from mpi4py import MPI; MPI.COMM_WORLD.Alltoall([bytearray(4), MPI.BYTE], [bytearray(4), MPI.BYTE])"


def launch(launcher, library, words, **options):
    preload = ["-x", f"LD_PRELOAD={library}"] if library else []
    return subprocess.run([*launcher, "-n", str(RANKS), *preload, *words], capture_output=True, text=True, timeout=RUN_SECONDS,
                          **options)


def outcomes(launcher, library, folder, selection):
    """Returns [{test: outcome} of each rank]. An outcome is "ok", "FAIL", "ERROR", "skipped" or "expected failure"."""
    with tempfile.TemporaryDirectory() as logs:
        played = launch([*launcher, "--output-filename", logs], library,
                        [sys.executable, str(folder / "test" / "main.py"), "-v", *selection], cwd=folder / "test")
        texts = [(path / "stderr").read_text(errors="replace") for path in sorted(pathlib.Path(logs).rglob("rank.*"))]
    if len(texts) != RANKS or not all(re.search(r"^Ran \d+ tests", text, re.M) for text in texts):
        raise SystemExit(f"FAILED: the tests did not end (status {played.returncode})\n{played.stderr[-4000:]}")
    return [dict(re.findall(r"\((test_[\w.]+)\)[^()]*? \.\.\. (?:.*\n)??(ok|FAIL|ERROR|skipped|expected failure)", text))
            for text in texts]


def is_reached(launcher, library):
    """Whether mpi4py calls the library: it reports a topology file that does not exist."""
    played = launch([*launcher, "-x", "MOESAIC_TOPOLOGY=/nonexistent.json"], library, [sys.executable, "-c", CANARY])
    return "libmoesaic_mpi: rank 0 passes calls to MPI" in played.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("library")
    parser.add_argument("launcher", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        folder = fetch("mpi4py", VERSION, SHA256, SOURCES)
    except (subprocess.SubprocessError, OSError) as error:
        return missing("the source distribution of mpi4py", error)
    if not is_reached(arguments.launcher, arguments.library):
        print(f"FAILED: mpi4py does not call {arguments.library}")
        return 1
    runs = []
    for library in (None, arguments.library):
        started = time.monotonic()
        runs.append(outcomes(arguments.launcher, library, folder, ALL if arguments.all else SOME))
        counts = {}
        for outcome in runs[-1][0].values():
            counts[outcome] = counts.get(outcome, 0) + 1
        print(f"{'with' if library else 'without'} the library: {len(runs[-1][0])} tests on {RANKS} ranks, {counts} on rank 0, "
              f"{time.monotonic() - started:.0f} s", flush=True)
    worse = [f"rank {rank}: {test}: {outcome} without the library, {runs[1][rank].get(test, 'no outcome')} with it"
             for rank, tests in enumerate(runs[0]) for test, outcome in tests.items()
             if runs[1][rank].get(test) != outcome]
    few = len(runs[0][0]) < 300
    print("\n".join(worse), f"{len(worse)} outcomes differ", sep="\n" if worse else "")
    return 1 if worse or few else 0


if __name__ == "__main__":
    sys.exit(main())
