#!/usr/bin/env python3
"""Sends 2,000 requests and drops 90% of them at random moments, among slow, half-closed, huge and malformed ones. The server
must not crash, leak a block, leak memory on any rank, or change the answer of a live request.

MOESAIC_STORM_REQUESTS sets the number of requests, for sanitizer builds.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import unittest

import json_cases
from serving import ANSWER_SECONDS, ROOT, Server, chat, serving, until, wire

sys.path.insert(0, str(ROOT / "tests" / "support"))
from processes import children, memory_bytes  # noqa: E402

REQUESTS = int(os.environ.get("MOESAIC_STORM_REQUESTS", "2000"))
CONNECTIONS = 32
# Maximum growth of anonymous memory while the second half of the requests is served, of rank 0 and of another rank: 32 KiB and
# 16 KiB per request. Buffers have their final sizes by then, and a rank other than 0 receives only batches of tokens.
DRIVER_GROWTH, RANK_GROWTH = 32 << 20, 16 << 20
# Makes glibc return freed blocks of 128 KiB and more at once. By default it also keeps larger ones, such as bodies of 10 MB.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
# Session fields of the requests, true or not. None omits the field.
SESSIONS = [None, None, None, "continues", "ends", {}, {"state": "ends"}, {"tokens": 5, "returns_in": 2}, {"tokens": 1 << 40},
            {"returns_in": 1e9}, {"tokens": 0, "returns_in": 0.001}]
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]

MALFORMED = [*json_cases.malformed(), b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xc3\x28\"}]}", b"{\"prompt\":\"\xe2\x28\xa1\"}"]
# Well-formed JSON values that are no valid requests.
STRANGE = [b"null", b"true", b"0", b"-0.0e-0", b"\"\\ud800\"", b"[]", b"{}", b"{\"messages\":{}}", b"{\"prompt\":[[]]}",
           b"{\"messages\":[null]}", b"{\"prompt\":[true]}", b"{\"model\":7}", b"{\"messages\":[[[]]]}",
           b"{\"prompt\":[9999999999999999999999]}", b"{\"stop\":[[]],\"prompt\":\"x\"}"]


def reset(client):
    """Closes the connection with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


