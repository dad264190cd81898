#!/usr/bin/env python3
"""Runs a test script in a virtual environment with the packages of requirements.txt, made once.

Usage: with_clients.py ENVIRONMENT_FOLDER SCRIPT. Exit status 77, with the reason, when the packages cannot be had.
"""
import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys
import venv

REQUIREMENTS = pathlib.Path(__file__).with_name("requirements.txt")
SKIPPED = 77


def make(folder):
    """The environment's interpreter."""
    python = folder / "bin" / "python"
    mark = folder / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists() and mark.read_text() == wanted:
            return python
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", REQUIREMENTS],
                       check=True, capture_output=True, text=True, timeout=600)
        mark.write_text(wanted)
    return python


def main():
    folder, script = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    try:
        python = make(folder)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"SKIPPED: the clients cannot be installed: {error}\n{getattr(error, 'stderr', '') or ''}")
        return SKIPPED
    os.execv(python, [str(python), script, *sys.argv[3:]])


if __name__ == "__main__":
    sys.exit(main())
