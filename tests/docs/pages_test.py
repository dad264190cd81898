#!/usr/bin/env python3
"""Checks the Markdown pages: links lead somewhere, docs/performance.md matches bench/results, figures match, suites are complete."""
import csv
import json
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import performance  # noqa: E402
import run_suites  # noqa: E402

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

    def test_readme_leads_to_every_page_of_docs(self):
        reached, open_pages = set(), [ROOT / "README.md"]
        while open_pages:
            page = open_pages.pop()
            if page in reached:
                continue
            reached.add(page)
            links = LINK.findall(CODE.sub("", FENCE.sub("", page.read_text())))
            targets = ((page.parent / link.partition("#")[0]).resolve() for link in links if ":" not in link)
            open_pages.extend(target for target in targets if target.suffix == ".md" and target.is_file())
        for page in sorted((ROOT / "docs").rglob("*.md")):
            with self.subTest(page=str(page.relative_to(ROOT))):
                self.assertTrue(page in reached, "no page links to it")

    def test_performance_page_matches_the_results(self):
        checked = subprocess.run([sys.executable, PERFORMANCE, "--check"], capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        self.assertLessEqual(len((ROOT / "docs" / "performance.md").read_text().splitlines()), MAX_LINES)

    def test_figures_of_the_science_page_match_its_tables(self):
        checked = subprocess.run([sys.executable, ROOT / "bench" / "science" / "figures.py", "--check"], capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)

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

    def test_every_suite_is_run(self):
        self.assertEqual(sorted(run_suites.SUITES), sorted(path.stem for path in (ROOT / "bench" / "suites").glob("*.csv")))
        for name in run_suites.SUITES:
            run_suites.read_suite(name)

    def test_a_row_needs_each_of_its_files_and_packages(self):
        for needs, expected in (("", None), (f"file {PERFORMANCE}; package json", None), ("file none.txt", "none.txt does not exist"),
                                (f"file {PERFORMANCE}; file none.txt", "none.txt does not exist"),
                                ("package no_such_package; package json", f"{sys.executable} has no package no_such_package")):
            with self.subTest(needs=needs):
                self.assertEqual(run_suites.missing(needs, sys.executable), expected)


class Results(unittest.TestCase):
    def test_rounds_of_models_become_medians_and_ratios_within_a_round(self):
        def round_of(number, side, speed):
            return {"shape": "qwen3-30b-a3b", "weights": "q8_0", "threads": 2, "round": number, "side": side, "flags": "",
                    "results": {"pp512": speed, "pp2048": speed}}
        raw = {"about": {"load": [0.5]}, "runs": [
            round_of(0, "llama.cpp", 1), round_of(1, "Moesaic", 100), round_of(1, "llama.cpp", 50), round_of(2, "Moesaic", 90),
            round_of(2, "llama.cpp", 30), round_of(3, "Moesaic", 80), round_of(3, "llama.cpp", 20)]}
        shown, hidden = performance.shapes_run(raw)["rows"]
        self.assertEqual((shown["model"], shown["test"]), ("Qwen3-30B-A3B, q8_0", "pp512"))
        self.assertEqual((shown["moesaic"], shown["peers"]["llama.cpp"]), ([90, 80, 100], [30, 20, 50]))
        self.assertEqual(shown["ratio"], [3, 2, 4])
        self.assertNotIn("detail", shown)
        self.assertTrue(hidden["detail"])

    def test_rounds_of_operators_are_compared_with_the_fastest_composition(self):
        raw = [{"operator": "MLA, DeepSeek-V3, decode, 16384 keys", "threads": 2, "torch": "2.15",
                "us": {"Moesaic": [10, 20], "release": [100, 100], "matmul": [40, 40]}}]
        (row,) = performance.operators_run(raw)["rows"]
        self.assertEqual((row["model"], row["test"]), ("DeepSeek-V3", "MLA, decode, 16,384 keys, 2 threads"))
        self.assertEqual(row["ratio"], [3, 2, 4])

    def test_a_newer_commit_replaces_the_row_of_an_older_one(self):
        def file(commit, date, speed):
            row = {"model": "m", "test": "pp512", "moesaic": [speed], "peers": {"slow": [1], "fast": [2]}, "ratio": [speed / 2]}
            return "machine", {"machine": "Machine", "commit": commit, "date": date, "runs": [
                {"suite": "models", "command": "", "unit": "tokens/s", "conditions": "", "rows": [row]}]}
        page = performance.page([file("new", "2026-02-01", 8), file("old", "2026-01-01", 4)])
        self.assertIn("| m | pp512 | 8.0 | 2.0 (fast) | **4.00** |", page)
        self.assertEqual(page.count("| m |"), 1)


if __name__ == "__main__":
    unittest.main()