class Storm(unittest.TestCase):
    WEIGHTS = {"drop": 87, "half": 4, "slow": 0.5, "huge": 0.5, "malformed": 5, "strange": 3}  # percent of the requests

    def setUp(self):
        self.server = Server("--header-timeout", "5", "--max-queue", "64", *self.flags(), environment=ALLOCATION)
        self.faults = []
        self.served = 0

    def flags(self):
        return ()

    def check_half(self):
        """Reads values after half of the storm, while the server is quiet."""

    def check_quiet(self):
        """Checks conditions of one test after the storm."""

    def tearDown(self):
        code = self.server.stop()
        log = self.server.read_log()
        self.assertEqual(code, 0, log)
        self.assertNotIn("Sanitizer", log)

    def connect(self):
        client = socket.create_connection((self.server.host, self.server.port), timeout=ANSWER_SECONDS)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def status_of(self, client):
        answer = b""
        while b"\r\n" not in answer:
            piece = client.recv(65536)
            if not piece:
                return None
            answer += piece
        return int(answer.split(b" ", 2)[1])

    def body_of(self, random_):
        text = f"Tell me story number {random_.randrange(20)}. " * random_.choice([1, 1, 5, 40])
        path = random_.choice(PATHS)
        fields = {"stream": random_.random() < 0.6, "max_tokens": random_.choice([4, 40, 400]),
                  "temperature": random_.choice([0, 1])}
        if path in ("/v1/chat/completions", "/v1/completions") and random_.random() < 0.2:
            fields["n"] = 3
        if (session := random_.choice(SESSIONS)) is not None:
            fields["session"] = session
        if path == "/v1/responses":
            fields["max_output_tokens"] = fields.pop("max_tokens")
            return path, {**fields, "input": text}
        if path == "/v1/completions":
            return path, {**fields, "prompt": text}
        return path, chat(text, **fields)

    def abuse(self, kind, random_):
        if kind == "drop":
            path, fields = self.body_of(random_)
            request = wire(path, json.dumps(fields).encode())
            client = self.connect()
            if random_.random() < 0.15:
                request = request[:random_.randrange(len(request))]  # leaves while it still sends
            client.sendall(request)
            time.sleep(random_.choice([0, 0, 0.005, 0.05, 0.3]))
            if random_.random() < 0.3:
                client.settimeout(0.2)
                try:
                    client.recv(random_.choice([1, 100, 5000]))
                except TimeoutError:
                    pass
            if random_.random() < 0.3:
                client.shutdown(socket.SHUT_WR)
            reset(client) if random_.random() < 0.5 else client.close()
        elif kind == "slow":
            client = self.connect()
            for byte in b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n":
                try:
                    client.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.2)
            client.close()
        elif kind == "half":  # ends its sending side, and waits for the answer or leaves before it
            path, fields = self.body_of(random_)
            client = self.connect()
            client.sendall(wire(path, json.dumps({**fields, "ignore_eos": True}).encode()))
            time.sleep(random_.choice([0, 0.02, 0.2]))
            client.shutdown(socket.SHUT_WR)
            leaves = random_.random() < 0.5
            while client.recv(65536) and not leaves:
                pass
            client.close()
        elif kind == "huge":
            client = self.connect()
            text = json.dumps({"prompt": "word " * 2_000_000, "max_tokens": 1}).encode()  # 10 MB; more than the context
            try:
                client.sendall(wire("/v1/completions", text))
                status = self.status_of(client)
                if status not in (400, 503):  # 503: too many such bodies at once
                    self.faults.append(f"10 MB prompt: {status}")
            except OSError as error:
                self.faults.append(f"10 MB prompt: {error}")
            client.close()
        else:
            body = random_.choice(MALFORMED if kind == "malformed" else STRANGE)
            path = random_.choice(PATHS + ["/tokenize", "/detokenize", "/v1/embeddings"])
            if b'"stop"' in body:
                path = PATHS[1]  # other endpoints may not have this field
            client = self.connect()
            client.sendall(wire(path, body))
            status = self.status_of(client)
            if status != 400:
                self.faults.append(f"{body[:40]!r}: {status}")
            client.close()

    def send(self, number):
        """Sends the request of this number."""
        random_ = random.Random(number)
        kind, = random_.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))
        try:
            self.abuse(kind, random_)
        except OSError as error:
            if kind not in ("drop", "half"):  # these may receive resets
                self.faults.append(f"{kind}: {error}")

    def live(self, stop, expected):
        """Repeats one request, whose answer must not change. A full queue is allowed."""
        served = self.served
        while not stop.is_set() or self.served == served:
            try:
                status, answer = self.server.json("POST", PATHS[0], chat("What is the capital of France?", temperature=0))
            except OSError as error:
                self.faults.append(f"live request: {error}")
                return
            if status == 429:
                time.sleep(0.05)
                continue
            if status != 200 or answer["choices"][0]["message"]["content"] != expected:
                self.faults.append(f"live request: {status} {answer}")
                return
            self.served += 1

    def storm(self, numbers, expected):
        """Sends the requests of these numbers while live ones are answered, and waits until the server is quiet."""
        stop = threading.Event()
        live = threading.Thread(target=self.live, args=(stop, expected))
        live.start()
        try:
            # 90% are dropped or half-closed. The others run to their end, as do the live requests.
            with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as pool:
                for _ in pool.map(self.send, numbers):
                    pass
        finally:
            stop.set()
            live.join()
        self.assertEqual(self.faults, [])
        self.server.wait_until_quiet()
        until(lambda: self.server.metric("moesaic:http_connections") == 1)  # that of this request

    def test_live_requests_are_answered_during_a_storm(self):
        expected = self.server.json("POST", PATHS[0], chat("What is the capital of France?", temperature=0))
        expected = expected[1]["choices"][0]["message"]["content"]
        self.storm(range(REQUESTS // 2), expected)
        self.check_half()
        self.storm(range(REQUESTS // 2, REQUESTS), expected)
        self.assertEqual(self.server.json("GET", "/state")[1]["kv"]["used_blocks"], 0)
        self.check_quiet()
        errors = [name for name in self.server.metrics() if name.startswith("moesaic:http_requests_total") and 'status="5' in name
                  and 'status="503"' not in name]
        self.assertEqual(errors, [])
        print(f"{REQUESTS} abused, {self.served} live requests unaffected")


class StormOverTiers(Storm):
    """The same storm with a cache that is far too small and evicts blocks to a warm tier and to a disk."""

    def flags(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return ("--kv-memory", "2MiB", "--ctx-size", "2048", "--kv-warm-memory", "512KiB", "--kv-disk", folder.name,
                "--kv-disk-size", "16MiB", "--swap-space", "1MiB")

    def check_quiet(self):
        for used in ("evicted_blocks", "warm_stored_blocks", "disk_written_blocks"):
            self.assertGreater(self.server.metric(f"moesaic:kv_{used}_total"), 0)
        self.assertEqual(self.server.metric("moesaic:kv_disk_write_errors_total"), 0)
        self.assertEqual(self.server.json("POST", "/reset_prefix_cache", {})[0], 200)
        until(lambda: self.server.metric("moesaic:kv_warm_blocks") == 0)  # the engine's next step clears the tier


class StormOverRanks(Storm):
    """The same storm with the model on four processes, and a cache that preempts requests to the swap space."""
    REPLICAS = 0  # number of replicas that /metrics has

    def flags(self):
        return ("-tp", "2", "-pp", "2", "--dtype", "f32", "--kv-memory", "1MiB", "--ctx-size", "2048", "--swap-space", "1MiB",
                "--kv-warm-memory", "512KiB")

    def memory(self):
        """Returns the anonymous memory of each rank's process, or nothing in a build with a sanitizer. A sanitizer delays frees, and
        maps terabytes of addresses."""
        ranks = [self.server.process.pid, *children(self.server.process.pid)]
        self.assertGreater(len(ranks), 1)
        if memory_bytes(ranks[0], "VmSize") > 1 << 40:
            print("not compared in a build with a sanitizer: the memory of ranks")
            return []
        return [memory_bytes(pid, "RssAnon") for pid in ranks]

    def check_half(self):
        self.half = self.memory()

    def check_quiet(self):
        for rank, (before, after) in enumerate(zip(self.half, self.memory(), strict=True)):
            print(f"rank {rank}: {before / 2**20:.1f} MiB after half of the storm, {after / 2**20:.1f} MiB after it")
            self.assertLess(after - before, RANK_GROWTH if rank > 0 else DRIVER_GROWTH, f"rank {rank}")
        # The driver has the block tables of all ranks of a replica. A slot of the swap space is one on each of them.
        metrics = self.server.metrics()
        self.assertEqual(metrics['moesaic:swap_blocks{state="used"}'], 0)
        used = [value for name, value in metrics.items() if name.startswith("moesaic:replica_kv_blocks") and 'state="used"' in name]
        self.assertEqual(used, [0] * self.REPLICAS)


class StormOverTwoShards(StormOverRanks):
    """The same storm with two tensor parallel processes, without requests that wait for HTTP's time limits or fill its buffers."""
    WEIGHTS = {"drop": 88, "half": 4, "malformed": 5, "strange": 3}

    def flags(self):
        return "-tp", "2", "--kv-memory", "1MiB", "--ctx-size", "2048", "--swap-space", "1MiB", "--kv-warm-memory", "512KiB"


class StormOverReplicas(StormOverRanks):
    """The same storm with two replicas of two processes each."""
    REPLICAS = 2

    def flags(self):
        return ("-dp", "2", "-tp", "2", "--kv-memory", "1MiB", "--ctx-size", "2048", "--swap-space", "1MiB",
                "--kv-warm-memory", "512KiB")


class StormOverExperts(StormOverRanks):
    """The same storm with two replicas that divide the experts."""
    REPLICAS = 2

    def flags(self):
        return ("-dp", "2", "-ep", "--kv-memory", "1MiB", "--ctx-size", "2048", "--swap-space", "1MiB", "--kv-warm-memory", "512KiB")


class Killed(unittest.TestCase):
    def test_a_killed_server_leaves_no_file_and_no_port(self):
        """Kills the server while requests of every kind run. A new server takes the port at once, and no file remains."""
        with tempfile.TemporaryDirectory() as folder:
            def shared():
                return {path.name for path in pathlib.Path("/dev/shm").glob("*moesaic*")}
            before = shared()
            address = "--host", "127.0.0.3"  # no other test uses a port of this address
            server = Server(*address, environment={"TMPDIR": folder})
            clients = []
            for path, fields in [(PATHS[0], chat("Tell me a story.", stream=True, n=16)), (PATHS[1], {"prompt": "x", "n": 16}),
                                 (PATHS[3], {"input": "x", "stream": True})] * 8:
                client = socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS)
                client.sendall(wire(path, json.dumps({**fields, "ignore_eos": True, "max_tokens": 3000}).encode()))
                clients.append(client)
            until(lambda: server.metric("vllm:num_requests_running") >= 8)
            self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
            self.assertEqual((list(pathlib.Path(folder).iterdir()), shared() - before), ([], set()))
            with serving(*address, port=server.port) as again:
                status, answer = again.json("POST", PATHS[0], chat("What is the capital of France?", temperature=0))
                self.assertEqual((status, "Paris" in answer["choices"][0]["message"]["content"]), (200, True))
                self.assertEqual(again.metric("vllm:kv_cache_usage_perc"), 0)
            for client in clients:
                client.close()


if __name__ == "__main__":
    unittest.main()
