"""Time limits of tests, longer on a machine that is slow or busy. Standard library only.

A test's limit is for a machine of its own. patient() multiplies it by the time that a fixed piece of work takes here and now,
over the time that it takes on such a machine, or by the number of processes that wait for each CPU where that is more. The
factor is at least 1 and never falls. The measured work starts a process and computes.
"""
import hashlib
import os
import subprocess
import sys
import time

# Seconds of measure() on an idle AMD EPYC 7003 (2 cores).
REFERENCE_SECONDS = 0.1
# A limit never grows beyond this: a test that hangs has to end.
MOST = 30
# Load comes and goes: each limit is at least twice the measured time.
ROOM = 2
# A measurement is good for this long.
FRESH_SECONDS = 20

_measured = None  # (when, factor)


def measure():
    """Seconds for the fixed piece of work."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    block = bytes(1 << 20)
    for _ in range(128):
        hashlib.sha256(block).digest()
    return time.monotonic() - begin


def factor():
    """How many times longer than on the reference machine things take; at least 1."""
    global _measured
    if _measured is None or time.monotonic() - _measured[0] > FRESH_SECONDS:
        # The scheduler favours short work over long: the load average shows what long work has to share.
        slow = max(measure() / REFERENCE_SECONDS, os.getloadavg()[0] / (os.cpu_count() or 1))
        now = min(MOST, max(1.0, ROOM * slow))
        _measured = (time.monotonic(), max(now, _measured[1] if _measured else 1.0))
    return _measured[1]


def patient(seconds):
    """The limit of `seconds` for this machine."""
    return seconds * factor()
