#!/usr/bin/env python3
"""Checks that the rules of docs/contracts are short: a rule, or an item of its list, has at most three sentences.

Usage: contracts_test.py ROOT
"""
import pathlib
import re
import sys
import unittest

MAX_SENTENCES = 3
ITEM = re.compile(r"(?P<indent> *)(?:-|\d+\.) ")
NAME = re.compile(r"- \*\*(?P<letter>[A-Z]+\d+[a-z]?)\. |(?P<number>\d+)\. ")
TITLE = re.compile(r"\*\*[A-Z]+\d+[a-z]?\. ([^*]*\.\*\*)?")  # "**X1. A plain value.**", or "**B1. " of a sentence


def items(page):
    """(name of the rule, text) of each rule of a page, and of each item of a rule's list."""
    name, text = None, []
    for line in [*page.split("\n"), ""]:
        item = ITEM.match(line)
        if text and (item or not line.startswith(" ")):
            yield name, " ".join(text)
            text = []
        if item:
            if not item["indent"]:
                found = NAME.match(line)
                name = found and (found["letter"] or found["number"])
            if name:
                text = [line[item.end():]]
        elif text:
            text.append(line.strip())
        elif line and not line.startswith(" "):
            name = None


def sentences(text):
    text = re.sub(r"`[^`]*`|\([^()]*\)", "", TITLE.sub("", text, count=1))
    return max(1, len(re.findall(r"[.!?](?=\s|$)", text)))


class Counting(unittest.TestCase):
    def test_rules_and_items_of_their_lists_are_found(self):
        page = "- **A1. Name.** One. Two\n  more.\n  - An item.\n\nText.\n- No rule.\n\n2. A rule.\n   - Its item.\n"
        self.assertEqual(list(items(page)), [("A1", "**A1. Name.** One. Two more."), ("A1", "An item."),
                                             ("2", "A rule."), ("2", "Its item.")])

    def test_titles_code_and_parentheses_are_no_sentences(self):
        for text, number in (("**A1. Name.** One. Two.", 2), ("**A1. A block** is 1.5 KB. Two.", 2), ("One `a. b. c` (Two. Three).", 1),
                             ("Of several:", 1), ("One. Two? Three. Four.", 4)):
            with self.subTest(text=text):
                self.assertEqual(sentences(text), number)


class Contracts(unittest.TestCase):
    def test_rules_have_at_most_three_sentences(self):
        pages = sorted((ROOT / "docs" / "contracts").glob("*.md"))
        self.assertTrue(pages)
        for path in pages:
            for name, text in items(path.read_text()):
                with self.subTest(page=path.name, rule=name, text=text[:60]):
                    self.assertLessEqual(sentences(text), MAX_SENTENCES)


if __name__ == "__main__":
    ROOT = pathlib.Path(sys.argv.pop()).resolve() if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2]
    unittest.main()
