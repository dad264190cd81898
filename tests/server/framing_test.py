#!/usr/bin/env python3
"""Tests HTTP framing by RFC 9112: the answer to each sequence of bytes, and if the connection stays open.

A request that two implementations could delimit differently must be refused and its connection closed. Otherwise a proxy in
front of the server could forward a part of one client's body as another client's request.
"""
import json
import socket
import unittest

from serving import ANSWER_SECONDS, ServingCase

KEPT, CLOSED = "kept", "closed"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"prompt":"hi"}'


def get(fields=b"host: localhost\r\n", target=b"/health", method=b"GET", version=b"HTTP/1.1"):
    return method + b" " + target + b" " + version + b"\r\n" + fields + b"\r\n"


def post(fields, body=b"", version=b"HTTP/1.1"):
    return b"POST /tokenize " + version + b"\r\nhost: localhost\r\ncontent-type: application/json\r\n" + fields + b"\r\n" + body


def chunked(body):
    return post(b"transfer-encoding: chunked\r\n", body)


WHOLE = b"%x\r\n%s\r\n" % (len(BODY), BODY)

# (name, bytes, statuses of the answers in order, whether the connection is kept)
CASES = [
    ("plain", get(), [200], KEPT),
    ("pipelined", get() + get() + post(b"content-length: %d\r\n" % len(BODY), BODY) + get(), [200] * 4, KEPT),
    ("empty lines before", b"\r\n\r\n" + get() + b"\r\n" + get(), [200, 200], KEPT),
    ("connection close", get(b"host: localhost\r\nConnection: foo, Close\r\n"), [200], CLOSED),
    ("version 1.0", get(b"", version=b"HTTP/1.0"), [200], CLOSED),
    ("version 1.0, kept", get(b"connection: keep-alive\r\n", version=b"HTTP/1.0"), [200], KEPT),
    ("version 1.9", get(version=b"HTTP/1.9"), [200], KEPT),
    ("version 2.0", get(version=b"HTTP/2.0"), [505], CLOSED),
    ("version 0.9", b"GET /health\r\n\r\n", [400], CLOSED),
    ("version in lower case", get(version=b"http/1.1"), [400], CLOSED),
    ("two spaces", b"GET  /health HTTP/1.1\r\nhost: localhost\r\n\r\n", [400], CLOSED),
    ("space after the version", b"GET /health HTTP/1.1 \r\nhost: localhost\r\n\r\n", [400], CLOSED),
    ("bare LF", b"GET /health HTTP/1.1\nhost: localhost\n\n", [400], CLOSED),
    ("bare LF in the header", b"GET /health HTTP/1.1\r\nhost: localhost\na: b\r\n\r\n", [400], CLOSED),
    ("bare CR", b"GET /health HTTP/1.1\r\nhost: localhost\ra: b\r\n\r\n", [400], CLOSED),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400], CLOSED),
    # Targets.
    ("absolute form", get(target=b"http://localhost:8000/health"), [200], KEPT),
    ("absolute form, https and no path", get(target=b"HTTPS://127.0.0.1"), [200], KEPT),
    ("absolute form, another scheme", get(target=b"ftp://localhost/health"), [400], CLOSED),
    ("absolute form, user information", get(target=b"http://a@b/health"), [400], CLOSED),
    ("absolute form without Host", get(b"", target=b"http://b/health"), [400], CLOSED),
    ("percent-encoded", get(target=b"/%68ealth"), [200], KEPT),
    ("percent-encoded slash", get(target=b"/%2Fhealth"), [404], KEPT),
    ("percent-encoded model", get(target=b"/v1/models/moesaic%2Dtiny"), [200], KEPT),
    ("malformed percent-encoding", get(target=b"/health%2"), [400], CLOSED),
    ("percent-encoded NUL", get(target=b"/health%00"), [400], CLOSED),
    ("fragment", get(target=b"/health#x"), [400], CLOSED),
    ("not ASCII", get(target=b"/h\xc3\xa9"), [400], CLOSED),
    ("no slash", get(target=b"health"), [400], CLOSED),
    ("asterisk", get(target=b"*"), [400], CLOSED),
    ("OPTIONS *", get(target=b"*", method=b"OPTIONS"), [204], KEPT),
    ("CONNECT", get(target=b"x:443", method=b"CONNECT"), [501], CLOSED),
    ("TRACE", get(method=b"TRACE"), [405], KEPT),
    ("unknown method", get(method=b"BREW"), [405], KEPT),
    ("long request line", get(target=b"/" + b"a" * 20_000), [414], CLOSED),
    ("long header", get(b"host: localhost\r\na: " + b"a" * 20_000 + b"\r\n"), [431], CLOSED),
    # Host.
    ("no Host", get(b""), [400], CLOSED),
    ("two Hosts", get(b"host: localhost\r\nhost: localhost\r\n"), [400], CLOSED),
    ("Host with a path", get(b"host: x/y\r\n"), [400], CLOSED),
    ("Host with user information", get(b"host: y@x\r\n"), [400], CLOSED),
    ("Host with a space", get(b"host: x y\r\n"), [400], CLOSED),
    ("Host with a bad port", get(b"host: x:y\r\n"), [400], CLOSED),
    ("Host as an IPv6 address", get(b"host: [::1]:8000\r\n"), [200], KEPT),
    # Fields.
    ("space before the colon", get(b"host: localhost\r\na : b\r\n"), [400], CLOSED),
    ("space before Host", b"GET /health HTTP/1.1\r\n host: localhost\r\n\r\n", [400], CLOSED),
    ("folded", get(b"host: localhost\r\na: b\r\n c\r\n"), [400], CLOSED),
    ("folded with a tab", get(b"host: localhost\r\na: b\r\n\tc\r\n"), [400], CLOSED),
    ("no colon", get(b"host: localhost\r\nab\r\n"), [400], CLOSED),
    ("no name", get(b"host: localhost\r\n: b\r\n"), [400], CLOSED),
    ("NUL in a value", get(b"host: localhost\r\na: b\0c\r\n"), [400], CLOSED),
    ("control in a value", get(b"host: localhost\r\na: b\x0bc\r\n"), [400], CLOSED),
    ("tab and obs-text in a value", get(b"host: localhost\r\na: b\tc\xff\r\n"), [200], KEPT),
    ("Expect", get(b"host: localhost\r\nexpect: 200-ok\r\n"), [417], CLOSED),
    ("Expect without a body", get(b"host: localhost\r\nexpect: 100-continue\r\n"), [200], KEPT),
    # Bodies.
    ("Content-Length", post(b"content-length: %d\r\n" % len(BODY), BODY), [200], KEPT),
    ("chunked", chunked(WHOLE + b"0\r\n\r\n"), [200], KEPT),
    ("chunked, capitals and leading zeros", post(b"Transfer-Encoding: Chunked\r\n", b"000" + WHOLE.upper().replace(
        BODY.upper(), BODY) + b"000\r\n\r\n"), [200], KEPT),
    ("chunk extensions", chunked(WHOLE.replace(b"\r\n", b";a;b=c;d=\"e;\\\"\"\r\n", 1) + b"0;x\r\n\r\n"), [200], KEPT),
    ("trailers", chunked(WHOLE + b"0\r\na: b\r\ncontent-length: 5\r\n\r\n"), [200], KEPT),
    ("no body", post(b"content-length: 0\r\n"), [400], KEPT),
    ("xchunked", post(b"transfer-encoding: xchunked\r\n", WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("chunked, deflate", post(b"transfer-encoding: chunked, deflate\r\n", WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("identity", post(b"transfer-encoding: identity\r\n", BODY), [400], CLOSED),
    ("empty Transfer-Encoding", post(b"transfer-encoding:\r\n", BODY), [400], CLOSED),
    ("chunked twice", post(b"transfer-encoding: chunked, chunked\r\n", WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("chunked in two lines", post(b"transfer-encoding: chunked\r\n" * 2, WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("chunked with a parameter", post(b"transfer-encoding: chunked;a=b\r\n", WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("chunked after a vertical tab", post(b"transfer-encoding: \x0bchunked\r\n", WHOLE + b"0\r\n\r\n"), [400], CLOSED),
    ("gzip, chunked", post(b"transfer-encoding: gzip, chunked\r\n", WHOLE + b"0\r\n\r\n"), [501], CLOSED),
    ("gzip and Content-Length", post(b"transfer-encoding: gzip\r\ncontent-length: 4\r\n", b"abcd"), [400], CLOSED),
    ("chunked and Content-Length", post(b"transfer-encoding: chunked\r\ncontent-length: 4\r\n", WHOLE + b"0\r\n\r\n"), [400],
     CLOSED),
    ("Content-Length and chunked", post(b"content-length: 4\r\ntransfer-encoding: chunked\r\n", WHOLE + b"0\r\n\r\n"), [400],
     CLOSED),
    ("chunked in 1.0", post(b"transfer-encoding: chunked\r\n", WHOLE + b"0\r\n\r\n", b"HTTP/1.0"), [400], CLOSED),
    ("two Content-Lengths", post(b"content-length: 4\r\ncontent-length: 5\r\n", b"abcde"), [400], CLOSED),
    ("the same Content-Length twice", post(b"content-length: 4\r\ncontent-length: 4\r\n", b"abcd"), [400], CLOSED),
    ("list of Content-Lengths", post(b"content-length: 4, 4\r\n", b"abcd"), [400], CLOSED),
    ("signed Content-Length", post(b"content-length: +4\r\n", b"abcd"), [400], CLOSED),
    ("negative Content-Length", post(b"content-length: -4\r\n", b"abcd"), [400], CLOSED),
    ("hexadecimal Content-Length", post(b"content-length: 0x4\r\n", b"abcd"), [400], CLOSED),
    ("empty Content-Length", post(b"content-length:\r\n"), [400], CLOSED),
    ("huge Content-Length", post(b"content-length: 99999999999999999999999999\r\n"), [413], CLOSED),
    ("malformed chunk size", chunked(b"xyz\r\n"), [400], CLOSED),
    ("signed chunk size", chunked(b"+f\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("prefixed chunk size", chunked(b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("blank after a chunk size", chunked(b"f \r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("chunk size of 17 digits", chunked(b"0000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("chunk size that overflows", chunked(b"ffffffffffffffff\r\n"), [413], CLOSED),
    ("chunk longer than its size", chunked(b"e\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("chunk that ends with LF", chunked(WHOLE[:-2] + b"\n0\r\n\r\n"), [400], CLOSED),
    ("chunk size that ends with LF", chunked(b"f\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("LF in a chunk extension", chunked(b"f;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("CR in a chunk extension", chunked(b"f;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("line break in a quoted extension", chunked(b'f;a="b\r\n"\r\n' + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("long chunk extension", chunked(b"f;" + b"a" * 8000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"), [400], CLOSED),
    ("many chunk extensions", chunked((b"1;" + b"a" * 1000 + b"\r\n \r\n") * 50 + b"0\r\n\r\n"), [400], CLOSED),
    ("malformed trailer", chunked(WHOLE + b"0\r\nab\r\n\r\n"), [400], CLOSED),
    ("folded trailer", chunked(WHOLE + b"0\r\na: b\r\n c\r\n\r\n"), [400], CLOSED),
    ("control in a trailer", chunked(WHOLE + b"0\r\na: \x01\r\n\r\n"), [400], CLOSED),
    ("long trailers", chunked(WHOLE + b"0\r\n" + (b"a: " + b"b" * 1000 + b"\r\n") * 50 + b"\r\n"), [431], CLOSED),
]


class Client:
    def __init__(self, server):
        self.socket = socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS)
        self.bytes = b""

    def send(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has refused the beginning already

    def more(self):
        piece = self.socket.recv(65536)
        self.bytes += piece
        return piece

    def answer(self):
        """Returns (status, headers, body) of the next final answer, or None at the end."""
        while b"\r\n\r\n" not in self.bytes:
            if not self.more():
                assert self.bytes == b"", self.bytes
                return None
        head, self.bytes = self.bytes.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        status = int(lines[0].split()[1])
        if status == 100:
            return self.answer()
        headers = dict(line.split(": ", 1) for line in lines[1:])
        length = int(headers.get("content-length", 0))
        while len(self.bytes) < length:
            assert self.more(), "the body is cut off"
        body, self.bytes = self.bytes[:length], self.bytes[length:]
        return status, headers, body


class Framing(ServingCase):
    def check(self, send, statuses, kept):
        client = Client(self.server)
        with client.socket:
            send(client)
            for status in statuses:
                answer = client.answer()
                self.assertIsNotNone(answer)
                self.assertEqual(answer[0], status, answer)
            self.assertEqual(answer[1]["connection"], "keep-alive" if kept == KEPT else "close")
            if kept == KEPT:
                client.send(HEALTH)
                self.assertEqual(client.answer()[0], 200)
            else:
                self.assertIsNone(client.answer())

    def test_each_request_of_the_table_has_its_status(self):
        for name, request, statuses, kept in CASES:
            with self.subTest(name):
                self.check(lambda client: client.send(request), statuses, kept)

    def test_ignores_bytes_after_a_refused_request(self):
        for name, request, statuses, kept in CASES:
            if kept == CLOSED and len(request) < 2000:
                with self.subTest(name):
                    self.check(lambda client: client.send(request + HEALTH * 3), statuses, kept)

    def test_requests_in_single_bytes_have_the_same_status(self):
        """Sends the same requests one byte at a time."""
        for name, request, statuses, kept in CASES:
            if len(request) < 400:
                with self.subTest(name):
                    def send(client):
                        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        for i in range(len(request)):
                            client.send(request[i:i + 1])
                    self.check(send, statuses, kept)

    def test_refusals_have_the_format_of_the_api(self):
        for path, kind in [(b"/v1/chat/completions", None), (b"/v1/messages", "error")]:
            client = Client(self.server)
            with client.socket:
                client.send(b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n")
                status, _, body = client.answer()
                error = json.loads(body)
                self.assertEqual((status, error.get("type")), (400, kind))
                self.assertIn("Transfer-Encoding", error["error"]["message"])

    def test_answers_a_client_that_sends_no_more(self):
        for request, status in [(get(), 200), (post(b"content-length: %d\r\n" % len(BODY), BODY), 200),
                                (get(target=b"/nowhere"), 404), (get(b"", version=b"HTTP/1.0"), 200),
                                (post(b"content-length: 100\r\n", BODY), 400)]:
            for _ in range(50):
                client = Client(self.server)
                with client.socket:
                    client.send(request)
                    client.socket.shutdown(socket.SHUT_WR)
                    answer = client.answer()
                    self.assertIsNotNone(answer)
                    self.assertEqual(answer[0], status, answer)
                    self.assertIsNone(client.answer())


if __name__ == "__main__":
    unittest.main()
