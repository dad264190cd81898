#!/usr/bin/env python3
"""Tests `moesaic serve --tls-cert --tls-key`: handshakes, streams, half-closed clients, reload, and invalid files."""
import json
import pathlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import unittest
import warnings

import certificates
from serving import ANSWER_SECONDS, BINARY, MODEL, Server, ServingCase, chat, until, wire

CHAT = "/v1/chat/completions"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SKIPPED = 77


def trusting(certificate, **settings):
    context = ssl.create_default_context(cafile=str(certificate))
    for name, value in settings.items():
        setattr(context, name, value)
    return context


def healthy(client):
    """Returns True if the connection answers and stays open."""
    client.sendall(GET)
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        piece = client.recv(65536)
        if not piece:
            return False
        answer += piece
    return answer.startswith(b"HTTP/1.1 200 ")


def read_all(client):
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    return answer


class HalfClosing:
    """A TLS client that can send close_notify and still read, unlike Python's SSLSocket."""

    def __init__(self, server, context):
        self.socket = socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=server.host)
        self.pump(self.tls.do_handshake)

    def flush(self):
        if data := self.outgoing.read():
            self.socket.sendall(data)

    def pump(self, call, *arguments):
        while True:
            try:
                result = call(*arguments)
                self.flush()
                return result
            except ssl.SSLWantReadError:
                self.flush()
                data = self.socket.recv(65536)
                self.incoming.write(data) if data else self.incoming.write_eof()

    def send(self, data):
        self.pump(self.tls.write, data)

    def end_sending(self):
        try:
            self.tls.unwrap()
        except ssl.SSLWantReadError:
            pass
        self.flush()

    def read_all(self):
        answer = b""
        while True:
            try:
                piece = self.pump(self.tls.read, 65536)
            except ssl.SSLZeroReturnError:
                return answer
            if not piece:
                return answer
            answer += piece


