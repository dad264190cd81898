#!/usr/bin/env python3
"""Prints which tests of a CTest log were skipped, and why.

Usage: skipped.py build/release/Testing/Temporary/LastTest.log

Reads the output of GoogleTest (cases that call GTEST_SKIP), of Python's unittest (with or without -v) and of scripts
that exit with the code that CTest takes for skipped. Standard library only.
"""
import collections
import pathlib
import re
import sys

SECTION = re.compile(r"^\d+/\d+ Testing: (.+)$", re.M)
GTEST = re.compile(r"^[^\n]+:\d+: Skipped\n(.*?)\n?^\[  SKIPPED \] (\S+)", re.M | re.S)
UNITTEST = re.compile(r"^(\w+) \([\w.]+\)(?:\n.*?)? \.\.\. skipped (['\"])(.*)\2$", re.M)
SCRIPT = re.compile(r"^SKIPPED: (.+)$", re.M)
QUIET = re.compile(r"^OK \((?:.*, )?skipped=(\d+)", re.M)


def skipped(log):
    """Returns (test, case or None, reason) of each skipped case in the text of a CTest log."""
    found = []
    parts = SECTION.split(log)
    for test, text in zip(parts[1::2], parts[2::2]):
        cases = [(test, case, " ".join(reason.split())) for reason, case in GTEST.findall(text)]
        cases += [(test, case, reason) for case, _, reason in UNITTEST.findall(text)]
        cases += [(test, None, reason) for reason in SCRIPT.findall(text)]
        if not cases and (quiet := QUIET.search(text)):
            cases = [(test, None, "without a reason in the log")] * int(quiet[1])
        found += cases
    return found


def summary(found):
    """Returns the lines that report `found`: a count, then the cases of each reason."""
    if not found:
        return ["No test was skipped."]
    lines = [f"Skipped: {len(found)} test case{'s' if len(found) > 1 else ''}"]
    by_reason = collections.defaultdict(list)
    for test, case, reason in found:
        by_reason[reason].append(f"{test}: {case}" if case else test)
    for reason, names in sorted(by_reason.items()):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"  {len(names):4}  {reason} ({shown})")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.split("\n\n")[1])
    print("\n".join(summary(skipped(pathlib.Path(sys.argv[1]).read_text(errors="replace")))))
