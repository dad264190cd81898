#!/usr/bin/env python3
"""Checks the tree: which room may include which, lengths and names of files, names of limits, ranges
that Clang 14 compiles, and that every test is run.

Usage: structure_test.py ROOT. Prints one line a fault; exit status 1 when there is any.
"""
import pathlib
import re
import subprocess
import sys

# room -> rooms it may include directly. Rooms that those may include are allowed as well: data flows one way through them.
ROOMS = {
    "base": [],
    "runtime": ["base"],
    "tensor": ["base", "runtime"],
    "kernels": ["tensor"],
    "comm": ["tensor"],
    "checkpoint": ["tensor"],
    "text": ["base"],
    "layers": ["kernels", "parallel"],
    "models": ["layers"],
    "prefix": ["base"],
    "cache": ["tensor", "prefix"],
    "parallel": ["comm", "checkpoint"],
    "engine": ["models", "cache", "text"],
    "server": ["engine"],
    "quantizer": ["models", "checkpoint", "planner"],
    "carve": ["quantizer"],
    "planner": ["parallel", "checkpoint"],
    "proxy": ["base", "text", "prefix"],
    "science": ["kernels"],
    "agent": ["server"],
    "app": ["server", "engine", "quantizer", "carve", "planner", "proxy", "science", "agent"],
}
REASON_LINES = 1000  # longer than this needs a reason in the first comment ("Long because ...")
STOP_LINES = 1500
SOURCE = {".h", ".cc", ".cu", ".cuh", ".c", ".rs", ".py", ".mjs"}
FORBIDDEN_NAMES = re.compile(r"(utils?|helpers?|common|manager)(_|\.|$)", re.IGNORECASE)
TEST = re.compile(r"(\w+)_test\.(cc|mjs|py)")
TIER = re.compile(r"cache/(swap|warm|disk)_\w+\.h")  # the engine knows tiers by cache/kv_tier.h only
LIMIT = re.compile(r"\bk(Most|Least)\w*")  # limits are named kMax and kMin
# Clang 14 of Debian 12, which builds the fuzzers, can't compile views and subranges of libstdc++ 12.
VIEW = re.compile(r"std::(?:views::\w+|ranges::(?:views|subrange|(?:stable_)?partition|unique|remove(?:_if)?|rotate|search(?:_n)?|find_end|equal_range|\w+_view)\b)")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def closure(room):
    allowed, queue = {room}, list(ROOMS[room])
    while queue:
        name = queue.pop()
        if name not in allowed:
            allowed.add(name)
            queue += ROOMS[name]
    return allowed


def include_faults(root, path):
    room = path.relative_to(root / "src").parts[0]
    if room not in ROOMS:
        yield f"{path.relative_to(root)}: src/{room} is no room of the architecture"
        return
    allowed = closure(room)
    for target in INCLUDE.findall(path.read_text(errors="replace")):
        first = target.split("/")[0]
        if first in ROOMS and first not in allowed:
            yield f"{path.relative_to(root)}: {room} may not include {target}"
        if room == "engine" and TIER.fullmatch(target) and not path.stem.endswith("_test"):
            yield f"{path.relative_to(root)}: the engine uses tiers through cache/kv_tier.h, not {target}"
        if "/" not in target:
            yield f"{path.relative_to(root)}: include {target} by its path from src/"


def size_faults(root, path):
    text = path.read_text(errors="replace")
    lines = text.count("\n")
    name = path.relative_to(root)
    if lines > STOP_LINES:
        yield f"{name}: {lines} lines, more than {STOP_LINES}"
    elif lines > REASON_LINES and "Long because" not in text[:1000]:
        yield f'{name}: {lines} lines without a reason ("Long because ...") in its first comment'
    if FORBIDDEN_NAMES.search(path.stem):
        yield f"{name}: name the job instead of '{path.stem}'"


def limit_faults(root, path):
    for name in sorted({match[0] for match in LIMIT.finditer(path.read_text(errors="replace"))}):
        yield f"{path.relative_to(root)}: {name}: begin the names of limits with kMax or kMin"


def view_faults(root, path):
    for name in sorted({match[0] for match in VIEW.finditer(path.read_text(errors="replace"))}):
        yield f"{path.relative_to(root)}: {name}: Clang 14 can't compile it; use the algorithm of std with iterators, or a loop"


def unrun_faults(root, path):
    """A test that no CMakeLists.txt names, by its file or, of scripts, without the "_test.py", is never run."""
    test = TEST.fullmatch(path.name)
    if not test:
        return
    lists = next(folder / "CMakeLists.txt" for folder in path.parents if (folder / "CMakeLists.txt").is_file())
    names = re.escape(path.name) + (rf"|{test[1]}" if test[2] == "py" else "")
    if not re.search(rf"(?<![\w.])({names})(?![\w.])", lists.read_text()):
        yield f"{path.relative_to(root)}: {lists.relative_to(root)} does not name it, so it is never run"


def cycle_faults(root):
    for room in ROOMS:
        for allowed in ROOMS[room]:
            if room in closure(allowed):
                yield f"the table itself has a cycle between {room} and {allowed}"


def tracked(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0:
        return [root / line for line in listed.stdout.splitlines()]
    return [p for p in root.rglob("*") if p.is_file() and "build" not in p.parts]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    faults = list(cycle_faults(root))
    for path in tracked(root):
        if path.suffix not in SOURCE or not path.is_file():
            continue
        faults += size_faults(root, path)
        faults += unrun_faults(root, path)
        if (root / "src") in path.parents and path.suffix in {".h", ".cc", ".cu", ".cuh", ".c"}:
            faults += include_faults(root, path)
            faults += limit_faults(root, path)
            faults += view_faults(root, path)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
