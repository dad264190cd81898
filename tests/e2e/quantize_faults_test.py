"""Calibrated runs report a fault with its place, and produce identical files once it is removed."""
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
    "static": ["--scheme", "w8a8", "--activations", "static"],
    "static-gptq": ["--scheme", "w8a8", "--method", "gptq", "--activations", "static"],
    "mix": ["--mix", "nvfp4,fp8", "--bits-per-weight", "5", "--method", "gptq", "--mix-tokens", "256"],
}
# The measurement of "long mix" lasts so long that its states are saved, which may take 5% of the time.
COMMANDS = RUNS | {"long mix": [*RUNS["mix"][:-1], "1024"]}
LINEAR = "model.layers.3.mlp.experts.7.down_proj"


def digest(folder):
    """Hashes all files but the report, which contains times."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
            if path.name != "quantize.json"}


def place_of(path, tensor):
    """Returns (first byte, bytes) of a tensor in a file."""
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
        for name in COMMANDS:
            run(*cls.command(name, cls.folder / name))
            cls.whole[name] = digest(cls.folder / name)

    @classmethod
    def command(cls, name, out):
        return ["quantize", cls.source, "-o", out, *COMMANDS[name], "--calibration", cls.text, "--calibration-tokens", "1024"]

    def check_resumes(self, name, out, resumed):
        """Repeats the command without the fault; the files must equal those of an undisturbed run."""
        self.assertEqual((out / "quantize.journal").exists(), resumed)
        self.assertFalse((out / "config.json").exists(), "no loader opens it")
        run(*self.command(name, out))
        self.assertEqual(digest(out), self.whole[name])
        run("verify", out, "--source", self.source)
        shutil.rmtree(out)

    def check(self, name, change, expected, resumed):
        """Calls `change` on the weights' file, and restores the file and its time afterwards."""
        out, kept = self.folder / "out", self.folder / "kept"
        shutil.copy2(self.weights, kept)
        times = (self.weights.stat().st_atime_ns, self.weights.stat().st_mtime_ns)
        change(self.weights)
        os.utime(self.weights, ns=times)  # like a fault of the disk
        try:
            error = run(*self.command(name, out), code=1).stderr
        finally:
            shutil.copy2(kept, self.weights)
            os.utime(self.weights, ns=times)
        for part in expected:
            self.assertIn(part, error)
        self.check_resumes(name, out, resumed)

    def test_full_disk_is_reported(self):
        for name in RUNS:
            with self.subTest(name):
                out = self.folder / "out"
                self.addCleanup(shutil.rmtree, out, ignore_errors=True)
                told = subprocess.run([BINARY, *map(str, self.command(name, out))], capture_output=True, text=True,
                                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
                self.assertEqual(told.returncode, 1, told.stderr)
                # A run that saves its measurement fails there first if the limit is smaller than the state.
                self.assertRegex(told.stderr, r"out/model\.safetensors|analysis-variants-\d+\.state")
                self.assertIn("File too large", told.stderr)
                self.check_resumes(name, out, resumed="out/model.safetensors" in told.stderr)

    def test_full_disk_during_the_measurement_is_reported(self):
        out = self.folder / "out"
        self.addCleanup(shutil.rmtree, out, ignore_errors=True)
        command = [BINARY, *map(str, self.command("long mix", out))]
        told = subprocess.run(command, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 18, 5 << 18)))
        self.assertEqual(told.returncode, 1, told.stderr)
        self.assertRegex(told.stderr, r"analysis-variants-\d+\.state: writing failed: File too large")
        self.assertTrue((out / "analysis-mix.state").exists(), "gains were measured")
        self.check_resumes("long mix", out, resumed=False)

    def test_nonfinite_weight_is_reported(self):
        def spoil(path):
            at, _ = place_of(path, LINEAR + ".weight")
            with open(path, "r+b") as file:
                file.seek(at + 2 * (3 * 64 + 5))
                file.write((0x7FC0).to_bytes(2, "little"))

        for name in RUNS:
            with self.subTest(name):
                self.check(name, spoil, [LINEAR, "nan"], resumed="gptq" == name)

    def test_truncated_shard_is_reported(self):
        for name in RUNS:
            with self.subTest(name):
                self.check(name, lambda path: os.truncate(path, path.stat().st_size - 1000), ["model.safetensors"], False)

    def test_wrong_dtype_is_reported(self):
        def rename(path):
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = data[8 : 8 + length].decode()
            at = header.index('"BF16"', header.index(f'"{LINEAR}.weight"'))
            path.write_bytes(data[:8] + (header[:at] + '"I16" ' + header[at + 6 :]).encode() + data[8 + length :])

        for name in RUNS:
            with self.subTest(name):
                self.check(name, rename, [LINEAR], False)

    def test_verify_finds_a_flipped_bit(self):
        """verify names the tensor of the output, whether it holds calibrated codes or scales."""
        for name in RUNS:
            packed = f'"{LINEAR}.weight_packed"'.encode() in (self.folder / name / "model.safetensors").read_bytes()
            for suffix in (".weight_packed" if packed else ".weight", ".weight_scale"):
                with self.subTest(name + suffix):
                    out = self.folder / "flipped"
                    shutil.copytree(self.folder / name, out)
                    path = out / "model.safetensors"
                    at, _ = place_of(path, LINEAR + suffix)
                    data = bytearray(path.read_bytes())
                    data[at + 4] ^= 1
                    path.write_bytes(data)
                    self.assertIn(LINEAR, run("verify", out, "--source", self.source, code=1).stderr)
                    shutil.rmtree(out)


if __name__ == "__main__":
    cli.main(verbosity=2)
