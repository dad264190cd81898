"""Scales time limits of tests on a slow or busy machine. Uses the standard library only.

The limits are for an idle reference machine. patient() multiplies a limit by the larger of two factors: the time of a fixed
piece of work relative to the reference machine, and the number of processes that wait for each CPU. The factor is at least 1
and never decreases. The measured work starts a process and computes.
"""
import hashlib
import os
import subprocess
import sys
import time

# Seconds of measure() on an idle AMD EPYC 7003 (2 cores).
REFERENCE_SECONDS = 0.1
# Maximum factor, so that a test that hangs ends.
MOST = 30
# Factor for a load that rises after the measurement.
ROOM = 2
# Seconds after which a measurement is repeated.
FRESH_SECONDS = 20

_measured = None  # (when, factor)


def measure():
    """Returns the seconds that the fixed piece of work takes."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    block = bytes(1 << 20)
    for _ in range(128):
        hashlib.sha256(block).digest()
    return time.monotonic() - begin


def factor():
    """Returns the factor of this machine, at least 1."""
    global _measured
    if _measured is None or time.monotonic() - _measured[0] > FRESH_SECONDS:
        # The scheduler favors short work, so that the load average shows the delay of long work.
        slow = max(measure() / REFERENCE_SECONDS, os.getloadavg()[0] / (os.cpu_count() or 1))
        now = min(MOST, max(1.0, ROOM * slow))
        _measured = (time.monotonic(), max(now, _measured[1] if _measured else 1.0))
    return _measured[1]


def patient(seconds):
    """Returns the limit for this machine."""
    return seconds * factor()
