#!/usr/bin/env python3
"""Runs the commands of all ```console blocks of README.md and docs/, and compares the form of their output with the
documents. Numbers, identifiers, sizes, times and names of instruction sets may differ; all else is the same. Commands in
other blocks are refused.

Usage: commands_test.py [DOCUMENT ...]. The binary is MOESAIC_BINARY.
"""
import gzip
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest

import console_blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from moesaic_cli import BINARY, free_port, patient, write_calibration  # noqa: E402
from find_program import find_program  # noqa: E402

TINY, RECALL = ROOT / "models" / "moesaic-tiny", ROOT / "models" / "moesaic-recall"
DENSE = ROOT / "models" / "moesaic-smol" / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf"
COMMAND_SECONDS = 300
START_SECONDS = 120
# The module of nginx that `moesaic proxy` loads.
PROXY_MODULE = BINARY.parent / "ngx_http_moesaic_module.so"

# Commands that a test cannot run, by how they begin, and the reason. Each is still in the documents.
NOT_RUN = {
    "git clone <": "the address is the reader's",
    "./run build": "compiles",
    "sudo ": "installs files; packaging_install tests the installation and the package",
    "cpack ": "installs files; packaging_install tests the package",
    "moesaic serve /srv/models/model --print-config": "writes to /etc; app_test tests the printed settings",
    "./run demo": "installs packages and compiles; e2e_run tests the script, e2e_shipped the model and its answers",
    "./run bench": "measures for up to an hour on an idle machine; docs_pages tests that the commands of its suites exist",
    "LLAMA_CPP=FOLDER IK_LLAMA_CPP=FOLDER": "needs builds of the peers",
    "bench/performance.py --add": "stores a run in bench/results; docs_pages tests the script",
    "moesaic serve model/ --host 0.0.0.0 --port 8443": "needs a certificate and listens on all addresses; server_tls tests it",
    "lease=$(etcdctl lease grant": "needs a cluster of etcd; proxy_discovery tests leases",
    "etcdctl": "needs a cluster of etcd; proxy_discovery tests keys and leases",
    "mpirun -n 32": "the program is the reader's; comm_interposer and comm_mpi4py run programs with the library",
    "mpirun -n 2": "needs mpi4py, which comm_mpi4py installs",
    "tests/comm/osu_validation.sh": "needs the sources of the benchmarks; comm_osu fetches them and runs it",
    "mpirun --hostfile": "starts ranks on other machines; e2e_ranks starts two on this one with the same file",
    "sbatch": "needs a Slurm cluster; e2e_ranks runs the script with two ranks",
    "moesaic tune": "measures for a minute; e2e_text_verbs runs it with one thread",
}
# Text of a command and its replacement in a test: paths outside the sandbox, sizes of a large machine, and long inputs.
EDITS = (
    ("/var/cache/moesaic", "kv-cache"),
    ("200GiB", "64MiB"),
    ("8GiB", "64MiB"),
    ("-d 0,4096", "-d 0,2048"),  # moesaic-tiny has a context of 4096
    ("-d 16000", "-d 2000"),
    ("-c 2048 --max-tokens 2048", "-c 1024 --max-tokens 1024"),
    ("http://10.0.0.1:8000", "http://127.0.0.1:1"),  # a port without an engine
    ("http://10.0.0.2:8000", "http://127.0.0.1:2"),
)
# Blocks of other languages that hold no commands, and the blocks of Python: the test that runs those of a document.
DATA_BLOCKS = {"cpp", "json", "nginx"}
PYTHON_BLOCKS = {"docs/server.md": "tests/server/clients_test.py", "docs/science.md": "python/tests/test_documents.py"}
LONG_CONTEXT = ROOT / "docs" / "long-context.md"  # model/ is moesaic-recall there, else moesaic-tiny


