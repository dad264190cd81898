"""Finds the control group of this process that limits memory."""
import pathlib

ROOT = pathlib.Path("/sys/fs/cgroup")


def memory_controllers():
    """Yields (folder, limits) of this process's control group with a memory controller, of version 2 or 1."""
    own = dict(line.split(":", 2)[1:] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines())
    yield ROOT / own.get("", "").strip("/"), ("memory.max", "memory.swap.max")
    yield ROOT / "memory" / own.get("memory", "").strip("/"), ("memory.limit_in_bytes",)
