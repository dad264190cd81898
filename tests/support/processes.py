"""Reads processes of Linux from /proc. Uses the standard library only."""
import pathlib


def memory_bytes(pid, field):
    """Returns a field of a process's memory: RssAnon is the resident memory that no file backs, VmData the memory that RLIMIT_DATA
    limits, VmSize all mapped addresses."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"\n{field}:")[1].split()[0]) << 10


def children(pid):
    """Returns the processes that a process has started."""
    return [int(text) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
            for text in (task / "children").read_text().split()]
