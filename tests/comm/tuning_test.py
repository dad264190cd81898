#!/usr/bin/env python3
"""Measures plans of collectives on 4 ranks by comm_all_reduce_bench --tune, and reads the table by `moesaic topology explain`.

Usage: tuning_test.py BENCHMARK MOESAIC MPIRUN [FLAGS...]
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOPOLOGY = pathlib.Path(__file__).resolve().parent / "two_by_two.json"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
BYTES = 16384
SOON = 1e-9  # seconds: no plan is predicted to take less
BENCHMARK, MOESAIC, *LAUNCHER = sys.argv[1:]


def run(*words):
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=900).stdout


class TuningTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.table = pathlib.Path(folder.name) / "tuning.json"

    def tune(self, *words):
        """Returns the entries of the written table, and the names of each collective's plans, the fastest prediction first."""
        printed = run(*LAUNCHER, "-n", "4", BENCHMARK, "--topology", TOPOLOGY, "--bytes", str(BYTES), "--rounds", "1", "--calls", "2",
                      "--tune", self.table, *words)
        names = {}
        for line in printed.splitlines():
            _, collective, _, _, _, name = line.split(maxsplit=5)
            names.setdefault(collective, []).append(name)
        entries = json.loads(self.table.read_text())["entries"]
        for entry in entries:
            self.assertIn(entry["candidate"], names[entry["collective"]])
            self.assertEqual((entry["ranks"], entry["bytes"]), (4, BYTES))
            self.assertGreater(entry["seconds"], 0)
        return entries, names

    def test_sums_are_measured_by_default(self):
        self.assertEqual(list(self.tune()[1]), ["all_reduce"])

    def test_the_fastest_measured_plan_of_each_collective_is_chosen(self):
        entries, names = self.tune("--collective", ",".join(COLLECTIVES))
        self.assertEqual(list(names), list(COLLECTIVES))
        # The second prediction of each collective becomes the fastest plan.
        for entry in entries:
            if entry["candidate"] == names[entry["collective"]][1]:
                entry["seconds"] = SOON
        self.table.write_text(json.dumps({"entries": entries}))
        explained = json.loads(run(MOESAIC, "topology", "explain", TOPOLOGY, "--collective", ",".join(COLLECTIVES), "--size",
                                   str(BYTES), "--tuning", self.table, "--json"))["collectives"]
        self.assertEqual({row["collective"]: row["measured_s"] for row in explained}, {name: SOON for name in COLLECTIVES})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
