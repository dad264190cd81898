#!/usr/bin/env python3
"""Tests requests of web pages of other origins, which must neither use the server nor read its answers."""
import json
import unittest

from serving import Server, ServingCase, chat

CHAT = "/v1/chat/completions"
HELLO = chat("Hi", max_tokens=1)


class Browsers(ServingCase):
    FLAGS = ("--allowed-host", "models.example")

    def ask(self, method="POST", path=CHAT, body=HELLO, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        status, answered, text = self.server.request(method, path, body, headers)
        return status, {name.lower(): value for name, value in answered.items()}, text

    def refused(self, status, *words, **request):
        got, headers, text = self.ask(**request)
        self.assertEqual(got, status, text)
        message = json.loads(text)["error"]["message"]
        for word in words:
            self.assertIn(word, message)
        self.assertTrue(headers["x-request-id"])

    def test_a_body_must_be_declared_as_json(self):
        body = json.dumps(HELLO).encode()
        for kind in ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
                     "multipart/form-data; boundary=x", ""):
            with self.subTest(kind=kind):
                self.refused(415, "content-type: application/json", body=body, content_type=kind)
        for path in ("/tokenize", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            self.assertEqual(self.ask(path=path, body=body, content_type="text/plain")[0], 415)
        for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON"):
            self.assertEqual(self.ask(body=body, content_type=kind)[0], 200)
        self.assertEqual(self.ask(path="/reset_prefix_cache", body=None)[0], 200)  # no body, nothing to declare

    def test_a_rebound_name_reads_nothing(self):
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example"):
            for method, path, body in [("POST", CHAT, HELLO), ("GET", "/state", None), ("GET", "/", None), ("GET", "/metrics", None)]:
                with self.subTest(host=host, path=path):
                    self.refused(421, "--allowed-host", host.split(":")[0], method=method, path=path, body=body, host=host)
        for host in ("localhost:1", "127.0.0.1", "192.168.7.7:8000", "[::1]:8000", "models.example", "Models.Example:443"):
            with self.subTest(host=host):
                self.assertEqual(self.ask("GET", "/v1/models", None, host=host)[0], 200)

    def test_pages_of_other_origins_are_refused(self):
        own = f"http://127.0.0.1:{self.server.port}"
        for origin in ("http://evil.example", "https://evil.example", "null", f"http://localhost:{self.server.port}"):
            with self.subTest(origin=origin):
                self.refused(403, "--cors-origin", origin, origin=origin)
                self.refused(403, method="POST", path="/reset_prefix_cache", body=None, origin=origin)
                self.refused(403, method="GET", path="/state", body=None, origin=origin)
                self.refused(403, method="OPTIONS", body=None, origin=origin, access_control_request_method="POST")
        self.assertEqual(self.ask(origin=own)[0], 200)
        self.assertEqual(self.ask(host="models.example", origin="https://models.example")[0], 200)

    def test_the_page_has_a_content_security_policy(self):
        status, headers, text = self.ask("GET", "/", None)
        self.assertEqual(status, 200)
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        self.assertEqual(policy["script-src"], "'self'")
        self.assertEqual(policy["connect-src"], "'self'")
        self.assertEqual(policy["frame-ancestors"], "'none'")
        self.assertEqual(policy["object-src"], "'none'")
        self.assertNotIn(b"<script>", text)  # which the policy would not run

    def test_any_host_can_be_allowed(self):
        server = Server("--allowed-host", "*", "--cors-origin", "http://a.example")
        try:
            headers = {"host": "anything.example", "origin": "http://a.example"}
            status, answered, _ = server.request("GET", "/v1/models", headers=headers)
            self.assertEqual((status, answered["access-control-allow-origin"]), (200, "http://a.example"))
            self.assertEqual(server.request("GET", "/v1/models", headers={"origin": "http://b.example"})[0], 403)
        finally:
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main()
