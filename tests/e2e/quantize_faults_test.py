"""Calibrated runs that meet a fault: they say what is wrong and where, and go on to the very same files without it."""
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

import moesaic_cli as cli
from moesaic_cli import BINARY, ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(TINY))
import generate  # noqa: E402  what the model was trained on

RUNS = {
    "gptq": ["--scheme", "w4a16", "--method", "gptq"],
    "static": ["--scheme", "w8a8", "--activations", "static", "--smoothing", "on"],
    "static-gptq": ["--scheme", "w8a8", "--method", "gptq", "--activations", "static", "--smoothing", "on"],
    "mix": ["--mix", "nvfp4,fp8", "--bits-per-weight", "5", "--method", "gptq", "--mix-tokens", "256"],
}
LINEAR = "model.layers.3.mlp.experts.7.down_proj"


def digest(folder):
    """Of all but the report, which has times in it."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
            if path.name != "quantize.json"}


def place_of(path, tensor):
    """(first byte, bytes) of a tensor in a file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[tensor]["data_offsets"]
    return 8 + length + begin, end - begin


class FaultsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        sampler = generate.Sampler(random.Random("faults"))
        texts = ("".join(text for text, _ in generate.segments(**sampler.conversation(512, generate.LAST)))
                 for _ in range(20))
        cls.text = cls.folder / "text.jsonl"
        cls.text.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        cls.source = cls.folder / "source"
        cls.source.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            shutil.copy2(TINY / name, cls.source)
        cls.weights = cls.source / "model.safetensors"
        cls.whole = {}
        for name in RUNS:
            run(*cls.command(name, cls.folder / name))
            cls.whole[name] = digest(cls.folder / name)

    @classmethod
    def command(cls, name, out):
        return ["quantize", cls.source, "-o", out, *RUNS[name], "--calibration", cls.text, "--calibration-tokens", "1024",
                "--shard-size", "2M"]

    def goes_on(self, name, out, resumed):
        """The same command, the cause gone, ends in the files of a run that nothing happened to."""
        self.assertEqual((out / "quantize.journal").exists(), resumed)
        self.assertFalse((out / "config.json").exists(), "nothing takes it for a model")
        run(*self.command(name, out))
        self.assertEqual(digest(out), self.whole[name])
        run("verify", out, "--source", self.source)
        shutil.rmtree(out)

    def check(self, name, change, expected, resumed):
        """`change` gets the weights' file, which comes back as it was, with its time, afterwards."""
        out, kept = self.folder / "out", self.folder / "kept"
        shutil.copy2(self.weights, kept)
        times = (self.weights.stat().st_atime_ns, self.weights.stat().st_mtime_ns)
        change(self.weights)
        os.utime(self.weights, ns=times)  # as a fault of the disk would leave it
        try:
            error = run(*self.command(name, out), code=1).stderr
        finally:
            shutil.copy2(kept, self.weights)
            os.utime(self.weights, ns=times)
        for part in expected:
            self.assertIn(part, error)
        self.goes_on(name, out, resumed)

    def test_a_full_disk(self):
        for name in RUNS:
            with self.subTest(name):
                out = self.folder / "out"
                told = subprocess.run([BINARY, *map(str, self.command(name, out))], capture_output=True, text=True,
                                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
                self.assertEqual(told.returncode, 1, told.stderr)
                self.assertIn("model-0000", told.stderr)
                self.assertIn("File too large", told.stderr)
                self.goes_on(name, out, resumed=True)

    def test_a_full_disk_while_a_mix_is_measured(self):
        out = self.folder / "out"
        command = [BINARY, *map(str, self.command("mix", out))]
        told = subprocess.run(command, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 18, 5 << 18)))
        self.assertEqual(told.returncode, 1, told.stderr)
        self.assertRegex(told.stderr, r"analysis-variants-\d+\.state: writing failed: File too large")
        self.assertTrue((out / "analysis-mix.state").exists(), "gains were measured")
        self.goes_on("mix", out, resumed=False)

    def test_a_weight_that_is_no_number(self):
        def spoil(path):
            at, _ = place_of(path, LINEAR + ".weight")
            with open(path, "r+b") as file:
                file.seek(at + 2 * (3 * 64 + 5))
                file.write((0x7FC0).to_bytes(2, "little"))

        for name in RUNS:
            with self.subTest(name):
                self.check(name, spoil, [LINEAR, "nan"], resumed="gptq" == name)

    def test_a_shard_that_is_cut_short(self):
        for name in RUNS:
            with self.subTest(name):
                self.check(name, lambda path: os.truncate(path, path.stat().st_size - 1000), ["model.safetensors"], False)

    def test_a_wrong_type(self):
        def rename(path):
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = data[8 : 8 + length].decode()
            at = header.index('"BF16"', header.index(f'"{LINEAR}.weight"'))
            path.write_bytes(data[:8] + (header[:at] + '"I16" ' + header[at + 6 :]).encode() + data[8 + length :])

        for name in RUNS:
            with self.subTest(name):
                self.check(name, rename, [LINEAR], False)

    def test_a_flipped_bit(self):
        """In a file of the output: verify names the tensor, be it codes, which calibration decided, or a scale."""
        for name in RUNS:
            index = json.loads((self.folder / name / "model.safetensors.index.json").read_text())["weight_map"]
            for suffix in (".weight_packed" if LINEAR + ".weight_packed" in index else ".weight", ".weight_scale"):
                with self.subTest(name + suffix):
                    out = self.folder / "flipped"
                    shutil.copytree(self.folder / name, out)
                    path = out / index[LINEAR + suffix]
                    at, _ = place_of(path, LINEAR + suffix)
                    data = bytearray(path.read_bytes())
                    data[at + 4] ^= 1
                    path.write_bytes(data)
                    self.assertIn(LINEAR, run("verify", out, "--source", self.source, code=1).stderr)
                    shutil.rmtree(out)


if __name__ == "__main__":
    cli.main(verbosity=2)
