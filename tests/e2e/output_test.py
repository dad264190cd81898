#!/usr/bin/env python3
"""Results that cannot be written are failures: a full disk, a closed standard output, an unwritable file."""
import os
import pathlib
import resource
import subprocess
import unittest

import moesaic_cli as cli
from moesaic_cli import BINARY, run

LOST = "cannot write to standard output: No space left on device"
SMALL_FILE = 4096  # bytes; every file that is written here is larger


def quick(*arguments, stdin="", **options):
    command = [str(BINARY), *map(str, arguments)]
    return subprocess.run(command, input=stdin, stderr=subprocess.PIPE, text=True, timeout=cli.limit(), **options)


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, SMALL_FILE))


class StandardOutputTest(cli.TalkingCase):
    def setUp(self):
        text = self.folder / "text.txt"
        text.write_text("a short text that is scored\n")
        prompt = ["-n", "4", "--ignore-eos", "--temperature", "0"]
        self.calls = [
            (["--help"], ""), (["--version"], ""), (["chat", "--help"], ""), (["completion", "fish"], ""),
            (["doctor", "--quick"], ""), (["doctor", "--quick", "--json"], ""), (["inspect", self.model, "--tensors"], ""),
            (["inspect", self.model, "--json"], ""), (["tokenize", self.model, "hello"], ""),
            (["tokenize", self.model], '{"text": "hello"}\n'), (["render", self.model], '{"messages": [{"role": "user", "content": "Hi"}]}'),
            (["generate", self.model, "--prompt", "hello", *prompt], ""),
            (["generate", self.model, "--prompt", "a", "--prompt", "b", "--format", "jsonl", *prompt], ""),
            (["chat", self.model, "-p", "hello", "-q", *prompt], ""), (["chat", self.model, "-q", *prompt], "hello\nagain\n"),
            (["perplexity", self.model, text], ""), (["perplexity", self.model, text, "--format", "json"], ""),
            (["bench", self.model, "-p", "4", "-n", "4", "-r", "1", "-t", "1", "-o", "csv"], ""),
            (["carve", "--print-recipe"], ""), (["serve", self.model, "--port", "0"], ""),
            (["serve", self.model, "--print-config"], "")]

    def test_full_disk_is_reported_with_exit_code_1(self):
        with open("/dev/full", "w") as full:
            for arguments, stdin in self.calls:
                with self.subTest(arguments=arguments):
                    result = quick(*arguments, stdin=stdin, stdout=full)
                    self.assertEqual(result.returncode, 1)
                    self.assertIn(LOST, result.stderr.splitlines()[-1])

    def test_closed_output_is_reported_and_files_are_intact(self):
        close = lambda: os.close(1)
        result = quick("inspect", self.model, preexec_fn=close)
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot write to standard output: Bad file descriptor", result.stderr)
        saved = self.folder / "closed.npy"
        quick("logits", self.model, "--ids", "7,8", "--out", saved, preexec_fn=close)
        self.assertEqual(len(cli.read_npy(saved)), 2)

    def test_unread_notices_are_not_failures(self):
        with open("/dev/full", "w") as full:
            saved = self.folder / "untold.npy"
            command = [str(BINARY), "logits", str(self.model), "--ids", "7,8", "--out", str(saved)]
            self.assertEqual(subprocess.run(command, stderr=full, timeout=cli.limit()).returncode, 0)


class FileTest(cli.TalkingCase):
    def setUp(self):
        self.out = self.folder / "out"
        self.out.mkdir(exist_ok=True)
        text = self.folder / "long.txt"
        text.write_text("to be or not to be " * 40)
        self.calls = [["logits", self.model, "--ids", "7,8,9,7,8,9,7,8,9,7,8,9,7,8,9,7,8,9", "--out", self.out / "x.npy"],
                      ["perplexity", self.model, text, "--save-logits", self.out / "x.safetensors"],
                      ["convert", self.model, "--out", self.out / "x.moesaic"]]

    def test_full_disk_leaves_no_partial_file(self):
        for arguments in self.calls:
            with self.subTest(arguments=arguments):
                result = quick(*arguments, stdout=subprocess.PIPE, preexec_fn=limit_files)
                self.assertEqual(result.returncode, 1)
                (line,) = result.stderr.splitlines()
                self.assertIn(f"{arguments[-1]}: writing failed: File too large", line)
                self.assertEqual(os.listdir(self.out), [])

    def test_carve_onto_a_full_disk_leaves_no_folder(self):
        calibration = self.folder / "calibration.safetensors"
        cli.write_calibration(calibration)
        model = cli.GOLDEN / "llama-untied-f16"
        result = quick("carve", model, "--calibration", calibration, "--slices", "8", "--shared", "2", "--active", "2",
                       "--out", self.out / "carved", stdout=subprocess.PIPE, preexec_fn=limit_files)
        self.assertEqual(result.returncode, 1)
        self.assertIn("writing failed: File too large", result.stderr)
        self.assertEqual(os.listdir(self.out), [])

    def test_save_plan_never_replaces_a_file(self):
        calibration = self.folder / "calibration.safetensors"
        cli.write_calibration(calibration)
        before = calibration.read_bytes()
        carve = ["carve", cli.GOLDEN / "llama-untied-f16", "--calibration", calibration, "--slices", "8", "--shared", "2",
                 "--active", "2", "--out", self.out / "carved"]
        self.assertIn("exists already", run(*carve, "--save-plan", calibration, code=1).stderr)
        self.assertEqual(calibration.read_bytes(), before)
        self.assertIn("needs a file name", run(*carve, "--save-plan", "", code=1).stderr)
        self.assertIn("cannot have the same name", run(*carve, "--save-plan", self.out / "carved", code=1).stderr)
        self.assertEqual(os.listdir(self.out), [])

    def test_unwritable_outputs_are_reported_before_the_work(self):
        for name, folder in (("a missing folder", self.folder / "missing"), ("a file", self.folder / "long.txt")):
            for arguments in self.calls:
                with self.subTest(name=name, arguments=arguments):
                    target = folder / pathlib.Path(arguments[-1]).name
                    fault = run(*arguments[:-1], target, code=1).stderr
                    self.assertEqual(len(fault.splitlines()), 1)
                    self.assertIn(f"{target}: can't be written", fault)

    @unittest.skipIf(os.geteuid() == 0, "root may write everywhere")
    def test_read_only_folder_is_reported(self):
        self.out.chmod(0o555)
        try:
            for arguments in self.calls:
                self.assertIn(f"{arguments[-1]}: can't be written: Permission denied", run(*arguments, code=1).stderr)
        finally:
            self.out.chmod(0o755)

    def test_devices_and_folders_are_not_replaced(self):
        for target in (self.out, pathlib.Path("/dev/null")):
            for arguments in self.calls[:2]:
                fault = run(*arguments[:-1], target, code=1).stderr
                self.assertIn(f"{target}: can't be written: it is not a regular file", fault)
        self.assertTrue(pathlib.Path("/dev/null").is_char_device())


if __name__ == "__main__":
    cli.main()
