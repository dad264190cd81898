#!/usr/bin/env python3
"""Runs the official clients' own tests of their resources, from their source distributions, against the server on
models/moesaic-tiny. They were written for a mock server that accepts every id and field. sdk_ids.py creates objects for the
ids. sdk_refused.json lists the cases that this server refuses on purpose, with an expression for their names and the reason.
A listed case that passes is a failure too.

pip fetches the source distributions once, checks their hashes, and stores them next to this environment in the build folder.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

from serving import patient, serving
from source_distribution import fetch
from with_clients import missing

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = pathlib.Path(sys.prefix).with_name("sdk_sources")
RUN_SECONDS = patient(1500)
REFUSED = json.loads((HERE / "sdk_refused.json").read_text())
# Model names of the clients' tests.
NAMES = ["moesaic-tiny", "gpt-3.5-turbo-instruct", "gpt-6-astra", "model", "text-embedding-3-small", "claude-opus-5-5",
         "model_id"]
SUITES = {
    "openai": {"version": "3.54.0", "sha256": "2e393e63f8a38be6452806f9ef0b6534fecd6d41ab3b2165180dfce3599249cd", "base": "/v1",
               "plugins": ["sdk_ids"],
               "files": ["chat/test_completions.py", "test_completions.py", "test_responses.py", "responses",
                         "test_embeddings.py", "test_models.py", "test_conversations.py", "conversations"]},
    "anthropic": {"version": "2.12.0", "sha256": "571e6d250bcd6bbaf5fd5f3c764b8e11af9901ad2e44b025f8e773c6cc7a7173",
                  "base": "", "plugins": [], "files": ["test_messages.py", "test_models.py"]},
}


def outcomes(folder, suite, url):
    """Returns {case: True if it passed} and {case: reason}. A case is "FILE::CLASS::TEST[client]"."""
    with tempfile.TemporaryDirectory() as results:
        report = pathlib.Path(results) / "report.xml"
        played = subprocess.run(
            # The variants for aiohttp test a transport of the client and need further packages.
            [sys.executable, "-m", "pytest", "-q", "--tb=line", *(f"-p{plugin}" for plugin in suite["plugins"]), "-k",
             "not aiohttp", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", f"--junitxml={report}",
             *(f"tests/api_resources/{file}" for file in suite["files"])],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(HERE), "TEST_API_BASE_URL": url + suite["base"]},
            capture_output=True, text=True, timeout=RUN_SECONDS)
        if not report.exists():
            raise AssertionError(played.stdout[-4000:] + played.stderr[-4000:])
        found, reasons = {}, {}
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            words = case.get("classname").split(".")
            name = f"{'/'.join(words[2:-1])}.py::{words[-1]}::{case.get('name')}"
            faults = [part for part in case if part.tag in ("failure", "error")]
            if any(part.tag == "skipped" for part in case):
                continue
            found[name] = not faults
            reasons[name] = "".join(part.get("message") or "" for part in faults)[:300]
        return found, reasons


class Sdk(unittest.TestCase):
    maxDiff = None

    def play(self, package):
        suite, refused = SUITES[package], REFUSED[package]
        folder = fetch(package, suite["version"], suite["sha256"], SOURCES)
        with serving("--served-model-name", *NAMES) as server:
            found, reasons = outcomes(folder, suite, server.url)
            server.wait_until_quiet()
        self.assertGreater(len(found), 60)
        matches = {pattern: {name for name in found if re.fullmatch(pattern, name)} for pattern in refused}
        self.assertEqual([pattern for pattern, names in matches.items() if not names], [], "listed, but there is no such case")
        listed = set().union(*matches.values())
        failed = {name for name, passed in found.items() if not passed}
        print(f"{package}: {len(found) - len(failed)} of {len(found)} cases pass, {len(listed)} are refused on purpose")
        unexpected = [f"{name}: {reasons[name]}" for name in sorted(failed - listed)]
        self.assertEqual(len(unexpected), 0, "failed, but are not listed:\n" + "\n".join(unexpected))
        self.assertEqual(sorted(listed - failed), [], "listed as refused, but pass")

    def test_passes_the_tests_of_openais_client(self):
        self.play("openai")

    def test_passes_the_tests_of_anthropics_client(self):
        self.play("anthropic")


if __name__ == "__main__":
    try:
        for name in SUITES:
            fetch(name, SUITES[name]["version"], SUITES[name]["sha256"], SOURCES)
    except (subprocess.SubprocessError, OSError) as error:
        sys.exit(missing("the clients' source distributions", error))
    unittest.main()
