#!/usr/bin/env python3
"""Checks the Markdown pages: links lead somewhere, docs/performance.md matches bench/results, suites are complete."""
import csv
import json
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PERFORMANCE = ROOT / "bench" / "performance.py"
MAX_LINES = 150
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def pages():
    folders = [ROOT / "docs", ROOT / "models", ROOT / "tests", ROOT / "src", ROOT / "deploy", ROOT / "bench"]
    found = [path for folder in folders for path in folder.rglob("*.md")]
    return sorted(path for path in [*ROOT.glob("*.md"), *found] if "build" not in path.relative_to(ROOT).parts)


def anchors(path):
    """Anchors of the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", path.read_text())
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


class Pages(unittest.TestCase):
    def test_links_lead_to_files_and_headings_that_exist(self):
        for path in pages():
            for link in LINK.findall(CODE.sub("", FENCE.sub("", path.read_text()))):
                if re.match(r"[a-z]+:", link):
                    continue
                name, _, anchor = link.partition("#")
                target = (path.parent / name).resolve() if name else path
                with self.subTest(page=str(path.relative_to(ROOT)), link=link):
                    self.assertTrue(target.exists(), "no such file")
                    if anchor:
                        self.assertIn(anchor, anchors(target))

    def test_performance_page_matches_the_results(self):
        checked = subprocess.run([sys.executable, PERFORMANCE, "--check"], capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        self.assertLessEqual(len((ROOT / "docs" / "performance.md").read_text().splitlines()), MAX_LINES)

    def test_results_name_their_machine_and_commit(self):
        for path in sorted((ROOT / "bench" / "results").rglob("*.json")):
            data = json.loads(path.read_text())
            with self.subTest(file=str(path.relative_to(ROOT))):
                self.assertEqual(data["commit"], path.stem)
                self.assertTrue(data["machine"])
                for run in data["runs"]:
                    self.assertLessEqual({"suite", "command", "unit", "conditions", "rows"}, run.keys())

    def test_suites_name_scripts_and_programs_that_exist(self):
        for path in sorted((ROOT / "bench" / "suites").glob("*.csv")):
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.assertTrue(rows, path.name)
            for row in rows:
                with self.subTest(suite=path.name, command=row["command"]):
                    for script in re.findall(r"(?<![\w/])bench/[\w/]+\.py", row["command"].replace("{root}/", "")):
                        self.assertTrue((ROOT / script).is_file(), script)
                    for program in re.findall(r"\{bin\}/(\w+)", row["command"]):
                        room, _, name = program.partition("_")
                        sources = [*ROOT.glob(f"src/{room}/**/{name}.cc"), *ROOT.glob(f"bench/{room}/{name}.cc")]
                        self.assertTrue(program == "moesaic" or sources, program)


if __name__ == "__main__":
    unittest.main()
