#!/usr/bin/env python3
"""Runs a command that needs much memory. Where less is available, it prints so and exits with status 77 (skipped).

Usage: with_memory.py GIGABYTES COMMAND ...
"""
import os
import pathlib
import sys

from control_group import ROOT, memory_controllers

SKIPPED = 77
USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # by the name of the limit


def fields(path):
    """Returns the first number of each line of "name number" or "name: number kB"."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def available():
    """Returns the bytes that processes of this machine, of this control group, and of the groups around it may still take."""
    least = fields(pathlib.Path("/proc/meminfo"))["MemAvailable"] * 1024
    for folder, (limit, *_) in memory_controllers():
        for group in (folder, *folder.parents):
            if not group.is_relative_to(ROOT):
                break
            try:
                most, used = (int((group / name).read_text()) for name in (limit, USED[limit]))
                counts = fields(group / "memory.stat")
            except (OSError, ValueError):  # no such group, or one without a limit ("max")
                continue
            prefix = "total_" if "total_active_file" in counts else ""  # of version 1: with the groups inside
            cached = counts[prefix + "active_file"] + counts[prefix + "inactive_file"]
            least = min(least, most - used + cached)
    return least


def main():
    needed, found = float(sys.argv[1]), available() / 1e9
    if found < needed:
        print(f"SKIPPED: {sys.argv[1]} GB of memory are needed, {found:.1f} GB are available")
        return SKIPPED
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
