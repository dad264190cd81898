#!/usr/bin/env python3
"""Runs the HPC Challenge benchmarks (Debian: hpcc) on 4 ranks with libmoesaic_mpi.so. The program verifies its results; this test reads
the verifications, and checks that the library carried out the program's calls of MPI_Allreduce and MPI_Alltoall.

Usage: hpcc_suite.py LIBRARY COUNTER MPIRUN [FLAGS...]. COUNTER is call_counter.c as a library. Without the program, or if it was built
with another MPI library, the script prints the reason and exits with status 77 (skipped).
"""
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from mpi4py_suite import launch

SKIPPED = 77
THRESHOLD = 16  # of scaled residuals and errors, the program's default
# The program reads values by their lines, and ignores the text after them.
INPUT = f"""HPLinpack benchmark input file
HPC Challenge on 4 ranks
HPL.out  ignored
8        ignored
1        number of matrix sizes
500      order of the matrix; PTRANS takes half of it
1        number of block sizes
32       block size
0        row-major order of processes
1        number of process grids
2        rows of processes
2        columns of processes
{THRESHOLD}.0     threshold
1        number of panel factorizations
2        right-looking
1        number of recursive stopping criteria
4        columns at the end of the recursion
1        number of recursion widths
2        panels in the recursion
1        number of recursive factorizations
1        Crout
1        number of broadcasts
1        modified ring
1        number of look-ahead depths
1        look-ahead depth
2        mixed swapping
64       threshold of swapping
0        transposed form of L1
0        transposed form of U
1        equilibration
8        alignment of memory
##### line 32 is a separator #####
0        number of further matrix sizes of PTRANS
0
0        number of further block sizes of PTRANS
0
"""


def mpi_library(program):
    """Returns the file of MPI's library that the dynamic linker finds for a program or library, or None."""
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    found = re.search(r"libmpi\.so\S* => (\S+)", listed)
    return os.path.realpath(found[1]) if found else None


def section(text, name):
    found = re.search(rf"^Begin of {name} section\.$(.*?)^End of {name} section\.$", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def residuals_passed(text):
    counts = dict(reversed(pair) for pair in re.findall(r"(\d+) tests (completed and passed|completed and failed|skipped)", text))
    return counts.pop("completed and passed", "0") != "0" and counts == {"completed and failed": "0", "skipped": "0"}


def verifications(text):
    """Returns {verification: whether it passed} of the program's output."""
    values = dict(re.findall(r"^(\w+)=(\S+)$", section(text, "Summary"), re.MULTILINE))

    def value(name):
        return float(values.get(name, "nan"))

    nodes = re.findall(r"^Node\(s\) with error (\d+)$", text, re.MULTILINE)
    return {
        "all benchmarks ended": "End of HPC Challenge tests." in text and value("Success") == 1,
        "ranks": value("CommWorldProcs") == 4,
        "residual of HPL": residuals_passed(section(text, "HPL")),
        "residuals of PTRANS": residuals_passed(section(text, "PTRANS")),
        "MPIRandomAccess": value("MPIRandomAccess_Errors") == 0,
        "MPIRandomAccess_LCG": value("MPIRandomAccess_LCG_Errors") == 0,
        # The bound of the program's own check.
        "error of MPIFFT": value("MPIFFT_maxErr") < THRESHOLD * value("HPL_eps") * math.log(value("MPIFFT_N")),
        "benchmarks of single ranks": len(nodes) > 0 and set(nodes) == {"0"},
    }


def carried_out(errors):
    """Returns {function: (calls that the library carried out, calls that it passed to MPI)}."""
    return {name: (int(ours), int(passed))
            for name, ours, passed in re.findall(r"(MPI_\w+): (\d+) calls carried out, (\d+) passed to MPI", errors)}


def main():
    library, counter, *launcher = sys.argv[1:]
    program = shutil.which("hpcc")
    if program is None:
        print("SKIPPED: hpcc cannot be found; install hpcc")
        return SKIPPED
    if mpi_library(program) is None or mpi_library(program) != mpi_library(library):
        print(f"SKIPPED: {program} uses {mpi_library(program)}, but {library} uses {mpi_library(library)}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "hpccinf.txt").write_text(INPUT)
        started = time.monotonic()
        played = launch(launcher, f"{counter}:{library}", [program], cwd=folder)
        seconds = time.monotonic() - started
        output = pathlib.Path(folder, "hpccoutf.txt")
        text = output.read_text(errors="replace") if output.exists() else ""
    passed, calls = verifications(text), carried_out(played.stderr)
    # Each MPIRandomAccess and each direction of MPIFFT calls MPI_Alltoall. The program may pass operations of its own to MPI_Allreduce.
    all_to_all, all_reduce = (calls.get(name, (0, 0)) for name in ("MPI_Alltoall", "MPI_Allreduce"))
    reached = all_to_all[0] >= 4 and all_to_all[1] == 0 and all_reduce[0] >= 10
    print(f"{passed}\n{calls}\n{seconds:.1f} s")
    if played.returncode != 0 or not all(passed.values()) or not reached:
        print(f"FAILED: status {played.returncode}\n{played.stdout}\n{played.stderr}\n{text}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