class Sandbox:
    """A folder with everything that the commands of a document name."""

    def __init__(self, document):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-docs-"))
        self.servers = {}  # port in the document -> (process, port)
        self.link("models", ROOT / "models")
        self.link("topologies", ROOT / "topologies")
        self.link("examples", ROOT / "examples")
        self.link("model", RECALL if document == LONG_CONTEXT else TINY)
        self.link("dense.gguf", ROOT / "tests" / "golden" / "llama-untied-f16")
        if DENSE.exists():
            self.link("model.gguf", DENSE)
            self.link(DENSE.name, DENSE)
        text = (ROOT / "models" / "moesaic-smol" / "heldout_chat.txt").read_text()
        for name in ("wiki.txt", "heldout.txt", "wikitext-2_valid.txt"):
            (self.folder / name).write_text(text[:24000])
        for name in ("book.txt", "text.txt"):
            (self.folder / name).write_text(text[:6000])
        lines = (TINY / "heldout.jsonl").read_text().splitlines()
        (self.folder / "text.jsonl").write_text("".join(line + "\n" for line in lines))
        write_calibration(self.folder / "chats.safetensors", vocab=90)
        (self.folder / "DeepSeek-V3").mkdir()
        (self.folder / "DeepSeek-V3" / "config.json").write_text(json.dumps(DEEPSEEK_V3))
        # Loads of the experts of models/moesaic-tiny, as a server records them.
        (self.folder / "load.json").write_text(json.dumps({"logical_count": [[5 + 3 * e for e in range(16)]] * 3}))
        self.write_traces()
        self.port = free_port()  # where the ranks of a job meet
        self.rank0 = None
        (self.folder / "bin").mkdir()
        self.link("bin/moesaic", BINARY)
        self.environment = {**os.environ, "HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache"),
                            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def link(self, name, target):
        (self.folder / name).symlink_to(target)

    def write_traces(self):
        """Small traces with the names and formats of the published ones."""
        rows = [{"timestamp": 90 * i, "input_length": 1024 + 512 * (i % 3), "output_length": 8 + i % 5,
                 "hash_ids": [0, 1, *range(10 * i + 2, 10 * i + 2 + i % 3)]} for i in range(100)]
        with gzip.open(self.folder / "mooncake_synthetic_trace.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with gzip.open(self.folder / "AzureLLMInferenceTrace_code.csv.gz", "wt") as file:
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
            file.writelines(f"2023-11-16 18:17:{i // 10:02}.{i % 10}799600,{1000 + 13 * i},{5 + i % 7}\n" for i in range(100))
        with tarfile.open(self.folder / "swe-agent_demonstrations.tar.gz", "w:gz") as archive:
            for name in ("a", "b"):
                history = [{"role": "system", "content": "You fix bugs. " * 50}]
                for turn in range(8):
                    history += [{"role": "user", "content": f"{name}{turn} " * 80}, {"role": "assistant", "content": "ls -la " * 9}]
                content = json.dumps({"history": history}).encode()
                member = tarfile.TarInfo(f"trajectories/{name}.traj")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    def close(self):
        if self.rank0 is not None:
            self.rank0.kill()
            self.rank0.communicate()
        for port in list(self.servers):
            self.stop(port)
        shutil.rmtree(self.folder)

    def stop(self, port):
        process, _ = self.servers.pop(port)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=patient(COMMAND_SECONDS))
        if process.stdout:
            process.stdout.close()

    def edited(self, text):
        for old, new in EDITS:
            text = text.replace(old, new)
        text = text.replace("node0:7777", f"127.0.0.1:{self.port}")
        for documented, (_, port) in self.servers.items():
            text = text.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}").replace(
                f"localhost:{documented}", f"localhost:{port}")
        return text

    def run(self, text):
        """(exit status, lines of stdout and stderr)."""
        for output in re.findall(r"(?:-o|--out) (\S+)", text):  # of an earlier command of the document
            path = self.folder / output
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        started = {"cwd": self.folder, "env": self.environment, "text": True, "stdin": subprocess.DEVNULL,
                   "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", "-c", self.edited(text)]
        if text.startswith("export "):  # for the commands that follow
            printed = subprocess.run(["bash", "-c", self.edited(text) + "; env -0"], **started, check=True).stdout
            self.environment = dict(line.split("=", 1) for line in printed.split("\0") if line)
            return 0, []
        if text.startswith("MOESAIC_RANK=0 "):  # ends after the other ranks have started
            self.rank0 = subprocess.Popen(command, **started)
            return 0, []
        result = subprocess.run(command, **started, timeout=patient(COMMAND_SECONDS))
        code, lines = result.returncode, result.stdout.splitlines()
        if text.startswith("MOESAIC_RANK="):
            output, _ = self.rank0.communicate(timeout=patient(COMMAND_SECONDS))
            code, lines = code or self.rank0.returncode, [*output.splitlines(), *lines]
            self.rank0 = None
        return code, lines

    def proxy(self, text):
        """Starts a proxy on a free port; returns the line with its address."""
        documented, port = re.search(r"--port (\d+)", text)[1], free_port()
        log = self.folder / "proxy.log"
        with log.open("w") as errors:
            command = "exec " + self.edited(text).replace(f"--port {documented}", f"--port {port}")
            process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment,
                                       stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        self.servers[documented] = (process, port)
        self.wait_until_ready(port, process, log, "/moesaic/state")
        return [line for line in log.read_text().splitlines() if line.startswith("moesaic proxy: ")]

    def serve(self, text):
        """Starts a server in place of an earlier one on its documented port; returns the lines of stdout until then."""
        found = re.search(r"--port (\d+)", text)
        documented = found[1] if found else "8000"
        if documented in self.servers:
            self.stop(documented)
        text = re.sub(r"\s*&\s*$", "", re.sub(r"\s#.*", "", text))
        text = text.replace(found[0], "--port 0") if found else text + " --port 0"
        log = self.folder / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(["bash", "-c", "exec " + self.edited(text)], cwd=self.folder,
                                       env=self.environment, text=True, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=errors)
        watchdog = threading.Timer(patient(START_SECONDS), process.kill)
        watchdog.start()
        line = process.stdout.readline().rstrip("\n")
        watchdog.cancel()
        address = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)", line)
        if not address:
            process.kill()
            process.wait()
            process.stdout.close()
            raise AssertionError(f"no address from the server: {line!r}\n{log.read_text()}")
        self.servers[documented] = (process, address[1])
        self.wait_until_ready(address[1], process, log)
        return [line]

    def wait_until_ready(self, port, process, log, path="/ready"):
        ready = ["curl", "-sf", "-o", os.devnull, "--retry", "600", "--retry-delay", "1", "--retry-all-errors",
                 f"http://127.0.0.1:{port}{path}"]
        if subprocess.run(ready, timeout=patient(COMMAND_SECONDS)).returncode != 0 or process.poll() is not None:
            raise AssertionError(f"the server is not ready\n{log.read_text()}")


