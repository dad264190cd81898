#!/usr/bin/env python3
"""Runs AIPerf, a load generator, against the server on models/moesaic-tiny. It must parse every stream and count the same
tokens as the server."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from serving import MODEL, patient, serving

REQUESTS = 12
OUTPUT = 24
# AIPerf starts a dozen processes that wait for each other. On two busy cores they need more time than its defaults allow.
PATIENCE = {f"AIPERF_SERVICE_{name}": value for name, value in {
    "REGISTRATION_TIMEOUT": "600", "START_TIMEOUT": "600", "PROFILE_START_TIMEOUT": "600", "COMMAND_RESPONSE_TIMEOUT": "600",
    "COMMS_REQUEST_TIMEOUT": "600", "CONNECTION_PROBE_TIMEOUT": "600", "HEARTBEAT_MISSED_THRESHOLD": "100"}.items()}


class AiPerf(unittest.TestCase):
    def profile(self, server, kind):
        # AIPerf leaves files in its temporary folder, to which its processes may still write.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            ran = subprocess.run(
                [pathlib.Path(sys.executable).with_name("aiperf"), "profile", "--model", "moesaic-tiny", "--url", server.url,
                 "--endpoint-type", kind, "--streaming", "--concurrency", "4", "--request-count", str(REQUESTS),
                 "--tokenizer", str(MODEL), "--synthetic-input-tokens-mean", "100", "--synthetic-input-tokens-stddev", "0",
                 "--output-tokens-mean", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--random-seed", "1",
                 "--ui", "none", "--output-artifact-dir", folder],
                cwd=folder, capture_output=True, text=True, timeout=patient(600),
                env={**os.environ, **PATIENCE, "TMPDIR": folder})
            self.assertEqual(ran.returncode, 0, ran.stdout[-3000:] + ran.stderr[-3000:])
            report = next(pathlib.Path(folder).rglob("profile_export_aiperf.json"))
            return json.loads(report.read_text())

    def test_measures_the_server(self):
        with serving() as server:
            for kind in ("chat", "completions"):
                with self.subTest(kind=kind):
                    before = server.metric("vllm:generation_tokens_total")
                    report = self.profile(server, kind)
                    self.assertEqual(report["request_count"]["avg"], REQUESTS)
                    self.assertFalse(report.get("error_summary"), report.get("error_summary"))
                    self.assertGreater(report["time_to_first_token"]["avg"], 0)
                    self.assertGreater(report["inter_token_latency"]["avg"], 0)
                    self.assertGreaterEqual(server.metric("vllm:generation_tokens_total") - before, REQUESTS * OUTPUT)
            server.wait_until_quiet()


if __name__ == "__main__":
    unittest.main()
