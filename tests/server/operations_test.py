#!/usr/bin/env python3
"""Tests the server's interfaces for operators: signals, logs, process metrics, the service manager."""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from serving import ANSWER_SECONDS, BINARY, MODEL, KeyFile, Server, chat, serving, until, wire

CHAT = "/v1/chat/completions"
TALE = {"max_tokens": 4000, "ignore_eos": True, "stream": True}


class Signals(unittest.TestCase):
    def test_a_hang_up_reloads_and_does_not_stop_the_server(self):
        with serving() as server:
            for round in range(1, 4):  # three signals would end a process that treats them as interrupts
                server.process.send_signal(signal.SIGHUP)
                until(lambda: server.read_log().count("SIGHUP: ") >= round)
            self.assertEqual(server.json("POST", CHAT, chat("Hi", max_tokens=4))[0], 200)

    def cut(self, path, body):
        """Returns the answer to a stream that the drain deadline ends, or None if it was complete before."""
        server = Server("--drain-timeout", "0")
        with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
            client.sendall(wire(path, json.dumps(body).encode(), b"connection: close\r\n"))
            text = b""
            while b"delta" not in text and b'"text"' not in text:
                piece = client.recv(65536)
                self.assertTrue(piece, text)
                text += piece
            server.process.send_signal(signal.SIGTERM)
            while piece := client.recv(65536):
                text += piece
        self.assertEqual(server.stop(), 0, server.read_log())
        return text.decode() if "drain deadline reached" in server.read_log() else None

    def cut_stream(self, path, body):
        found = []

        def tried():
            found.append(self.cut(path, body))
            # The test tries again if the answer ended by itself just before the deadline.
            return found[-1] is not None and "shutting down" in found[-1]
        until(tried)
        text = found[-1]
        self.assertTrue(text.endswith("0\r\n\r\n"), text[-300:])  # the last chunk completes the answer
        return text

    def test_a_stream_that_meets_the_drain_deadline_ends_with_an_error(self):
        for path, body in [(CHAT, chat("Tell me a story.", n=16, **TALE)),
                           ("/v1/completions", {"prompt": "Once", "n": 16, **TALE})]:
            text = self.cut_stream(path, body)
            error, done = re.findall(r"^data: (.*)$", text, re.M)[-2:]
            self.assertEqual(done.strip(), "[DONE]")
            error = json.loads(error)["error"]
            self.assertEqual(error["type"], "service_unavailable_error")
            self.assertIn("shutting down", error["message"])

    def test_anthropics_stream_ends_with_an_error_of_its_own_format(self):
        text = self.cut_stream("/v1/messages", {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4000,
                                                "stream": True, "ignore_eos": True})
        self.assertIn("event: error\n", text)
        error = json.loads(re.findall(r"^data: (.*)$", text, re.M)[-1])
        self.assertEqual((error["type"], error["error"]["type"]), ("error", "overloaded_error"))

    def test_a_stream_of_responses_ends_with_a_failed_response(self):
        text = self.cut_stream("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 4000, "stream": True,
                                                 "ignore_eos": True})
        last = json.loads(re.findall(r"^data: (\{.*)$", text, re.M)[-1])
        self.assertEqual((last["type"], last["response"]["status"]), ("response.failed", "failed"))
        self.assertIn("shutting down", last["response"]["error"]["message"])

    def test_a_complete_answer_reaches_a_slow_client(self):
        item = {"type": "message", "role": "user", "content": "x" * (12 << 20)}
        server = Server()
        status, talk = server.json("POST", "/v1/conversations", {"items": [item]})
        self.assertEqual(status, 200, talk)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(ANSWER_SECONDS)
            client.connect((server.host, server.port))
            client.sendall(f"GET /v1/conversations/{talk['id']}/items HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            text = client.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "draining" in server.read_log())
            time.sleep(0.5)  # a server that does not wait for the client closes the connection meanwhile
            while piece := client.recv(1 << 20):
                text += piece
        head, body = text.split(b"\r\n\r\n", 1)
        self.assertEqual(len(body), int(re.search(rb"content-length: (\d+)", head)[1]))
        self.assertEqual(server.stop(), 0)

    def test_an_answer_that_does_not_stream_gets_503(self):
        def tried():
            server = Server("--drain-timeout", "0")
            with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
                client.sendall(wire(CHAT, json.dumps(chat("Hi", n=64, max_tokens=4000, ignore_eos=True)).encode()))
                until(lambda: server.metric("vllm:num_requests_running") > 0)
                server.process.send_signal(signal.SIGTERM)
                head = client.recv(65536)
            self.assertEqual(server.stop(), 0)
            return head.startswith(b"HTTP/1.1 503 ") and b"shutting down" in head
        until(tried)


class Logs(unittest.TestCase):
    def server(self, *flags):
        return Server(*flags, access_log=True)

    def stopped(self, server):
        self.assertEqual(server.stop(), 0, server.read_log())
        return server.log.splitlines()

    def test_every_request_has_an_id_and_a_line(self):
        server = self.server("--api-key", "one", "--max-body", "1KiB", "--log-format", "json")
        key = {"authorization": "Bearer one"}
        asked = {}
        for name, (method, path, body, headers) in {
                "ok": ("POST", CHAT, chat("Hi", max_tokens=1), key),
                "401": ("GET", "/v1/models", None, {}),
                "403": ("GET", "/state", None, key),
                "404": ("GET", "/nowhere", None, {}),
                "405": ("PUT", "/health", None, {}),
                "413": ("POST", CHAT, b" " * 4096, key),
                "415": ("POST", CHAT, b"{}", {**key, "content-type": "text/plain"}),
                "421": ("GET", "/health", None, {"host": "evil.example"}),
                "431": ("GET", "/health", None, {"x": "y" * 40_000})}.items():
            status, answered, _ = server.request(method, path, body, headers)
            self.assertEqual(status, 200 if name == "ok" else int(name))
            asked[name] = {key.lower(): value for key, value in answered.items()}["x-request-id"]
        with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
            client.sendall(b"this is no HTTP\r\n\r\n")
            answer = client.recv(4096).decode()
            asked["400"] = re.search(r"x-request-id: (\S+)", answer)[1]
        given = server.request("GET", "/nowhere", headers={"x-request-id": "mine-1"})[1]
        self.assertEqual(given["x-request-id"], "mine-1")
        lines = [json.loads(line) for line in self.stopped(server)]  # every line is JSON
        by_id = {line["request_id"]: line for line in lines if line.get("event") == "request"}
        self.assertIn("mine-1", by_id)
        for name, id_ in asked.items():
            with self.subTest(name):
                line = by_id[id_]
                self.assertEqual(line["status"], 200 if name == "ok" else int(name))
                self.assertEqual(bool(line.get("refused")), name != "ok")
                self.assertEqual(line["peer"], "127.0.0.1")
        self.assertEqual((by_id[asked["ok"]]["key"], by_id[asked["ok"]]["path"]), ("api-key-1", CHAT))
        self.assertTrue(all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", line["time"]) for line in lines))
        self.assertTrue(any("draining" in line.get("message", "") for line in lines))

    def test_a_request_beyond_the_limit_of_its_key_has_an_id_and_a_line(self):
        server = self.server(*KeyFile("alice secret requests_per_minute=1\n").flags, "--log-format", "json")
        refused = []

        def limited():  # a slow machine may refill the bucket meanwhile
            status, headers, _ = server.request("POST", CHAT, chat("Hi", max_tokens=1), {"authorization": "Bearer secret"})
            refused.append(headers["x-request-id"])
            return status == 429
        until(limited)
        lines = [json.loads(line) for line in self.stopped(server)]
        (line,) = (line for line in lines if line.get("request_id") == refused[-1] and line.get("event") == "request")
        self.assertEqual((line["status"], line["key"]), (429, "alice"))
        self.assertTrue(line["refused"])

    def test_polling_is_left_out_unless_wanted(self):
        for mode, health, models in [(None, False, True), ("all", True, True), ("off", False, False)]:
            server = self.server(*(["--access-log", mode] if mode else []))
            for path in ("/health", "/ready", "/metrics", "/state", "/v1/models"):
                self.assertEqual(server.request("GET", path)[0], 200)
            log = "\n".join(self.stopped(server))
            with self.subTest(mode=mode):
                self.assertEqual("GET /health 200" in log, health, log)
                self.assertEqual("GET /state 200" in log, health, log)
                self.assertEqual("GET /v1/models 200" in log, models, log)

    def test_the_log_level_hides_lower_levels(self):
        server = self.server("--log-level", "warning")
        server.request("GET", "/v1/models")
        self.assertEqual(self.stopped(server), [])

    def test_texts_of_clients_forge_no_lines(self):
        with serving("--log-level", "debug") as server:
            body = chat("Hi", max_tokens=1, guided_json={"type": "x\nforged line \x1b[31m \u009b31m \u00e9"})
            self.assertEqual(server.json("POST", CHAT, body)[0], 400)
            until(lambda: "forged line" in server.read_log())
            self.assertIn("x\\nforged line \\x1b[31m \\x9b31m \u00e9\n", server.read_log())

    def test_the_log_follows_loading_generations_and_draining(self):
        server = self.server("--log-level", "debug")
        self.assertEqual(server.json("POST", CHAT, chat("Hi", max_tokens=1))[0], 200)

        def left():
            with server.holding():
                pass
            server.wait_until_quiet()
            return "client left after" in server.read_log()
        until(left)
        log = "\n".join(self.stopped(server))
        for part in ("read the tokenizer in ", "requests get 503 until the model is loaded", " of weights in ", "ready after ",
                     "accepted a connection", "POST /v1/chat/completions of 127.0.0.1 with ", "submitted 1 choices with ",
                     "first token of choice 0 after ", "choice 0 ended after ", "; cancelled ", "draining: at most ",
                     "drained: all answers ended after ", "engine idle after ", "stopped"):
            self.assertIn(part, log)

    def test_the_log_follows_preemption_and_tiers(self):
        def prompt(seed, length):
            return [(i * i * 3 + 11 * i + seed * 97) % 900 + 5 for i in range(length)]

        def complete(server, prompts, tokens):
            fields = {"prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            self.assertEqual(server.json("POST", "/v1/completions", fields)[0], 200)
        with tempfile.TemporaryDirectory() as folder:
            flags = ("--log-level", "debug", "--kv-memory", "512KiB", "--ctx-size", 600, "--kv-disk", folder, "--kv-disk-size", "64MiB")
            server = self.server(*flags, "--swap-space", "512KiB", "--kv-warm-memory", "4MiB")
            complete(server, [prompt(seed, 100) for seed in range(3)], 400)  # more than the cache holds at once
            for seed in (3, 4, 5, 3):
                complete(server, prompt(seed, 500), 1)
            first = "\n".join(self.stopped(server))
            server = self.server(*flags)
            complete(server, prompt(3, 500), 1)
            second = "\n".join(self.stopped(server))
        for pattern in (r"\[info\] the KV cache is full: preempted \d+ requests, \d+ run and \d+ wait",
                        r"request \d+: queued as engine request \d+", r"engine request \d+: admitted with 0 of 100 tokens cached",
                        r"engine request \d+: preempted with \d+ of \d+ tokens computed",
                        r"engine request \d+: resumed with \d+ of \d+ tokens cached",
                        r"swap: engine request \d+: (parked \d+ blocks|computing \d+ tokens again is faster)",  # by the machine's speed
                        r"evicted \d+ blocks of the prefix cache", r"warm tier: stored \d+ evicted blocks",
                        r"warm tier: engine request \d+: restoring \d+ blocks", r"KV blocks on disk: storing \d+ blocks of \d+ requests"):
            self.assertRegex(first, pattern)
        for pattern in (r"KV blocks on disk: engine request \d+: loading 7 blocks", r"engine request \d+: loaded 7 blocks",
                        r"engine request \d+: admitted with 448 of 500 tokens cached"):
            self.assertRegex(second, pattern)

    def test_a_rotated_file_is_opened_again(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "serve.log"
            server = self.server("--log-file", path)
            server.request("GET", "/v1/models")
            until(lambda: "GET /v1/models" in path.read_text())
            old = path.rename(path.with_suffix(".1"))
            server.process.send_signal(signal.SIGHUP)
            until(lambda: path.exists() and "reloaded --log-file" in path.read_text())
            before = old.read_text()
            server.request("GET", "/nowhere")
            until(lambda: "GET /nowhere 404" in path.read_text())
            self.assertEqual(old.read_text(), before)
            os.chmod(path, 0o400)
            self.assertEqual(self.stopped(server), [])  # all lines are in the file
        bad = subprocess.run([str(BINARY), "serve", str(MODEL), "--log-file", "/nowhere/x.log"], capture_output=True, text=True)
        self.assertEqual(bad.returncode, 1)
        self.assertIn("--log-file /nowhere/x.log: No such file", bad.stderr)


class Process(unittest.TestCase):
    def test_raises_the_limit_of_open_files(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))  # the server inherits it
        try:
            server = Server("--max-connections", 100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.assertGreaterEqual(server.metric("process_max_fds"), 612 if hard == resource.RLIM_INFINITY else min(hard, 612))
        self.assertEqual(server.stop(), 0)

    def test_metrics_describe_the_process(self):
        with serving() as server:
            values = server.metrics()
            status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
            resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
            self.assertGreater(values["process_resident_memory_bytes"], resident / 4)
            self.assertLess(values["process_resident_memory_bytes"], resident * 4)
            self.assertGreaterEqual(values["process_virtual_memory_bytes"], values["process_resident_memory_bytes"])
            self.assertGreater(values["process_cpu_seconds_total"], 0)
            descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
            self.assertLess(abs(values["process_open_fds"] - descriptors), 10)
            self.assertGreaterEqual(values["process_max_fds"], values["process_open_fds"])
            self.assertLess(abs(values["process_start_time_seconds"] - time.time()), 600)


class Manager:
    """The socket of a service manager."""

    def __init__(self, **environment):
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.settimeout(ANSWER_SECONDS)
        self.environment = {"NOTIFY_SOCKET": path, **environment}

    def until(self, state):
        """Returns all datagrams up to the one that begins with `state`."""
        got = []
        while not got or not got[-1].startswith(state):
            got.append(self.socket.recv(4096).decode())
        return got

    def close(self):
        self.socket.close()
        self.folder.cleanup()


class Service(unittest.TestCase):
    def manager(self, **environment):
        manager = Manager(**environment)
        self.addCleanup(manager.close)
        return manager

    def test_reports_its_state(self):
        manager = self.manager()
        with serving(environment=manager.environment) as server:
            self.assertEqual(manager.until("READY=1")[0], "STATUS=loading the model")
            self.assertEqual(server.request("GET", "/health")[0], 200)
            server.process.send_signal(signal.SIGHUP)
            self.assertIn("MONOTONIC_USEC=", manager.until("RELOADING=1")[-1])
            manager.until("READY=1")
            server.process.send_signal(signal.SIGTERM)
            manager.until("STOPPING=1")

    def test_feeds_the_watchdog(self):
        manager = self.manager(WATCHDOG_USEC="400000")
        with serving(environment=manager.environment) as server:
            for _ in range(3):  # idle
                manager.until("WATCHDOG=1")
            with server.holding():
                for _ in range(3):  # while requests run
                    manager.until("WATCHDOG=1")


class ModelFailures(unittest.TestCase):
    """A model whose logits are not finite."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for path in MODEL.glob("*.json"):
            shutil.copy(path, self.folder)
        data = bytearray((MODEL / "model.safetensors").read_bytes())
        size = int.from_bytes(data[:8], "little")
        begin, end = json.loads(data[8:8 + size])["model.norm.weight"]["data_offsets"]
        data[8 + size + begin:8 + size + end] = b"\xc0\x7f" * ((end - begin) // 2)  # NaN of bf16
        (self.folder / "model.safetensors").write_bytes(data)

    def test_answers_streams_and_metrics_name_the_model(self):
        with serving(model=self.folder) as server:
            body = chat("Hi", max_tokens=2)
            status, answer = server.json("POST", CHAT, body)
            self.assertEqual((status, answer["error"]["code"], answer["error"]["type"]), (500, "model_failed", "server_error"))
            self.assertIn("the model failed: ", answer["error"]["message"])
            stream = server.request("POST", CHAT, {**body, "stream": True})[2].decode()
            events = re.findall(r"^data: (.*)$", stream, re.M)
            self.assertEqual((json.loads(events[0])["error"], events[1:]), (answer["error"], ["[DONE]"]))
            stream = server.request("POST", "/v1/messages", {**body, "stream": True})[2].decode()
            error = json.loads(re.search(r"^event: error\ndata: (.*)$", stream, re.M)[1])["error"]
            self.assertEqual(error, {"type": "api_error", "message": answer["error"]["message"]})
            self.assertEqual(server.metric("moesaic:request_failures_total"), 3)
            self.assertEqual(server.metrics()['moesaic:request_failures_total{cause="model",model_name="%s"}' % self.folder.name], 3)


if __name__ == "__main__":
    unittest.main()
