#!/usr/bin/env python3
"""Checks topologies/schema.json: shipped files satisfy it, and it refuses the faults that the parser refuses.

Without jsonschema, the script prints the reason and exits with status 77 (skipped).
"""
import copy
import json
import pathlib
import sys
import unittest

try:
    import jsonschema
except ImportError:
    jsonschema = None

SKIPPED = 77
FOLDER = pathlib.Path(__file__).resolve().parents[3] / "topologies"


def read(path):
    return json.loads(path.read_text())


class Schema(unittest.TestCase):
    def setUp(self):
        self.validator = jsonschema.Draft202012Validator(read(FOLDER / "schema.json"))

    def test_shipped_files_satisfy_the_schema(self):
        files = sorted(path for path in FOLDER.glob("*.json") if path.name != "schema.json")
        self.assertGreaterEqual(len(files), 7)
        for path in files:
            with self.subTest(file=path.name):
                self.assertEqual([error.message for error in self.validator.iter_errors(read(path))], [])

    def test_limits_are_those_of_the_parser(self):
        file = read(FOLDER / "h100-2x8-infiniband.json")
        for latency, bandwidth in ((0, 1e-6), (1e-6, 1e24), (1e24, 1)):
            file["tree"]["link"].update(latency_us=latency, gb_per_s=bandwidth)
            self.assertTrue(self.validator.is_valid(file), (latency, bandwidth))

    def test_faults_are_refused(self):
        good = read(FOLDER / "h100-2x8-infiniband.json")
        faults = {
            "unknown member": lambda file: file["tree"].update(colour="red"),
            "negative bandwidth": lambda file: file["tree"]["link"].update(gb_per_s=-1),
            "zero bandwidth": lambda file: file["tree"]["link"].update(gb_per_s=0),
            "negative latency": lambda file: file["tree"]["link"].update(latency_us=-1),
            "unknown duplex": lambda file: file["tree"]["link"].update(duplex="both"),
            "shared is a number": lambda file: file["tree"]["link"].update(shared=1),
            "no children": lambda file: file["tree"].update(children=[]),
            "count of zero": lambda file: file["tree"]["children"][0].update(count=0),
            "count of the root": lambda file: file["tree"].update(count=2),
            "no link": lambda file: file["tree"].pop("link"),
            "no source": lambda file: file.pop("source"),
            "no devices": lambda file: file.update(devices={}),
            "unknown data type": lambda file: file["devices"]["h100"]["flops"].update(int3=1),
            "small bandwidth": lambda file: file["tree"]["link"].update(gb_per_s=1e-7),
            "great bandwidth": lambda file: file["tree"]["link"].update(gb_per_s=1e25),
            "small latency": lambda file: file["tree"]["link"].update(latency_us=1e-7),
            "small memory": lambda file: file["devices"]["h100"].update(memory_gb=1e-7),
            "escape in the name": lambda file: file.update(name="a\x1b[2J"),
            "newline in the source": lambda file: file.update(source="a\n"),
            "delete in a level": lambda file: file["tree"].update(level="a\x7f"),
            "C1 character in a device type": lambda file: file["devices"].update({"a\x9b": {}}),
            "device type without a name": lambda file: file["devices"].update({"": {}}),
        }
        for name, apply in faults.items():
            file = copy.deepcopy(good)
            apply(file)
            with self.subTest(fault=name):
                self.assertFalse(self.validator.is_valid(file))


if __name__ == "__main__":
    if not hasattr(jsonschema, "Draft202012Validator"):
        print(f"SKIPPED: {sys.executable} has no jsonschema 4.0 or newer; install python3-jsonschema, or jsonschema by pip")
        sys.exit(SKIPPED)
    unittest.main()
