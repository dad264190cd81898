#!/usr/bin/env python3
"""Ctrl-C during long work gives exit code 130, restores the terminal, and leaves no partial file."""
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
from moesaic_cli import run, until_interrupted
from terminal import Terminal


def write_llama(folder, layers, hidden, intermediate, pool=b"", vocab=256):
    """Writes a Llama checkpoint whose weights repeat `pool`; without it they are zeros, which need no disk space."""
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
    """Returns bf16 values of both signs around 0.02."""
    source = random.Random(1)
    return b"".join(struct.pack("<H", source.choice((0x3C00, 0xBC00)) + source.randrange(256)) for _ in range(65521))


def wait_for_a_file(folder):
    deadline = time.monotonic() + cli.limit()
    while not any(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.002)


def signalled(number, folder, *arguments):
    """Signals a command after it has started to write into `folder`, and returns its exit code."""
    process = subprocess.Popen([str(cli.BINARY), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    wait_for_a_file(folder)
    process.send_signal(number)
    _, errors = process.communicate(timeout=cli.limit())
    if process.returncode > 128:
        assert errors.strip().splitlines()[-1] == f"moesaic {arguments[0]}: interrupted", errors
    return process.returncode


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

    def test_interrupted_convert_leaves_no_file(self):
        def convert():
            terminal = Terminal("convert", self.model, "--force", "--out", self.out / "packed.moesaic")
            terminal.wait_for("packing [")
            terminal.type("\x03")
            return terminal.leave()

        until_interrupted(convert, lambda: (self.out / "packed.moesaic").unlink())
        self.assertEqual(self.names(), [])

    def test_interrupted_convert_keeps_the_old_file(self):
        packed = self.out / "packed.moesaic"

        def convert():
            packed.write_text("old")
            terminal = Terminal("convert", self.model, "--force", "--out", packed)
            terminal.wait_for("packing [")
            terminal.type("\x03")
            return terminal.leave()

        until_interrupted(convert, packed.unlink)
        self.assertEqual(self.names(), ["packed.moesaic"])
        self.assertEqual(packed.read_text(), "old")

    def test_other_terminating_signals_leave_no_file(self):
        packed = self.out / "packed.moesaic"
        for number in (signal.SIGTERM, signal.SIGHUP):
            def convert():
                return signalled(number, self.out, "convert", self.model, "--out", packed)

            until_interrupted(convert, packed.unlink, code=128 + number)
            self.assertEqual(self.names(), [])

    def test_interrupted_logits_leave_no_file(self):
        saved, ids = self.out / "saved.npy", ",".join("7" for _ in range(500))
        for number in (signal.SIGINT, signal.SIGHUP):
            def logits():
                return signalled(number, self.out, "logits", self.model, "--ids", ids, "--out", saved)

            until_interrupted(logits, saved.unlink, code=128 + number)
            self.assertEqual(self.names(), [])

    def test_next_convert_removes_the_files_of_a_killed_one(self):
        packed = self.out / "packed.moesaic"
        process = subprocess.Popen([str(cli.BINARY), "convert", str(self.model), "--out", str(packed)],
                                   stderr=subprocess.DEVNULL)
        wait_for_a_file(self.out)
        process.kill()
        process.wait()
        (left,) = self.names()
        self.assertRegex(left, r"^packed\.moesaic\..*\.partial$")
        run("convert", cli.GOLDEN / "llama-untied-f16", "--out", packed)
        self.assertEqual(self.names(), ["packed.moesaic"])

    def test_interrupted_carve_leaves_no_folder(self):
        model, calibration = self.folder / "dense", self.folder / "calibration.safetensors"
        write_llama(model, layers=24, hidden=256, intermediate=1024, pool=random_weights())
        cli.write_calibration(calibration)

        def carve():
            terminal = Terminal("carve", model, "--calibration", calibration, "--slices", "32", "--shared", "4",
                                "--active", "8", "--out", self.out / "carved")
            terminal.wait_for("layer 1 of")
            terminal.type("\x03")
            return terminal.leave()

        until_interrupted(carve, lambda: shutil.rmtree(self.out / "carved"))
        self.assertEqual(self.names(), [])


class TinyModelTest(cli.TalkingCase):
    def test_generate_is_interrupted(self):
        prompts = [part for _ in range(200) for part in ("--prompt", "Hello")]
        terminal = Terminal("generate", self.model, *prompts, "-n", "500", "--ignore-eos", "--max-sequences", "1")
        cli.wait_until_caught(terminal.process)
        terminal.type("\x03")  # while it loads or generates
        terminal.wait_for("moesaic generate: interrupted")
        self.assertEqual(terminal.leave(), 130)

    def test_generate_is_interrupted_while_it_waits_for_input(self):
        for arguments in (["--jsonl", "-"], []):
            terminal = Terminal("generate", self.model, *arguments)
            cli.wait_until_caught(terminal.process)
            terminal.type("\x03")
            terminal.wait_for("moesaic generate: interrupted")
            self.assertEqual(terminal.leave(), 130)

    def test_other_signals_end_a_chat(self):
        for number in (signal.SIGTERM, signal.SIGHUP):
            terminal = Terminal("chat", self.model)
            terminal.wait_for("> ")
            terminal.process.send_signal(number)
            terminal.wait_for("moesaic chat: interrupted")
            self.assertEqual(terminal.leave(), 128 + number)

            def ask():
                terminal = Terminal("chat", self.model, "-n", "100000", "--ignore-eos", "-p", "hi")
                cli.wait_until_caught(terminal.process)
                terminal.process.send_signal(number)
                return terminal.leave()

            until_interrupted(ask, lambda: None, code=128 + number)

    def test_hang_up_is_ignored_under_nohup(self):
        command = [str(cli.BINARY), "chat", str(self.model), "-q", "-n", "4", "--ignore-eos"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        cli.wait_until_caught(process)
        process.send_signal(signal.SIGHUP)
        answer, _ = process.communicate("hi\n", timeout=cli.limit())
        self.assertEqual(process.returncode, 0)
        self.assertTrue(answer)

    def test_bench_is_interrupted(self):
        terminal = Terminal("bench", self.model, "-p", "0", "-n", "400", "-r", "10000", "-t", "1")
        terminal.wait_for("GB/s")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)

    def test_interrupted_perplexity_leaves_no_file(self):
        text, folder = self.folder / "long.txt", self.folder / "out"
        text.write_text("to be or not to be " * 20000)
        folder.mkdir()
        saved = folder / "saved.safetensors"
        for number in (signal.SIGINT, signal.SIGTERM):
            until_interrupted(lambda: signalled(number, folder, "perplexity", self.model, text, "--save-logits", saved),
                              saved.unlink, code=128 + number)
            self.assertEqual(list(folder.iterdir()), [])


if __name__ == "__main__":
    cli.main()
