#!/usr/bin/env python3
"""Tests the nginx settings of docs/server.md in front of a server: TLS, HTTP/2, streams, and clients that leave."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

import certificates
from serving import ANSWER_SECONDS, ROOT, WAIT_SECONDS, Server, chat, until
from find_program import find_program
from tls_test import SKIPPED, trusting

CHAT = "/v1/chat/completions"


def documented():
    """Returns the server block of the documentation."""
    return re.search(r"```nginx\n(.*?)```", (ROOT / "docs" / "server.md").read_text(), re.S)[1]


def replaced(text, pattern, replacement):
    changed, count = re.subn(pattern, replacement, text)
    assert count == 1, f"{pattern} is {count} times in the documented block"
    return changed


@contextlib.contextmanager
def nginx_before(server, folder, certificate, key):
    """Starts nginx and yields its port."""
    with socket.create_server(("127.0.0.5", 0)) as free:
        port = free.getsockname()[1]
    block = replaced(documented(), r"listen 443 ssl http2;", f"listen 127.0.0.5:{port} ssl http2;")
    block = replaced(block, r"ssl_certificate +\S+;", f"ssl_certificate {certificate};")
    block = replaced(block, r"ssl_certificate_key +\S+;", f"ssl_certificate_key {key};")
    block = replaced(block, r"proxy_pass \S+;", f"proxy_pass {server.url};")
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;" if os.geteuid() == 0 else ""  # the folder belongs to the user of the test
    file = folder / "nginx.conf"
    file.write_text(f"{user} daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
                    f"http {{ access_log off;\n{temporary}\n{block}}}\n")
    command = [find_program("nginx"), "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)

    def listens():
        assert process.poll() is None, (folder / "error.log").read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.5", port)).close()
            return True
        return False
    try:
        until(listens)
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


class Nginx(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.certificate, key = certificates.make(self.folder, "models.example")
        self.server = Server("--allowed-host", "*")
        self.addCleanup(lambda: self.assertEqual(self.server.stop(), 0))
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.port = stack.enter_context(nginx_before(self.server, self.folder, self.certificate, key))

    @contextlib.contextmanager
    def asking(self, body):
        """Yields the answer to a chat after its beginning has been read."""
        raw = socket.create_connection(("127.0.0.5", self.port), timeout=ANSWER_SECONDS)
        connection = http.client.HTTPConnection("models.example", timeout=ANSWER_SECONDS)
        connection.sock = trusting(self.certificate).wrap_socket(raw, server_hostname="models.example")
        try:
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def test_streams_an_answer(self):
        with self.asking(chat("Tell me a story.", stream=True, max_tokens=100, ignore_eos=True)) as answer:
            self.assertEqual(answer.status, 200)
            self.assertEqual(answer.getheader("content-type"), "text/event-stream; charset=utf-8")
            text = answer.read()
        self.assertEqual(text.count(b"data: [DONE]\n\n"), 1)
        self.assertGreater(text.count(b"data: "), 20)

    def test_forwards_events_at_once_and_ends_with_the_client(self):
        def passed_on():
            before = self.server.aborted()
            with self.asking(chat("Tell me a story.", stream=True, n=128, max_tokens=4000, ignore_eos=True)) as answer:
                self.assertTrue(answer.readline().startswith(b"data: "))
                running = self.server.metric("vllm:num_requests_running") > 0  # if it has ended before, the test tries again
            self.server.wait_until_quiet()
            return running and self.server.aborted() > before
        until(passed_on)

    def test_speaks_http_2_to_clients(self):
        curl = shutil.which("curl")
        if not curl or "HTTP2" not in subprocess.run([curl, "-V"], capture_output=True, text=True).stdout:
            self.skipTest("there is no curl with HTTP/2")
        result = subprocess.run([curl, "-sS", "--http2", "--cacert", str(self.certificate), "--resolve",
                                 f"models.example:{self.port}:127.0.0.5", "-w", " %{http_version}",
                                 "-H", "content-type: application/json", "-d",
                                 json.dumps(chat("Hi", max_tokens=5)), f"https://models.example:{self.port}{CHAT}"],
                                capture_output=True, text=True, timeout=ANSWER_SECONDS)
        self.assertEqual(result.returncode, 0, result.stderr)
        text, version = result.stdout.rsplit(" ", 1)
        self.assertEqual(version, "2")
        self.assertEqual(json.loads(text)["object"], "chat.completion")


if __name__ == "__main__":
    missing = [name for name in ("nginx", "openssl") if not find_program(name)]
    if missing:
        print(f"SKIPPED: {' and '.join(missing)} cannot be found: install the packages, as ./run test does")
        sys.exit(SKIPPED)
    unittest.main()
