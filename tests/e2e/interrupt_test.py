#!/usr/bin/env python3
"""Ctrl-C in the middle of long work: exit code 130, the terminal as it was, and no file half written."""
import array
import json
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import moesaic_cli as cli
from moesaic_cli import run
from terminal import Terminal


def write_llama(folder, layers, hidden, intermediate, pool=b"", vocab=256):
    """A Llama checkpoint whose weights repeat `pool`; without one they are zeros, which take no room on disk."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
              "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": 16,
              "num_key_value_heads": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes.update({layer + "input_layernorm.weight": [hidden], layer + "post_attention_layernorm.weight": [hidden]})
        shapes.update({layer + f"self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"})
        shapes.update({layer + f"mlp.{name}_proj.weight": [intermediate, hidden] for name in ("gate", "up")})
        shapes[layer + "mlp.down_proj.weight"] = [hidden, intermediate]
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if pool:
            file.write((pool * (offset // len(pool) + 1))[:offset])
        file.truncate(8 + len(text) + offset)


def random_weights():
    """bf16 values of either sign around 0.02."""
    source = random.Random(1)
    return b"".join(struct.pack("<H", source.choice((0x3C00, 0xBC00)) + source.randrange(256)) for _ in range(65521))


def wait_until_caught(process):
    """Waits until the process handles SIGINT."""
    deadline = time.monotonic() + cli.TIMEOUT
    while time.monotonic() < deadline:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGINT - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("the process does not handle SIGINT")


def write_calibration(path, rows=64, length=64):
    tokens = array.array("i", [i % 200 for i in range(rows * length)]).tobytes()
    header = {"tokens": {"dtype": "I32", "shape": [rows, length], "data_offsets": [0, len(tokens)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tokens)


class BigModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-e2e-"))
        cls.model = cls.folder / "model"
        write_llama(cls.model, layers=16, hidden=1024, intermediate=4096)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def setUp(self):
        self.out = self.folder / "out"
        self.out.mkdir()

    def tearDown(self):
        shutil.rmtree(self.out)

    def names(self):
        return sorted(path.name for path in self.out.iterdir())

    def test_convert_leaves_no_file(self):
        terminal = Terminal("convert", self.model, "--out", self.out / "packed.moesaic")
        terminal.wait_for("packing [")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)
        self.assertEqual(self.names(), [])

    def test_convert_keeps_the_file_it_would_replace(self):
        packed = self.out / "packed.moesaic"
        packed.write_text("old")
        terminal = Terminal("convert", self.model, "--force", "--out", packed)
        terminal.wait_for("packing [")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)
        self.assertEqual(self.names(), ["packed.moesaic"])
        self.assertEqual(packed.read_text(), "old")

    def test_what_a_killed_convert_left_goes_with_the_next(self):
        packed = self.out / "packed.moesaic"
        process = subprocess.Popen([str(cli.BINARY), "convert", str(self.model), "--out", str(packed)],
                                   stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + cli.TIMEOUT
        while not self.names() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.wait()
        (left,) = self.names()
        self.assertRegex(left, r"^packed\.moesaic\..*\.partial$")
        run("convert", cli.GOLDEN / "llama-untied-f16", "--out", packed)
        self.assertEqual(self.names(), ["packed.moesaic"])

    def test_carve_leaves_no_folder(self):
        model, calibration = self.folder / "dense", self.folder / "calibration.safetensors"
        write_llama(model, layers=24, hidden=256, intermediate=1024, pool=random_weights())
        write_calibration(calibration)
        terminal = Terminal("carve", model, "--calibration", calibration, "--slices", "32", "--shared", "4",
                            "--active", "8", "--out", self.out / "carved")
        terminal.wait_for("layer 1 of")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)
        self.assertEqual(self.names(), [])


class TinyModelTest(cli.TalkingCase):
    def test_generate(self):
        prompts = [part for _ in range(200) for part in ("--prompt", "Hello")]
        terminal = Terminal("generate", self.model, *prompts, "-n", "500", "--ignore-eos", "--max-sequences", "1")
        wait_until_caught(terminal.process)
        time.sleep(0.2)  # now it is loading or generating: both stop
        terminal.type("\x03")
        terminal.wait_for("moesaic generate: interrupted")
        self.assertEqual(terminal.leave(), 130)

    def test_generate_waiting_for_its_input(self):
        terminal = Terminal("generate", self.model, "--jsonl", "-")
        wait_until_caught(terminal.process)
        time.sleep(0.2)
        terminal.type("\x03")
        terminal.wait_for("moesaic generate: interrupted")
        self.assertEqual(terminal.leave(), 130)

    def test_bench(self):
        terminal = Terminal("bench", self.model, "-p", "0", "-n", "400", "-r", "10000", "-t", "1")
        terminal.wait_for("GB/s")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)

    def test_perplexity_leaves_no_file(self):
        text, saved = self.folder / "long.txt", self.folder / "out" / "saved.safetensors"
        text.write_text("to be or not to be " * 20000)
        saved.parent.mkdir()
        process = subprocess.Popen([str(cli.BINARY), "perplexity", str(self.model), str(text), "--save-logits", str(saved)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + cli.TIMEOUT
        while not any(saved.parent.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=cli.TIMEOUT)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(errors.strip(), "moesaic perplexity: interrupted")
        self.assertEqual(list(saved.parent.iterdir()), [])

    def test_logits_leave_no_file(self):
        saved = self.folder / "logits" / "saved.npy"
        saved.parent.mkdir()
        ids = ",".join("7" for _ in range(4000))
        process = subprocess.Popen([str(cli.BINARY), "logits", str(self.model), "--ids", ids, "--threads", "1", "--out", str(saved)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + cli.TIMEOUT
        while not any(saved.parent.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=cli.TIMEOUT)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(list(saved.parent.iterdir()), [])


if __name__ == "__main__":
    cli.main()