class Tls(ServingCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.certificate, cls.key = certificates.make(pathlib.Path(folder.name), "models.example")
        cls.FLAGS = ("--tls-cert", cls.certificate, "--tls-key", cls.key, "--header-timeout", "2")
        super().setUpClass()
        cls.server.tls = cls.context = trusting(cls.certificate)

    def raw(self):
        return socket.create_connection((self.server.host, self.server.port), timeout=ANSWER_SECONDS)

    def connect(self, context=None):
        return (context or self.context).wrap_socket(self.raw(), server_hostname="models.example")

    def refuses(self, context):
        with self.raw() as client, self.assertRaises(ssl.SSLError):
            context.wrap_socket(client, server_hostname="models.example")

    def test_prints_its_address(self):
        self.assertEqual(self.server.url, f"https://127.0.0.1:{self.server.port}")
        self.assertIn("models.example, valid until ", self.server.read_log())

    def test_speaks_current_versions_only(self):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(self.certificate, minimum_version=version, maximum_version=version)
            with self.connect(context) as client:
                self.assertEqual(client.version(), version.name.replace("_", "."))
                self.assertRegex(client.cipher()[0], "GCM|CHACHA20")
                self.assertTrue(healthy(client))
        old = trusting(self.certificate)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the test uses a deprecated version on purpose
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        weak = trusting(self.certificate, maximum_version=ssl.TLSVersion.TLSv1_2)
        weak.set_ciphers("ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0")
        for context in (old, weak):
            self.refuses(context)

    def test_negotiates_http_1_1(self):
        context = trusting(self.certificate)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with self.connect(context) as client:
            self.assertEqual(client.selected_alpn_protocol(), "http/1.1")
        context = trusting(self.certificate)
        context.set_alpn_protocols(["h2"])
        self.refuses(context)

    def test_streams_an_answer(self):
        body = chat("Tell me a story.", stream=True, max_tokens=200, ignore_eos=True)
        status, headers, text = self.server.request("POST", CHAT, body)
        self.assertEqual((status, headers["content-type"]), (200, "text/event-stream; charset=utf-8"))
        self.assertEqual(text.count(b"data: [DONE]\n\n"), 1)
        body = json.dumps({"prompt": "x" * 300_000}).encode()  # many records
        self.assertEqual(self.server.request("POST", "/tokenize", body)[0], 200)

    def test_answers_plain_http_with_an_error(self):
        with self.raw() as client:
            client.sendall(GET)
            answer = read_all(client)
        self.assertTrue(answer.startswith(b"HTTP/1.1 400 "), answer)
        self.assertIn(b"this port speaks TLS: use https://", answer)

    def test_closes_connections_without_a_handshake(self):
        for data in (b"\x16\x03\x01\x00\x05hello", b"\x00" * 100, b"\xff", b"\x16\x03", b""):
            with self.raw() as client:
                client.sendall(data)
                try:
                    answer = read_all(client)
                except ConnectionResetError:
                    answer = b""
                self.assertTrue(answer[:1] in (b"", b"\x15"), answer)  # nothing, or a TLS alert
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_sends_close_notify(self):
        with self.context.wrap_socket(self.raw(), server_hostname="models.example", suppress_ragged_eofs=False) as client:
            client.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            self.assertTrue(read_all(client).endswith(b'{"status":"ok"}'))  # it raises an error without close_notify

    def test_answers_a_client_that_sends_no_more(self):
        post = wire(CHAT, json.dumps(chat("Hi", max_tokens=50, ignore_eos=True)).encode())
        for request in [GET] * 20 + [post]:
            client = HalfClosing(self.server, self.context)
            client.send(request)
            client.end_sending()
            answer = client.read_all()
            self.assertIn(b"HTTP/1.1 200 OK\r\n", answer)
            client.socket.close()
            with self.connect() as client:
                client.sendall(request)
                socket.socket.shutdown(client, socket.SHUT_WR)  # ends TCP without close_notify
                self.assertIn(b"HTTP/1.1 200 OK\r\n", read_all(client))

    def test_cancels_when_the_client_leaves(self):
        for stream in (True, False):
            before = self.server.aborted()

            def cancelled():
                with self.server.holding(stream):
                    pass
                self.server.wait_until_quiet()
                return self.server.aborted() > before
            until(cancelled)


class Reload(unittest.TestCase):
    def test_takes_new_files_and_keeps_connections(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            first, second = certificates.make(folder, "first.example"), certificates.make(folder, "second.example")
            files = folder / "used.pem", folder / "used.key"

            def install(pair):
                for source, target in zip(pair, files):
                    shutil.copy(source, target)
            install(first)
            server = Server("--tls-cert", files[0], "--tls-key", files[1])

            def presented():
                """Returns the name in the certificate of a new connection."""
                with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                    with context.wrap_socket(client) as tls:
                        pem = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True))
                return next(pair[0].stem for pair in (first, second) if pem.split() == pair[0].read_text().split())

            def logged(words):
                return len(re.findall(words, server.read_log()))
            self.assertEqual(presented(), "first.example")
            kept = trusting(first[0]).wrap_socket(socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS),
                                                  server_hostname="first.example")
            install(second)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: presented() == "second.example")
            self.assertTrue(healthy(kept))
            # The former pair stays in use when the key belongs to another certificate.
            shutil.copy(first[1], files[1])
            server.process.send_signal(signal.SIGHUP)
            until(lambda: logged("the old state stays in use"))
            self.assertIn(str(files[1]), server.read_log())
            self.assertEqual(presented(), "second.example")
            files[0].unlink()
            server.process.send_signal(signal.SIGHUP)
            until(lambda: logged("the old state stays in use") == 2)
            self.assertEqual(presented(), "second.example")
            install(first)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: presented() == "first.example")
            self.assertTrue(healthy(kept))
            kept.close()
            self.assertEqual(server.stop(), 0)


class Files(unittest.TestCase):
    def test_refuses_invalid_files(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            certificate, key = certificates.make(folder, "good.example")
            other_key = certificates.make(folder, "other.example")[1]
            sealed = certificates.make(folder, "sealed.example", passphrase="secret")
            empty, missing, broken = folder / "empty", folder / "missing", folder / "broken"
            empty.touch()
            broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
            for flags, words in [
                (["--tls-cert", certificate], "--tls-key"),
                (["--tls-key", key], "--tls-cert"),
                (["--tls-cert", missing, "--tls-key", key], str(missing)),
                (["--tls-cert", certificate, "--tls-key", missing], str(missing)),
                (["--tls-cert", empty, "--tls-key", key], str(empty)),
                (["--tls-cert", broken, "--tls-key", key], str(broken)),
                (["--tls-cert", certificate, "--tls-key", empty], str(empty)),
                (["--tls-cert", certificate, "--tls-key", certificate], str(certificate)),
                (["--tls-cert", certificate, "--tls-key", other_key], f"{other_key}: the key can't be used with the certificate"),
                (["--tls-cert", sealed[0], "--tls-key", sealed[1]], f"{sealed[1]}: the key is encrypted"),
            ]:
                with self.subTest(flags=flags):
                    result = subprocess.run([str(BINARY), "serve", str(MODEL), "--port", "0", *map(str, flags)],
                                            capture_output=True, text=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL)
                    self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
                    self.assertIn(words, result.stderr)


if __name__ == "__main__":
    if not shutil.which("openssl"):
        print("SKIPPED: there is no openssl program to make certificates with")
        sys.exit(SKIPPED)
    unittest.main()
