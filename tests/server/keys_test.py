#!/usr/bin/env python3
"""Tests API keys: separation of cached blocks, admin permissions, limits, usage, reload."""
import json
import os
import pathlib
import signal
import tempfile
import unittest

from serving import KeyFile, chat, serving, until

CHAT = "/v1/chat/completions"
LONG = "The prefix cache keeps blocks of sixty-four tokens each. " * 40
OPERATIONS = [("GET", "/state"), ("GET", "/debug/trace"), ("GET", "/expert_load"), ("POST", "/reset_prefix_cache")]


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def cached(server, key, **fields):
    """Returns the cached tokens of the long prompt, requested with `key`."""
    status, answer = server.json("POST", CHAT, chat(LONG, max_tokens=1, **fields), bearer(key) if key else None)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Tenants(unittest.TestCase):
    def test_cached_blocks_belong_to_a_key(self):
        with serving("--api-key", "one", "--api-key", "two") as server:
            self.assertEqual(cached(server, "one"), 0)
            self.assertGreater(cached(server, "one"), 0)
            self.assertEqual(cached(server, "two"), 0)
            self.assertEqual(cached(server, "one", cache_salt="s"), 0)
            self.assertGreater(cached(server, "one", cache_salt="s"), 0)
            self.assertEqual(cached(server, "two", cache_salt="s"), 0)  # a guessed salt

    def test_a_rotated_key_keeps_its_blocks(self):
        keys = KeyFile("alice old\n")
        with serving(*keys.flags) as server:
            self.assertEqual(cached(server, "old"), 0)
            keys.write("alice new\nbob b\n")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: server.request("GET", "/v1/models", headers=bearer("new"))[0] == 200)
            self.assertEqual(server.request("GET", "/v1/models", headers=bearer("old"))[0], 401)
            self.assertGreater(cached(server, "new"), 0)
            self.assertEqual(cached(server, "b"), 0)

    def test_keys_can_share_cached_blocks(self):
        with serving("--api-key", "one", "--api-key", "two", "--share-prefix-cache") as server:
            self.assertEqual(cached(server, "one"), 0)
            self.assertGreater(cached(server, "two"), 0)

    def test_blocks_on_disk_belong_to_a_key(self):
        with tempfile.TemporaryDirectory() as folder:
            disk = ("--kv-disk", folder)
            with serving("--api-key", "one", "--api-key", "two", *disk) as server:
                cached(server, "one")
            with serving("--api-key", "two", "--api-key", "one", *disk) as server:  # in another order
                self.assertEqual(cached(server, "two"), 0)
                self.assertGreater(cached(server, "one"), 0)
            with serving(*disk) as server:
                self.assertEqual(cached(server, None), 0)
            files = b"".join(file.read_bytes() for file in pathlib.Path(folder).rglob("*") if file.is_file())
            self.assertNotIn(b"key:one", files)  # the key itself is not in the namespace


class Admins(unittest.TestCase):
    def test_operations_need_an_admin_key(self):
        with serving("--api-key", "user", "--admin-key", "boss") as server:
            for method, path in OPERATIONS:
                with self.subTest(path=path):
                    self.assertEqual(server.request(method, path)[0], 401)
                    status, answer = server.json(method, path, headers=bearer("user"))
                    self.assertEqual((status, answer["error"]["code"]), (403, "admin_key_needed"))
                    self.assertEqual(server.request(method, path, headers=bearer("boss"))[0], 200)
            self.assertEqual(server.json("POST", CHAT, chat("Hi", max_tokens=1), bearer("boss"))[0], 200)

    def test_the_error_explains_how_to_set_an_admin_key(self):
        with serving("--api-key", "user") as server:
            for method, path in OPERATIONS:
                status, answer = server.json(method, path, headers=bearer("user"))
                self.assertEqual(status, 403)
                self.assertIn("--admin-key", answer["error"]["message"])
                self.assertIn("role=admin", answer["error"]["message"])

    def test_without_keys_operations_are_open(self):
        with serving() as server:
            for method, path in OPERATIONS:
                self.assertEqual(server.request(method, path)[0], 200)

    def test_only_admins_overtake_other_keys(self):
        bodies = {CHAT: chat("Hi", max_tokens=1, priority=-1),
                  "/v1/completions": {"prompt": "Hi", "max_tokens": 1, "priority": -1},
                  "/v1/responses": {"input": "Hi", "max_output_tokens": 1, "priority": -1}}
        with serving("--api-key", "user", "--admin-key", "root") as server:
            for path, body in bodies.items():
                status, answer = server.json("POST", path, body, bearer("user"))
                self.assertEqual((status, answer["error"]["param"]), (400, "priority"), path)
                self.assertEqual(server.json("POST", path, body, bearer("root"))[0], 200)
                self.assertEqual(server.json("POST", path, {**body, "priority": 1}, bearer("user"))[0], 200)
        with serving() as server:
            self.assertEqual(server.json("POST", CHAT, bodies[CHAT])[0], 200)

    def test_usage_by_key_is_shown_to_admins(self):
        keys = KeyFile("alice a\nops o role=admin\n")
        with serving(*keys.flags) as server:
            prompt = server.json("POST", CHAT, chat("Hi", max_tokens=3, ignore_eos=True), bearer("a"))[1]["usage"]["prompt_tokens"]
            self.assertEqual(server.request("GET", "/metrics")[0], 200)
            for headers in (None, bearer("a"), bearer("wrong")):
                self.assertNotIn(b":key_", server.request("GET", "/metrics", headers=headers)[2])
            text = server.request("GET", "/metrics", headers=bearer("o"))[2].decode()
            self.assertIn('moesaic:key_requests_total{key="alice"} 1\n', text)
            self.assertIn(f'moesaic:key_prompt_tokens_total{{key="alice"}} {prompt}\n', text)
            self.assertIn('moesaic:key_generation_tokens_total{key="alice"} 3\n', text)
            self.assertIn('moesaic:key_requests_total{key="ops"} 0\n', text)


