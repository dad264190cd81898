#!/usr/bin/env python3
"""Tests `moesaic topology`: explain of shipped files, placement, the picture, probes by threads and under mpirun."""
import json
import os
import pathlib
import shutil
import tempfile
import unittest
import xml.etree.ElementTree

from moesaic_cli import ROOT, mpirun, needs_mpirun, run

FILES = ROOT / "topologies"


def table(text):
    """The rows of the last table of the output, split at two spaces or more."""
    lines = text.rstrip("\n").split("\n\n")[-1].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


class Explain(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-topology-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_every_shipped_file_is_explained(self):
        for path in FILES.glob("*.json"):
            if path.name == "schema.json":
                continue
            with self.subTest(file=path.name):
                printed = run("topology", "explain", path, "--size", "64KiB").stdout
                rows = table(printed)
                self.assertEqual([row[0] for row in rows], ["collective", "all_reduce", "all_gather", "all_to_all"])
                for row in rows[1:]:
                    self.assertLessEqual(int(row[4].rstrip("%")), 100)

    def test_large_all_reduce_is_near_the_bound_and_beats_flat_rings(self):
        rows = table(run("topology", "explain", FILES / "accelerators-4x8-200gbit.json", "--collective", "all_reduce",
                         "--size", "256MiB").stdout)
        row = dict(zip(rows[0], rows[1]))
        self.assertGreaterEqual(int(row["of bound"].rstrip("%")), 90)
        self.assertGreater(float(row["over flat block"].rstrip("x")), 1)
        self.assertGreater(float(row["over flat round-robin"].rstrip("x")), 2.21)

    def test_json_has_the_values_of_the_table(self):
        words = ("topology", "explain", FILES / "h800-h20-mixed.json", "--collective", "all_reduce,barrier",
                 "--size", "1KiB,64MiB")
        rows = table(run(*words).stdout)[1:]
        printed = json.loads(run(*words, "--json").stdout)
        self.assertEqual(printed["ranks"], 16)
        self.assertEqual([entry["collective"] for entry in printed["collectives"]], [row[0] for row in rows])
        for entry, row in zip(printed["collectives"], rows):
            self.assertEqual(entry["algorithm"], row[-1])
            self.assertEqual(f"{100 * entry['share_of_bound']:.0f}%", row[4])
            self.assertLessEqual(entry["bound_s"], entry["predicted_s"] * (1 + 1e-9))

    def test_measured_times_have_a_column_and_faulty_ones_are_named(self):
        tuning = self.folder / "tuning.json"
        entry = {"collective": "all_reduce", "ranks": 32, "bytes": 1 << 20, "candidate": "of an older version", "seconds": 1e-3}
        tuning.write_text(json.dumps({"entries": [entry]}))
        words = ("topology", "explain", FILES / "accelerators-4x8-200gbit.json", "--collective", "all_reduce", "--size", "1MiB")
        plain, tuned = (table(run(*words, *flags).stdout) for flags in ((), ("--tuning", tuning)))
        self.assertEqual(tuned[0], [*plain[0][:-1], "measured", "algorithm"])
        self.assertEqual(tuned[1], [*plain[1][:-1], "-", plain[1][-1]])
        printed = json.loads(run(*words, "--json", "--tuning", tuning).stdout)
        self.assertIsNone(printed["collectives"][0]["measured_s"])
        self.assertNotIn("measured_s", json.loads(run(*words, "--json").stdout)["collectives"][0])
        tuning.write_text(json.dumps({"entries": [entry | {"seconds": 0}]}))
        self.assertIn('tuning.json: entries[0]: "seconds" must be a positive number',
                      run(*words, "--tuning", tuning, code=1).stderr)

    def test_ranks_are_the_first_of_the_order(self):
        path = FILES / "accelerators-4x8-200gbit.json"
        block = run("topology", "explain", path, "--ranks", "4", "--size", "1KiB").stdout
        self.assertIn("ranks: 4;", block)
        self.assertNotIn("4 x node", block)
        dealt = run("topology", "explain", path, "--ranks", "4", "--order", "round-robin", "--size", "1KiB").stdout
        self.assertIn("4 x node", dealt)
        self.assertIn("has 32 devices, fewer than --ranks 33",
                      run("topology", "explain", path, "--ranks", "33", code=1).stderr)

    def test_picture_is_svg_with_every_rank(self):
        path = self.folder / "tree.svg"
        run("topology", "explain", FILES / "h800-h20-mixed.json", "--size", "1KiB", "--svg", path)
        texts = [element.text for element in xml.etree.ElementTree.parse(path).iter() if element.tag.endswith("text")]
        for rank in range(16):
            self.assertIn(str(rank), texts)

    def test_rows_without_time_or_with_small_blocks_have_values_or_dashes(self):
        path = FILES / "accelerators-4x8-200gbit.json"
        for words in (["--size", "0"], ["--ranks", "1", "--collective", "barrier"],
                      ["--collective", "all_to_all", "--size", "32"]):
            with self.subTest(words=words):
                printed = run("topology", "explain", path, *words).stdout
                self.assertNotRegex(printed, r"\b(nan|inf)x")
        rows = table(run("topology", "explain", path, "--size", "0", "--collective", "all_reduce").stdout)
        self.assertEqual(rows[1][4:9], ["-", "-", "-", "-", "-"])
        rows = table(run("topology", "explain", path, "--size", "32", "--collective", "all_to_all").stdout)
        self.assertRegex(rows[1][7], r"^[0-9.]+x$")

    def test_plans_of_large_topologies_are_refused_before_anything_is_written(self):
        file = json.loads((FILES / "accelerators-4x8-200gbit.json").read_text())
        file["tree"]["children"][0]["count"] = 75
        path, picture = self.folder / "large.json", self.folder / "tree.svg"
        path.write_text(json.dumps(file))
        refused = run("topology", "explain", path, "--svg", picture, code=1)
        self.assertIn("has 600; use --ranks 512, or --collective none", refused.stderr)
        self.assertEqual(refused.stdout, "")
        self.assertFalse(picture.exists())
        described = run("topology", "explain", path, "--svg", picture, "--collective", "none").stdout
        self.assertIn("75 x node", described)
        self.assertNotIn("of bound", described)
        self.assertIn(">599<", picture.read_text())
        self.assertIn("excludes", run("topology", "explain", path, "--collective", "none,barrier", code=2).stderr)

    def test_faults_are_reported_by_path_and_flag(self):
        file = json.loads((FILES / "h800-h20-mixed.json").read_text())
        file["tree"]["children"][1]["link"]["gb_per_s"] = 0
        (self.folder / "bad.json").write_text(json.dumps(file))
        self.assertIn("bad.json: tree.children[1].link.gb_per_s: must be a positive number, found 0",
                      run("topology", "explain", self.folder / "bad.json", code=1).stderr)
        for words in (["explain"], ["explain", FILES / "h800-h20-mixed.json", "-o", "x"], ["probe", "--size", "1KiB"], ["probe", "--json"],
                      ["probe", FILES / "h800-h20-mixed.json"], ["measure"]):
            self.assertIn("moesaic topology", run("topology", *words, code=2).stderr)


class Probe(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-topology-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_threads_give_a_file_that_explain_reads(self):
        ranks = min(2, len(os.sched_getaffinity(0)))
        path = self.folder / "machine.json"
        run("topology", "probe", "--ranks", ranks, "--name", "here", "-o", path)
        self.assertEqual(json.loads(path.read_text())["name"], "here")
        self.assertIn(f"ranks: {ranks};", run("topology", "explain", path, "--size", "1KiB").stdout)
        self.assertIn("--name: ", run("topology", "probe", "--name", "a\x1b[2J", code=1).stderr)
        self.assertIn("hardware threads", run("topology", "probe", "--ranks", "60000", code=1).stderr)

    @needs_mpirun
    def test_ranks_of_a_job_are_probed_by_mpi(self):
        path = self.folder / "job.json"
        done = mpirun("topology", "probe", "-o", path)
        if "this build has no MPI" in done.stderr:
            self.skipTest("the binary was built without MPI")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("measured between 2 ranks by mpi", json.loads(path.read_text())["source"])
        self.assertEqual(done.stdout.count("written to"), 1)


if __name__ == "__main__":
    unittest.main()
