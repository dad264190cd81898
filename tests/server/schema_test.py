#!/usr/bin/env python3
"""Sends requests that follow the API's description, and requests that violate it. The server must not answer 5xx, must refuse
violations, and must answer in the described form.

MOESAIC_SCHEMA_EXAMPLES sets the number of cases for each endpoint.
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
    def test_answers_follow_the_schema(self):
        with serving("--request-timeout", "1", "--max-queue", "100000") as server, tempfile.TemporaryDirectory() as folder:
            _, description = server.json("GET", "/openapi.json")
            self.assertGreater(len(description["paths"]), 15)
            played = subprocess.run(
                [pathlib.Path(sys.executable).with_name("schemathesis"), "run", server.url + "/openapi.json",
                 "--checks", ",".join(CHECKS), "--phases", ",".join(STEPS), "--max-examples", EXAMPLES, "--seed", "1",
                 "--generation-deterministic", "--no-color", "--workers", "1",  # more workers may exceed CPython's recursion limit
                 "--suppress-health-check", "too_slow", "--request-timeout", "60"],
                cwd=folder, capture_output=True, text=True, timeout=patient(900))
            print(played.stdout[-20000:])
            self.assertEqual(played.returncode, 0, played.stderr[-2000:])
            server.wait_until_quiet()


if __name__ == "__main__":
    unittest.main()