# The published config.json, without the fields that only its own Python code reads.
DEEPSEEK_V3 = json.loads((ROOT / "tests/support/deepseek_v3_config.json").read_text())


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def reason_not_run(text):
    return next((reason for start, reason in NOT_RUN.items() if text.startswith(start)), None)


class Commands(unittest.TestCase):
    maxDiff = None

    def test_commands_print_the_output_of_the_documents(self):
        only = {str(pathlib.Path(name).resolve()) for name in ARGUMENTS}
        for path in documents():
            if only and str(path) not in only:
                continue
            commands = console_blocks.commands_of(path.read_text(), str(path.relative_to(ROOT)))
            runnable = [command for command in commands if not reason_not_run(command.text)]
            if not runnable:
                continue
            sandbox = Sandbox(path)
            try:
                for command in runnable:
                    start = time.monotonic()
                    with self.subTest(command=str(command)):
                        self.check(sandbox, command)
                    print(f"{time.monotonic() - start:6.1f} s  {command}", flush=True)
            finally:
                sandbox.close()

    def check(self, sandbox, command):
        if re.search(r"\S+\.gguf", command.text) and "dense.gguf" not in command.text and not DENSE.exists():
            self.skipTest("moesaic-smol is not made: ./run test makes it")
        if command.text.startswith("moesaic proxy --") and not (find_program("nginx") and PROXY_MODULE.exists()):
            self.skipTest("nginx or its module is missing: install nginx and nginx-dev")
        if command.text.startswith("moesaic serve "):
            lines, code = sandbox.serve(command.text), 0
        elif command.text.startswith("moesaic proxy --"):
            lines, code = sandbox.proxy(command.text), 0
        else:
            code, lines = sandbox.run(command.text)
        printed = "\n".join(lines)
        if "this build has no UCX" in printed:
            self.skipTest("the binary was built without UCX")
        self.assertEqual(code, 0, f"{command}\nprinted:\n{printed}")
        if command.expected:
            found = console_blocks.mismatch(command.expected, lines)
            self.assertIsNone(found, f"{command}\n  {found}")

    def test_every_exception_is_in_a_document(self):
        commands = [c.text for path in documents()
                    for c in console_blocks.commands_of(path.read_text(), str(path.relative_to(ROOT)))]
        for start in NOT_RUN:
            self.assertTrue(any(text.startswith(start) for text in commands), f"no document has \"$ {start}\"")


    def test_commands_are_in_console_blocks(self):
        for path in documents():
            name = str(path.relative_to(ROOT))
            found = console_blocks.hidden_commands(path.read_text(), name, DATA_BLOCKS, name in PYTHON_BLOCKS)
            self.assertEqual(found, [], "write ```console blocks, whose commands begin with \"$ \"")

    def test_blocks_of_python_are_run(self):
        for document, test in PYTHON_BLOCKS.items():
            self.assertTrue("```python\n" in (ROOT / document).read_text(), f"{document} has no block of Python")
            name = pathlib.Path(document).name
            self.assertTrue(f'"{name}"' in (ROOT / test).read_text(), f"{test} must run the blocks of {document}")


