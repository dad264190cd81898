#!/usr/bin/env python3
"""Tests words.py on samples, then the tree: no new uses of its words, and commit subjects in their form.

Usage: words_test.py ROOT
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import words

MAX_SUBJECT = 72


def names(file, text):
    """Names of the words that words.py finds in a file of this name and text."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / file).write_text(text)
        return sorted(name for _, name, _, _ in words.uses(pathlib.Path(folder), pathlib.Path(file)))


class Words(unittest.TestCase):
    def test_prose_of_each_language_is_checked(self):
        for file, text in (("a.h", "int a;  // Bytes behind it.\n"), ("a.cc", "/* Bytes\n * behind it. */"),
                           ("a.cc", 'Help("Bytes that are " "stored behind it");'), ("a.py", "x = 1  # Bytes behind it.\n"),
                           ("a.py", '"""Writes\nbytes behind it."""\n'), ("a.md", "Bytes behind it.\n"),
                           ("run", "cat <<'EOF'\n  bytes behind it\nEOF\n"), ("CMakeLists.txt", "# Bytes behind it.\n"),
                           ("a.rs", "/// Bytes behind it.\n"), ("a.mjs", "// Bytes behind it.\n")):
            with self.subTest(file=file, text=text):
                self.assertEqual(names(file, text), ["behind"])

    def test_code_is_not_checked(self):
        for file, text in (("a.cc", "int behind = told;"), ("a.cc", 'Send("told to stop");'), ("a.md", "`behind`\n"),
                           ("a.md", "```\nbehind\n```\n"), ("a.py", "behind = 1\n"), ("a.json", '"behind"'),
                           ("a_test.cc", 'Send("say what stands behind it");'),
                           ("a.cc", '// "stands behind"  words: quoted\n')):
            with self.subTest(file=file, text=text):
                self.assertEqual(names(file, text), [])

    def test_examples_of_the_style_guide_are_found(self):
        for text, expected in (("What kernels may ask memory for.", "What ... (noun)"),
                               ("The file of what is stored.", "of what"), ("Who is due computes at once.", "Who ... (noun)"),
                               ("A step that goes on.", "goes on"), ("It is held, row by row, against ref.", "held against"),
                               ("Chosen anew.", "anew"), ("The block is gone.", "gone"), ("All, but for one.", "but for"),
                               ("One of so many rows.", "so many"), ("The record is there.", "is there"),
                               ("Nobody writes it.", "nobody"), ("Bytes stand in the record.", "stands")):
            with self.subTest(text=text):
                self.assertIn(expected, names("a.md", text))

    def test_names_of_tests_are_checked(self):
        for file, text, expected in (
                ("a_test.cc", "TEST(Writer, GoesOnAfterAFault) {}", "goes on"),
                ("a_test.cc", "TEST_F(WriterTest,\n       ReplaysBlocksBehindIt) {}", "behind"),
                ("a_test.cc", "TYPED_TEST(Reader, RefusesWhatIsNotJson) {}", "what, who or which (test name)"),
                ("a_test.cc", "TEST_P(Reader, DecidesWhichBlocksStay) {}", "what, who or which (test name)"),
                ("a_test.py", "class A:\n    def test_asks_for_keys(self):\n        pass\n", "asked for"),
                ("a.rs", "#[test]\nfn the_file_is_gone() {}", "gone"),
                ("a_test.mjs", 'test("the page shows what the server says", async () => {', "what, who or which (test name)")):
            with self.subTest(text=text):
                self.assertEqual(names(file, text), [expected])

    def test_ordinary_names_of_tests_pass(self):
        for file, text in (("a_test.cc", "TEST(BlockPool, ReusesIdleBlocks) {}"),
                           ("a_test.cc", "TEST(Queue, NamesARankWhoseProcessEnded) {}"),
                           ("a_test.cc", "TEST(Queue, NamesTheOrderInWhichRanksEnd) {}"),
                           ("a_test.cc", "TEST(Somewhat, HasTheWholeWord) {}"), ("a.cc", "Call(GoesOn, WhatIsNot);"),
                           ("a_test.py", "def the_file_is_gone():\n    pass\n"), ("a.rs", "fn what_is_gone() {}"),
                           ("a_test.mjs", 'test("a branch is stored, which a reload shows", async () => {'),
                           ("a_test.mjs", 'send("told to stop");')):
            with self.subTest(text=text):
                self.assertEqual(names(file, text), [])

    def test_ordinary_sentences_pass(self):
        for text in ("A server behind a proxy.", "It falls behind.", "`*` stands for any line.", "What does it cost?",
                     "Who may call it?", "There is a block.", "It is not understood.", "The tests' stand-in.", "Hold the lock.", "In case of failure.",
                     "Report what is the matter." , "Standard output.", "If there are blocks, they are evicted."):
            with self.subTest(text=text):
                self.assertEqual(names("a.md", text), [])


class Tree(unittest.TestCase):
    def test_no_new_uses(self):
        found = list(words.faults(ROOT))
        if found:
            self.fail("tests/structure/words.py finds words to replace:\n" + "\n".join(found))

    def test_commit_subjects(self):
        added = subprocess.run(["git", "-C", ROOT, "log", "--diff-filter=A", "--format=%H", "--", words.COUNTS],
                               capture_output=True, text=True)
        if added.returncode != 0 or not added.stdout.strip():
            self.skipTest("no git history")
        subjects = subprocess.run(["git", "-C", ROOT, "log", "--no-merges", "--format=%s", f"{added.stdout.split()[-1]}..HEAD"],
                                  capture_output=True, text=True, check=True).stdout.splitlines()
        for subject in subjects:
            with self.subTest(subject=subject):
                self.assertLessEqual(len(subject), MAX_SUBJECT)
                self.assertRegex(subject, r"^[a-z0-9_/. -]+(, [a-z0-9_/. -]+)*: \S")


if __name__ == "__main__":
    ROOT = pathlib.Path(sys.argv.pop()).resolve() if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2]
    unittest.main()
