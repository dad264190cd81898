#!/usr/bin/env python3
"""./run refuses what it would not do, at once and in one line; nothing here installs or builds."""
import subprocess
import unittest

from moesaic_cli import ROOT


def ask(*arguments):
    return subprocess.run([str(ROOT / "run"), *arguments], capture_output=True, text=True, timeout=60)


class RunTest(unittest.TestCase):
    def test_arguments_that_a_command_would_drop_are_refused(self):
        for arguments, part in ((["check", "now"], '"now"'), (["setup", "x"], '"x"'), (["format", "src"], '"src"'),
                                (["help", "me"], '"me"'), (["fuzz", "1", "2"], '"2"'), (["fuzz", "a"], '"a"'),
                                (["bench", "--fast"], '"--fast"'), (["bench", "--quick", "x"], '"x"'),
                                (["build", "relase"], '"relase"'), (["demo", "--foo"], "--foo"),
                                (["demo", "a", "b"], "one question"), (["frobnicate"], '"frobnicate"')):
            with self.subTest(arguments=arguments):
                result = ask(*arguments)
                self.assertEqual((result.returncode, result.stdout), (2, ""))
                self.assertEqual(len(result.stderr.splitlines()), 1)
                self.assertIn(part, result.stderr)
                self.assertIn("./run help", result.stderr)

    def test_help_names_every_command(self):
        text = ask("help").stdout
        for command in ("demo", "chat", "test", "check", "fuzz", "bench", "setup", "build", "format"):
            self.assertRegex(text, rf"(?m)^  {command}\b")
        self.assertEqual(ask().stdout, text)


if __name__ == "__main__":
    unittest.main()