class Limits(unittest.TestCase):
    def test_requests_per_minute_are_limited(self):
        keys = KeyFile("alice a requests_per_minute=2\nbob b\n")
        with serving(*keys.flags) as server:
            hello = chat("Hi", max_tokens=1)
            status, headers, _ = server.request("POST", CHAT, hello, bearer("a"))
            self.assertEqual((status, headers["x-ratelimit-limit-requests"]), (200, "2"))
            self.assertNotIn("x-ratelimit-limit-tokens", headers)

            def limited():  # a slow machine may refill the bucket meanwhile
                return server.request("POST", CHAT, hello, bearer("a"))
            until(lambda: limited()[0] == 429)
            status, headers, text = limited()
            if status == 429:
                self.assertEqual(json.loads(text)["error"]["code"], "rate_limit_exceeded")
                self.assertGreaterEqual(int(headers["retry-after"]), 1)
                self.assertEqual(headers["x-ratelimit-remaining-requests"], "0")
                self.assertTrue(headers["x-ratelimit-reset-requests"])
            self.assertEqual(server.request("GET", "/v1/models", headers=bearer("a"))[0], 200)
            self.assertEqual(server.request("POST", CHAT, hello, bearer("b"))[0], 200)

    def test_tokens_per_minute_are_limited(self):
        keys = KeyFile("alice a tokens_per_minute=20\n")
        with serving(*keys.flags) as server:
            tale = chat("Tell me a story.", max_tokens=400, ignore_eos=True)
            status, headers, _ = server.request("POST", CHAT, tale, bearer("a"))
            self.assertEqual((status, headers["x-ratelimit-limit-tokens"]), (200, "20"))
            status, headers, text = server.request("POST", CHAT, tale, bearer("a"))  # 380 tokens of debt: 19 minutes
            self.assertEqual(status, 429, text)
            self.assertEqual(json.loads(text)["error"]["type"], "tokens")
            self.assertGreater(int(headers["retry-after"]), 60)

    def test_limits_are_reported_in_the_format_of_each_api(self):
        keys = KeyFile("alice a tokens_per_minute=1\n")
        with serving(*keys.flags) as server:
            body = {**chat("Hi"), "max_tokens": 1}
            self.assertEqual(server.request("POST", "/v1/messages", body, {"x-api-key": "a"})[0], 200)
            status, answer = server.json("POST", "/v1/messages", body, {"x-api-key": "a"})
            self.assertEqual((status, answer["error"]["type"]), (429, "rate_limit_error"))


class Files(unittest.TestCase):
    def test_a_bad_file_keeps_the_old_keys(self):
        keys = KeyFile("alice a\n")
        with serving(*keys.flags) as server:
            keys.write("alice a\nbob b role=king\n")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "line 2: role must be admin or user" in server.read_log())
            self.assertEqual(server.request("GET", "/v1/models", headers=bearer("a"))[0], 200)
            self.assertEqual(server.request("GET", "/v1/models", headers=bearer("b"))[0], 401)

    def test_a_bad_file_does_not_start(self):
        with self.assertRaises(AssertionError) as raised:
            with serving("--api-key-file", "/nowhere/keys"):
                pass
        self.assertIn("--api-key-file: ", str(raised.exception))
        for text, fault in [("", "no key"), ("alice\n", "line 1"), ("a k\nb k\n", "line 2")]:
            with self.assertRaises(AssertionError) as raised:
                with serving(*KeyFile(text).flags):
                    pass
            self.assertIn(fault, str(raised.exception))

    def test_warns_of_a_file_that_every_user_can_read(self):
        keys = KeyFile("alice a\n")
        os.chmod(keys.path, 0o644)
        with serving(*keys.flags) as server:
            self.assertIn("every user of this machine can read the keys", server.read_log())

    def test_the_case_of_the_scheme_is_ignored(self):
        with serving("--api-key", "one") as server:
            for scheme in ("Bearer", "bearer", "BEARER"):
                self.assertEqual(server.request("GET", "/v1/models", headers={"authorization": f"{scheme} one"})[0], 200)


if __name__ == "__main__":
    unittest.main()
