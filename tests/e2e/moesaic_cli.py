"""Runs the moesaic binary for end-to-end tests and reads its output. Standard library only."""
import array
import json
import math
import os
import pathlib
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", "build/release/bin/moesaic")).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from patience import patient  # noqa: E402
GOLDEN = ROOT / "tests" / "golden"
TIMEOUT = 60  # seconds on an idle machine, where most calls take under one; limit() scales it


def limit():
    """Returns the time limit of a call in seconds on this machine at its current load."""
    return patient(TIMEOUT)


CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]


def run(*arguments, stdin="", code=0):
    """Runs `moesaic ARGUMENTS`; fails unless it exits with `code`."""
    command = [str(BINARY), *map(str, arguments)]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit())
    if result.returncode != code:
        raise AssertionError(f"{command}: exit {result.returncode}, expected {code}\n{result.stdout}\n{result.stderr}")
    return result


# Environment and flags of mpirun: ranks share the cores of one machine, and the tests may run as root.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI_FLAGS = ["--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "vader,self", "--mca",
             "btl_vader_single_copy_mechanism", "none", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
needs_mpirun = unittest.skipIf(shutil.which("mpirun") is None, "mpirun is missing: install openmpi-bin")


def mpirun(*arguments, ranks=2):
    """Runs `moesaic ARGUMENTS` on ranks of mpirun and returns the finished process."""
    command = ["mpirun", "-n", str(ranks), *MPI_FLAGS, str(BINARY), *map(str, arguments)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit(),
                          env=os.environ | MPI)


def free_port():
    """Returns a free port of 127.0.0.1 as text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def wait_until_caught(process):
    """Waits until the process handles SIGINT."""
    deadline = time.monotonic() + limit()
    while time.monotonic() < deadline:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGINT - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("the process does not handle SIGINT")


def read_until(stream, text):
    """Returns what a process writes to a pipe until it contains `text` or ends. A later communicate() returns the rest."""
    output, deadline = b"", time.monotonic() + limit()
    while text.encode() not in output:
        if not select.select([stream], [], [], max(0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"{text} is not in {output.decode(errors='replace')}")
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            break
        output += part
    return output.decode(errors="replace")


def until_interrupted(attempt, undo, code=130):
    """Repeats until the signal arrives during the work, so that the speed of the machine does not matter."""
    for _ in range(20):
        found = attempt()
        if found == code:
            return
        assert found == 0, f"exit {found}, expected {code}, or 0 where all was done before the signal came"
        undo()
    raise AssertionError("20 times done before the signal came")


def read_safetensors(path):
    """Returns {name: (shape, array)} of f32 and i32 tensors."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in ("F32", "I32"):
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = array.array("f" if entry["dtype"] == "F32" else "i", data[begin:end])
        tensors[name] = (entry["shape"], values)
    return tensors


def read_npy(path):
    """Returns the rows of an f32 matrix."""
    data = pathlib.Path(path).read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00", data[:8]
    (length,) = struct.unpack("<H", data[8:10])
    assert (10 + length) % 64 == 0
    header = eval(data[10 : 10 + length], {})  # the format is a Python literal
    assert header["descr"] == "<f4" and not header["fortran_order"]
    rows, columns = header["shape"]
    values = array.array("f", data[10 + length :])
    assert len(values) == rows * columns
    return [values[r * columns : (r + 1) * columns] for r in range(rows)]


def write_calibration(path, rows=64, length=64, vocab=150):
    """Writes a calibration text for `moesaic carve` with token ids below `vocab`."""
    write_tokens(path, [i % vocab for i in range(rows * length)], rows)


def write_tokens(path, ids, rows=1):
    """Writes a calibration text of `rows` sequences of the same length."""
    tokens = array.array("i", ids).tobytes()
    header = {"tokens": {"dtype": "I32", "shape": [rows, len(ids) // rows], "data_offsets": [0, len(tokens)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tokens)


def log_softmax(row):
    top = max(row)
    total = math.log(math.fsum(math.exp(v - top) for v in row)) + top
    return [v - total for v in row]


def byte_spelling(byte):
    """Returns GPT-2's printable character for an ASCII byte."""
    return chr(byte) if 33 <= byte <= 126 else chr(256 + byte)


def add_tokenizer(folder):
    """Gives a golden checkpoint a tokenizer of single ASCII characters and a chat template."""
    characters = [10, *range(32, 127)]
    vocab = {text: i for i, text in enumerate(SPECIAL)}
    vocab.update({byte_spelling(c): len(SPECIAL) + i for i, c in enumerate(characters)})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i, text in enumerate(SPECIAL)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.8, "top_k": 40}))


class TalkingCase(unittest.TestCase):
    """Base of tests on a golden checkpoint with an added tokenizer."""

    CHECKPOINT = "deepseek-v3-noqlora"

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-e2e-"))
        cls.model = cls.folder / "model"
        shutil.copytree(GOLDEN / cls.CHECKPOINT, cls.model)
        add_tokenizer(cls.model)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)


def main(verbosity=1):
    """Runs the tests of the script; verbosity 2 shows why tests are skipped."""
    if not BINARY.exists():
        sys.exit(f"{BINARY} is not there: set MOESAIC_BINARY")
    unittest.main(verbosity=verbosity)
