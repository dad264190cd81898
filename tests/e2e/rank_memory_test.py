#!/usr/bin/env python3
"""Tests the memory of ranks: a file with the parts of a layout is mapped part by part, and a model that exceeds the memory of one
process runs on two."""
import contextlib
import functools
import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

from moesaic_cli import BINARY, ROOT, free_port, limit, main, read_until, run

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests" / "support"), str(ROOT / "bench")]
import make_shapes  # noqa: E402
from control_group import memory_controllers  # noqa: E402
from processes import children, memory_bytes  # noqa: E402
from ranks_test import ended  # noqa: E402
from serving import Server, until  # noqa: E402
from terminal import Terminal  # noqa: E402

LAYERS, EXPERTS = 8, 32
PROMPT_IDS = [3 + i * 37 % 4000 for i in range(300)]  # enough rows for every expert to get some


def write_model(path, layers=LAYERS, experts=EXPERTS):
    make_shapes.SHAPES["rank-memory"] = lambda _: make_shapes.qwen3_moe(
        hidden=1024, heads=8, kv_heads=2, head=128, experts=experts, width=512, layers=layers, vocab=4096, active=4)
    make_shapes.write(path, "rank-memory", "q8_0", seed=1, context=1024)


def make_tiny(path):
    """A model of the same kind with few weights: 2 layers of 4 experts."""
    write_model(path, layers=2, experts=4)
    return path


def part_bytes(path):
    """Returns the bytes of the regions of each rank."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    parts = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            rank = int(name.partition("/")[0].removeprefix("rank"))
            parts[rank] = parts.get(rank, 0) + end - begin
    return [parts[rank] for rank in sorted(parts)]


def resident(pid, path):
    """Returns the bytes of a file's mappings that are in the memory of a process."""
    total, counts = 0, False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counts = line.endswith(str(path))
        elif counts and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total


@functools.cache
def tell(text):
    """Prints a text once."""
    print(text, flush=True)


@contextlib.contextmanager
def memory_limit(size):
    """Yields a function for a child process before it starts: it may use `size` bytes. A control group counts all memory; where
    none can be made, the limit of private writable memory counts weights that are packed or copied. The reason is printed."""
    reasons = []
    for parent, limits in memory_controllers():
        group = parent / f"moesaic-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            group.mkdir()
            if not (group / limits[0]).exists():  # a plain folder, or a group without the memory controller
                raise OSError("no memory controller")
            for name in limits:
                (group / name).write_text("0" if "swap" in name else str(size))
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror or error}")
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        finally:
            group.rmdir()
        return
    tell(f"memory is limited by RLIMIT_DATA, because no control group can be made: {'; '.join(reasons)}")
    yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (size, size))


