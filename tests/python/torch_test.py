#!/usr/bin/env python3
"""Runs the Python package's tests that need PyTorch: gradcheck, PyTorch transcriptions, and torch_scatter if it is installed.

Usage: torch_test.py ENVIRONMENT, the folder into which package_test.py installed the package.

PyTorch is too large to be installed for every build. An interpreter that has it is taken from MOESAIC_ORACLES (several,
separated by colons), else the one that runs this program. Its version must be that of the environment's interpreter, whose
pytest it uses. Without one, the program prints the reason and exits with status 77 (skipped).
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
SKIPPED = 77
ASK = """import importlib.util, json, sys
print(json.dumps([list(sys.version_info[:2]), importlib.util.find_spec("torch") is not None]))"""
# Packages of the environment come last: NumPy must be that of PyTorch.
RUN = """import sys
sys.path.append(sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "torch", "-rs", "tests"]))"""


def describe(python):
    """Returns the version of an interpreter and whether it has PyTorch; None if it does not run."""
    try:
        return json.loads(subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def main():
    own = pathlib.Path(sys.argv[1]) / "bin" / "python"
    site = next(iter(pathlib.Path(sys.argv[1]).glob("lib/python3*/site-packages")), None)
    if site is None or not (site / "moesaic").is_dir():
        print(f"SKIPPED: {sys.argv[1]} has no package moesaic: run the test python_package first")
        return SKIPPED
    described = describe(own)
    if described is None:
        print(f"SKIPPED: {own} does not run")
        return SKIPPED
    version = described[0]
    candidates = [*filter(None, os.environ.get("MOESAIC_ORACLES", "").split(":")), sys.executable]
    python = next((p for p in candidates if describe(p) == [version, True]), None)
    if python is None:
        print(f"SKIPPED: none of {', '.join(candidates)} is Python {version[0]}.{version[1]} with PyTorch: see MOESAIC_ORACLES")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "moesaic").symlink_to(site / "moesaic", target_is_directory=True)
        return subprocess.run([python, "-c", RUN, site], cwd=PACKAGE, env={**os.environ, "PYTHONPATH": folder}).returncode


if __name__ == "__main__":
    sys.exit(main())
