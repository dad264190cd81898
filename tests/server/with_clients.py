#!/usr/bin/env python3
"""Runs a test script in a virtual environment with the packages of a requirements file. Makes the environment once.

Usage: with_clients.py ENVIRONMENT_FOLDER REQUIREMENTS SCRIPT. When the packages cannot be installed, it prints the reason. It
then fails if the environment has CI, and else exits with status 77 (skipped).
"""
import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys
import venv

SKIPPED = 77
INSTALL_SECONDS = 900


def make(folder, requirements):
    """Makes the environment and returns its interpreter."""
    python = folder / "bin" / "python"
    mark = folder / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists() and mark.read_text() == wanted:
            return python
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "10", "-r", requirements],
                       check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        mark.write_text(wanted)
    return python


def missing(what, error):
    """Returns the exit status of a test whose tools are missing."""
    in_ci = bool(os.environ.get("CI"))
    print(f"{'FAILED' if in_ci else 'SKIPPED'}: {what} cannot be had: {error}\n{getattr(error, 'stderr', '') or ''}")
    return 1 if in_ci else SKIPPED


def main():
    folder, requirements, script = (pathlib.Path(word).resolve() for word in sys.argv[1:4])
    try:
        python = make(folder, requirements)
    except (subprocess.SubprocessError, OSError) as error:
        return missing(f"what {requirements.name} lists", error)
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    os.execv(python, [str(python), str(script), *sys.argv[4:]])


if __name__ == "__main__":
    sys.exit(main())