class RankMemory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-rank-memory-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.model = cls.folder / "model.gguf"
        write_model(cls.model)

    def test_ranks_of_a_checkpoint_load_their_parts_alone(self):
        def held(model, *flags):
            """Returns the anonymous memory of each rank of a server after a request."""
            server = Server(*flags, "--threads", "1", "--kv-memory", "64M", model=model)
            self.addCleanup(server.process.kill)
            status, answer = server.json("POST", "/v1/completions", {"prompt": PROMPT_IDS[:20], "max_tokens": 2})
            self.assertEqual(status, 200, answer)
            sizes = [memory_bytes(pid, "RssAnon") for pid in (server.process.pid, *children(server.process.pid))]
            self.assertEqual(server.stop(), 0)
            return sizes

        def parts(model, layout):
            packed = self.folder / "shares.moesaic"
            run("convert", model, "--layout", layout, "--out", packed, "--force")
            return part_bytes(packed)

        tiny = make_tiny(self.folder / "tiny.gguf")
        for layout, flags in (("tp=2", ("-tp", "2")), ("pp=2", ("-pp", "2"))):
            with self.subTest(layout=layout):
                others = [size - part for size, part in zip(held(tiny, *flags), parts(tiny, layout))]  # all but weights
                for rank, (size, part) in enumerate(zip(held(self.model, *flags), parts(self.model, layout))):
                    self.assertLessEqual(size - others[rank], 1.1 * part, f"rank {rank}")
                    self.assertGreater(size, 0.9 * part, f"rank {rank}")

    def test_ranks_map_their_parts_alone(self):
        for layout, flags in (("tp=2", ("-tp", "2")), ("pp=2,layers=3+5", ("-pp", "2", "--layer-split", "3,5")),
                              ("dp=2,ep=2", ("-dp", "2", "-ep"))):
            with self.subTest(layout=layout):
                packed = self.folder / "parts.moesaic"
                run("convert", self.model, "--layout", layout, "--out", packed, "--force")
                parts = part_bytes(packed)
                server = Server(*flags, "--mmap", "on", "--threads", "1", "--kv-memory", "64M", model=packed)
                self.addCleanup(server.process.kill)
                status, answer = server.json("POST", "/v1/completions", {"prompt": PROMPT_IDS, "max_tokens": 2})
                self.assertEqual(status, 200, answer)
                for rank, pid in enumerate([server.process.pid, *children(server.process.pid)]):
                    held = resident(pid, packed)
                    self.assertLessEqual(held, 1.1 * parts[rank], f"rank {rank}")
                    self.assertGreater(held, 0.5 * parts[rank], f"rank {rank}")
                self.assertEqual(server.stop(), 0)

    def test_a_terminal_shows_the_progress_of_each_rank(self):
        terminal = Terminal("generate", self.model, "--prompt", "a", "-n", "1", "--threads", "1", "-tp", "2")
        self.addCleanup(terminal.process.kill)
        for part in ("rank 0: loading [", "rank 1: loading ["):
            terminal.wait_for(part)
        self.assertEqual(terminal.process.wait(limit()), 0)

    def loading(self):
        """Starts a server on two ranks. Returns it, the process of rank 1 and the log when the ranks have met and load the model."""
        command = [str(BINARY), "serve", str(self.model), "--port", "0", "--threads", "1", "-tp", "2"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        log = self.read_until(process, "requests get 503")
        rank, = children(process.pid)
        return process, rank, log

    def read_until(self, process, text, log=""):
        """Returns the log up to the part that contains `text`; `log` is what was read before."""
        if text not in log:
            log += read_until(process.stderr, text)
        self.assertIn(text, log, "the server ended")
        return log

    def test_a_rank_that_dies_while_others_load_is_named(self):
        process, rank, _ = self.loading()
        os.kill(rank, signal.SIGKILL)
        _, error = process.communicate(timeout=limit())
        self.assertEqual(process.returncode, 1, error)
        self.assertIn(f"rank 1 (process {rank}) was killed by signal 9", error.decode())

    def test_a_rank_that_runs_out_of_memory_is_named(self):
        """The rank gets a limit while it loads. If it has allocated its memory before, the server is ready, and the case is
        repeated."""
        for _ in range(5):
            process, rank, log = self.loading()
            size = memory_bytes(rank, "VmData") + (64 << 20)  # less than the rank's weights
            resource.prlimit(rank, resource.RLIMIT_DATA, (size, size))
            if "ready after" not in log:
                log += read_until(process.stderr, "ready after")
            if "ready after" not in log:
                break
            process.kill()
            process.wait(limit())
        self.assertEqual(process.wait(limit()), 1, log)
        self.assertRegex(log, r"rank 1: .*memory")
        self.assertIn(f"rank 1 (process {rank}) exited with code 1", log)

    def test_a_signal_ends_the_wait_for_a_rank_that_loads(self):
        """If this process gets no processor until both ranks have loaded, the server is ready and waits for none. The case is then
        repeated."""
        for _ in range(5):
            process, rank, log = self.loading()
            os.kill(rank, signal.SIGSTOP)
            log = self.read_until(process, "of weights in", log)
            log = self.read_until(process, f"rank 1 (process {rank}) was stopped by signal 19", log)
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=limit())
            until(lambda: ended(rank), limit())
            if "ready after" not in log + error.decode():
                break
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, error)

    def test_another_layout_is_refused(self):
        packed = self.folder / "two.moesaic"
        run("convert", self.model, "--layout", "tp=2", "--out", packed)
        words = ("generate", packed, "--prompt", "Once", "-n", "1")
        self.assertIn("has the parts of the layout tp=2, but this is tp=1", run(*words, code=1).stderr)
        self.assertIn("but this is tp=1,pp=2; start it with the file's layout", run(*words, "-pp", "2", code=1).stderr)
        self.assertIn("convert without dp", run("convert", self.model, "--layout", "tp=2,dp=2", "--out", self.folder / "x",
                                                code=1).stderr)

    def test_a_model_that_exceeds_the_memory_of_one_rank_runs_on_two(self):
        weights = self.model.stat().st_size
        size = weights * 17 // 20
        environment = os.environ | {"MOESAIC_JOB_SECRET": "secret", "MOESAIC_WORLD_SIZE": "2",
                                    "MOESAIC_RENDEZVOUS": "127.0.0.1:" + free_port()}

        def start(stack, rank, *flags):
            command = [str(BINARY), "generate", str(self.model), "--prompt", "a", "-n", "8", "--ignore-eos", "--temperature", "0",
                       "--threads", "1", "--max-model-len", "128", *flags]
            own = environment | {"MOESAIC_RANK": str(rank)} if flags else os.environ
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                    env=own, preexec_fn=stack.enter_context(memory_limit(size)))

        with contextlib.ExitStack() as stack:
            alone = start(stack, 0)
            output, error = alone.communicate(timeout=limit())
            self.assertNotEqual(alone.returncode, 0, f"{weights} bytes of weights fit {size} bytes: {output}")
            for flags in (("-tp", "2"), ("-pp", "2")):
                with self.subTest(layout=flags):
                    ranks = [start(stack, rank, *flags) for rank in range(2)]
                    results = [rank.communicate(timeout=limit()) for rank in ranks]
                    self.assertEqual([rank.returncode for rank in ranks], [0, 0], results)
                    self.assertTrue(results[0][0].strip())


if __name__ == "__main__":
    main()
