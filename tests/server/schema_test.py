#!/usr/bin/env python3
"""Plays the API's own description against the server: what fits it and what does not. Nothing may answer 5xx, what breaks
the description must be refused, and every answer must have the form it says.

The number of cases an endpoint can be set by MOESAIC_SCHEMA_EXAMPLES.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from serving import patient, serving

EXAMPLES = os.environ.get("MOESAIC_SCHEMA_EXAMPLES", "40")
CHECKS = ["not_a_server_error", "negative_data_rejection", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance"]
STEPS = ["examples", "coverage", "fuzzing"]


class Schema(unittest.TestCase):
    def test_holds(self):
        with serving("--request-timeout", "1", "--max-queue", "100000") as server, tempfile.TemporaryDirectory() as folder:
            _, description = server.json("GET", "/openapi.json")
            self.assertGreater(len(description["paths"]), 15)
            played = subprocess.run(
                [pathlib.Path(sys.executable).with_name("schemathesis"), "run", server.url + "/openapi.json",
                 "--checks", ",".join(CHECKS), "--phases", ",".join(STEPS), "--max-examples", EXAMPLES, "--seed", "1",
                 "--generation-deterministic", "--no-color", "--workers", "1",  # more now and then overrun CPython's recursion limit
                 "--suppress-health-check", "too_slow", "--request-timeout", "60"],
                cwd=folder, capture_output=True, text=True, timeout=patient(900))
            print(played.stdout[-20000:])
            self.assertEqual(played.returncode, 0, played.stderr[-2000:])
            server.wait_until_quiet()


if __name__ == "__main__":
    unittest.main()