class Forms(unittest.TestCase):
    def test_values_may_differ_and_words_may_not(self):
        shown = ["parameters    4.42M", "", "stored as  tensors   bytes", "BF16   265  12.13 MiB", "F32   4  256 B"]
        self.assertIsNone(console_blocks.mismatch(shown, [
            "parameters  5.1M", "stored as  tensors  bytes", "BF16  1  1 KiB", "F32  40  2 B"]))
        self.assertIsNotNone(console_blocks.mismatch(shown, [
            "weights  5.1M", "stored as  tensors  bytes", "BF16  1  1 KiB", "F32  40  2 B"]))
        self.assertIsNotNone(console_blocks.mismatch(shown, shown[:-1]))
        self.assertIsNotNone(console_blocks.mismatch(shown[:-1], shown))

    def test_dots_stand_for_any_lines(self):
        self.assertIsNone(console_blocks.mismatch(["a 1", "..."], ["a 2", "b", "c"]))
        self.assertIsNone(console_blocks.mismatch(["a 1", "...", "c"], ["a 2", "b", "c"]))
        self.assertIsNotNone(console_blocks.mismatch(["a 1", "...", "d"], ["a 2", "b", "c"]))

    def test_json_is_compared_by_keys_and_types(self):
        self.assertIsNone(console_blocks.mismatch(['{"id":"a-1","n":[1,2]}'], ['{"id":"b-77","n":[3]}']))
        self.assertIsNotNone(console_blocks.mismatch(['{"id":"a-1","n":[1]}'], ['{"id":"b-77","n":1}']))
        self.assertIsNotNone(console_blocks.mismatch(['{"id":"a-1"}'], ['{"id":"b-77","n":1}']))

    def test_commands_outside_of_console_blocks_are_found(self):
        for block in ("```sh\nls\n```", "```bash\nls\n```", "  ```shell\n  ls\n  ```", "~~~sh\nls\n~~~", "```\n$ ls\n```",
                      "```\n./run test\n```", "```\nmoesaic tune\n```", "```python\nimport x\n```", "```\nA=1 moesaic tune\n```"):
            with self.subTest(block=block):
                self.assertEqual(len(console_blocks.hidden_commands(f"a\n\n{block}\n", "x.md", {"json"}, False)), 1)
        for block in ("```console\n$ ls\n```", "```json\n{}\n```", "```\nnodes.json: must be a number\n```", "`moesaic tune`",
                      "```\na\n```\ntext\n```\nb\n```"):
            with self.subTest(block=block):
                self.assertEqual(console_blocks.hidden_commands(block, "x.md", {"json"}, False), [])
        self.assertEqual(console_blocks.hidden_commands("```python\nx\n```", "x.md", {"json"}, True), [])

    def test_a_command_continues_until_its_quotes_are_closed(self):
        text = "```console\n$ curl -d '{\n  \"a\": 1}' \\\n  -s\n{}\n$ moesaic  # it's a comment\n```\n"
        commands = console_blocks.commands_of(text, "x.md")
        self.assertEqual([(c.line, c.text, c.expected) for c in commands], [
            (2, "curl -d '{\n  \"a\": 1}' \\\n  -s", ["{}"]), (6, "moesaic  # it's a comment", [])])


if __name__ == "__main__":
    ARGUMENTS = sys.argv[1:]
    if not BINARY.exists():
        sys.exit(f"{BINARY} is not there: set MOESAIC_BINARY")
    unittest.main(argv=sys.argv[:1], verbosity=2)  # shows why tests are skipped
