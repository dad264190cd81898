#!/usr/bin/env python3
"""Runs a command that needs much memory. Where less is available, it prints so and exits with status 77 (skipped).

Usage: with_memory.py GIGABYTES COMMAND ...
"""
import os
import pathlib
import sys

SKIPPED = 77
GROUP = pathlib.Path("/sys/fs/cgroup")


def fields(path):
    """Returns the first number of each line of "name number" or "name: number kB"."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def available():
    """Returns the bytes that processes of this machine, and of this control group, may still take."""
    least = fields(pathlib.Path("/proc/meminfo"))["MemAvailable"] * 1024
    try:
        most = int((GROUP / "memory.max").read_text())
        cached = fields(GROUP / "memory.stat")
        used = int((GROUP / "memory.current").read_text()) - cached["active_file"] - cached["inactive_file"]
    except (OSError, ValueError):  # no group of its own, or one without a limit ("max")
        return least
    return min(least, most - used)


def main():
    needed, found = float(sys.argv[1]), available() / 1e9
    if found < needed:
        print(f"SKIPPED: {sys.argv[1]} GB of memory are needed, {found:.1f} GB are available")
        return SKIPPED
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
