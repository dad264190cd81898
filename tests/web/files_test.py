#!/usr/bin/env python3
"""Tests the files of the web page over HTTP: compression, validation, caching, and libraries with their licenses."""
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from serving import ROOT, patient, serving  # noqa: E402

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = serving()
        cls.server = cls.context.__enter__()
        cls.addClassCleanup(cls.context.__exit__, None, None, None)

    def get(self, path, **headers):
        status, names, body = self.server.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return status, {name.lower(): value for name, value in names.items()}, body

    def libraries(self):
        """Returns {name: (folder, entry)} of the libraries, or {} if the binary was built without npm."""
        text = self.get("/js/libraries.js")[2].decode()
        return {name: (folder, entry) for name, folder, entry in
                re.findall(r'(\w+): \{ version: "[^"]+", folder: "([^"]+)", entry: "([^"]+)"', text)}

    def test_every_file_of_web_is_served_as_it_is(self):
        for file in sorted((ROOT / "web").rglob("*")):
            if file.suffix not in TYPES or "node_modules" in file.parts:
                continue
            status, headers, body = self.get("/" + file.relative_to(ROOT / "web").as_posix())
            self.assertEqual(status, 200, file)
            self.assertEqual(body, file.read_bytes(), file)
            self.assertTrue(headers["content-type"].startswith(TYPES[file.suffix]), file)
            self.assertEqual(headers["cache-control"], "no-cache", file)
        self.assertEqual(self.get("/")[2], (ROOT / "web/index.html").read_bytes())

    def test_examples_are_questions_whose_answers_are_judged(self):
        text = (ROOT / "web/js/examples.js").read_text()
        examples = [json.loads(line) for line in re.findall(r'^  (".*"),$', text, re.MULTILINE)]
        self.assertEqual(len(examples), text.count("\n  "))
        self.assertTrue(examples)
        judged = {row["question"] for row in json.loads((ROOT / "models/moesaic-smol/everyday.json").read_text())}
        self.assertEqual([example for example in examples if example not in judged], [])

    def test_gzip_is_sent_to_clients_that_accept_it_only(self):
        plain = (ROOT / "web/css/base.css").read_bytes()
        for accepted, compressed in [("gzip", True), ("br, gzip;q=0.5", True), ("deflate,gzip", True), ("gzip;q=0", False),
                                     ("gzip;q=0.000", False), ("br", False), ("xgzip", False), ("", False)]:
            _, headers, body = self.get("/css/base.css", accept_encoding=accepted)
            self.assertEqual(headers.get("content-encoding"), "gzip" if compressed else None, accepted)
            self.assertEqual(gzip.decompress(body) if compressed else body, plain, accepted)
            self.assertEqual(headers["vary"], "accept-encoding")

    def test_an_unchanged_file_is_not_sent_again(self):
        _, headers, _ = self.get("/css/base.css")
        for tags in [headers["etag"], "W/" + headers["etag"], '"other", ' + headers["etag"], "*"]:
            status, again, body = self.get("/css/base.css", if_none_match=tags)
            self.assertEqual((status, body, again["etag"]), (304, b"", headers["etag"]), tags)
            self.assertNotIn("content-length", again)
        self.assertEqual(self.get("/css/base.css", if_none_match='"other"')[0], 200)

    def test_libraries_are_served_for_ever_with_their_licenses(self):
        libraries = self.libraries()
        if not libraries:
            if os.environ.get("CI"):
                self.fail("the binary was built without npm")
            self.skipTest("the binary was built without npm")
        self.assertEqual(set(libraries), {"marked", "dompurify", "highlight", "katex", "uplot"})
        for folder, entry in libraries.values():
            for name in (entry, "LICENSE.txt"):
                status, headers, body = self.get(f"/{folder}{name}")
                self.assertEqual(status, 200, name)
                self.assertIn("immutable", headers["cache-control"])
                self.assertGreater(len(body), 500)
        folder = libraries["katex"][0]
        fonts = set(re.findall(r"fonts/[\w-]+\.woff2", self.get(f"/{folder}katex.min.css")[2].decode()))
        self.assertGreaterEqual(len(fonts), 20)
        for font in fonts:
            status, headers, body = self.get(f"/{folder}{font}", accept_encoding="gzip")
            self.assertEqual((status, headers["content-type"], body[:4]), (200, "font/woff2", b"wOF2"), font)

    def test_a_build_without_npm_continues_with_a_warning(self):
        for npm in ["", "/bin/false", "/nowhere/npm"]:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    ["cmake", f"-DSOURCE={ROOT}/web", f"-DNPM={npm}", f"-DOUTPUT={folder}/libraries", f"-DSTAMP={folder}/stamp",
                     "-P", ROOT / "cmake/web_libraries.cmake"], capture_output=True, text=True, timeout=patient(120))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("built without its libraries", done.stderr)
                self.assertEqual(pathlib.Path(folder, "libraries/js/libraries.js").read_text(), "export const libraries = null;\n")
                self.assertTrue(pathlib.Path(folder, "stamp").exists())


if __name__ == "__main__":
    unittest.main()
