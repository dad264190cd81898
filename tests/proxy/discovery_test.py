#!/usr/bin/env python3
"""Engines that the proxy finds itself: names of a name server, and keys of etcd. They come and go under traffic."""
import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import unittest

from proxying import HOST, WAIT_SECONDS, Proxy, ProxyTest, attempt, main, request, together, tokens, until


def loopback(number):
    """One of three loopback addresses of this process."""
    first, second, rest = HOST.split(".", 2)
    return f"{first}.{int(second) + 64 * (number - 1)}.{rest}"


class NameServer:
    """Answers questions of type A from `records`: a name and its addresses, or an error code."""

    def __init__(self):
        self.records, self.asked = {}, 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((HOST, 0))
        self.address = f"{HOST}:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                question, client = self.socket.recvfrom(512)
            except OSError:
                return
            labels, at = [], 12
            while question[at]:
                labels.append(question[at + 1:at + 1 + question[at]].decode())
                at += question[at] + 1
            kind = struct.unpack(">H", question[at + 1:at + 3])[0]
            found = self.records.get(".".join(labels), 3)
            code, addresses = (found, []) if isinstance(found, int) else (0, found if kind == 1 else [])
            self.asked += 1
            answers = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(a) for a in addresses)
            self.socket.sendto(question[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(addresses), 0, 0) + question[12:at + 5] + answers,
                               client)

    def stop(self):
        self.socket.close()


class Etcd:
    """etcd in a process of its own."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="moesaic-etcd-")
        ports = []
        for _ in range(2):
            with socket.create_server((HOST, 0)) as free:
                ports.append(free.getsockname()[1])
        self.client, self.peer = (f"http://{HOST}:{port}" for port in ports)
        self.port = ports[0]
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [shutil.which("etcd"), "--data-dir", self.folder, "--listen-client-urls", self.client, "--advertise-client-urls", self.client,
             "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer, "--initial-cluster", f"default={self.peer}",
             "--unsafe-no-fsync"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.healthy, what=lambda: "etcd")

    def healthy(self):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return request(HOST, self.port, "GET", "/health")[0] == 200
        return False

    def call(self, path, body):
        status, _, text = request(HOST, self.port, "POST", path, body)
        assert status == 200, text
        return json.loads(text)

    def put(self, key, value, lease=None):
        encoded = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value.encode()).decode()}
        self.call("/v3/kv/put", encoded | ({"lease": lease} if lease else {}))

    def delete(self, key):
        self.call("/v3/kv/deleterange", {"key": base64.b64encode(key.encode()).decode()})

    def compact(self):
        revision = self.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self.call("/v3/kv/compaction", {"revision": revision, "physical": True})

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def stop(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Traffic:
    """Clients that send requests until the end of the block. Every answer must be 200."""

    def __init__(self, proxy, count=3):
        self.proxy, self.statuses, self.stop = proxy, [], threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(count)]

    def run(self, seed):
        while not self.stop.is_set():
            self.statuses.append(self.proxy.complete(prompt=tokens(seed, 64), max_tokens=4)[0])
            seed += 10

    def more(self):
        done = len(self.statuses)
        until(lambda: len(self.statuses) > done + 6)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()


class Discovered(ProxyTest):
    def enabled(self, proxy):
        return {e["url"] for e in proxy.state()["engines"] if e["state"] == "enabled"}

    def await_engines(self, proxy, urls):
        until(lambda: self.enabled(proxy) == set(urls), what=lambda: (urls, proxy.state()["engines"], proxy.log()[-2000:]))


class Names(Discovered):
    def setUp(self):
        super().setUp()
        self.names = NameServer()
        self.addCleanup(self.names.stop)
        # Engines of one name have one port.
        self.engines = [self.mock(host=loopback(0))]
        self.engines += [self.mock(host=loopback(i), port=self.engines[0].port) for i in (1, 2)]
        self.addresses = [loopback(i) for i in range(3)]
        self.urls = [f"http://{address}:{self.engines[0].port}" for address in self.addresses]
        self.http = f"resolver {self.names.address} ipv6=off valid=1s; resolver_timeout 2s;"

    def pool(self, options=""):
        return f"engine http://engines.test:{self.engines[0].port} resolve {options}; health off;"

    def test_follows_the_addresses_of_a_name_under_traffic(self):
        self.names.records["engines.test"] = self.addresses[:2]
        proxy = self.proxy(self.pool(), http=self.http)
        self.await_engines(proxy, self.urls[:2])
        with Traffic(proxy) as traffic:
            for some in ([0], [0, 2], [1, 2]):
                self.names.records["engines.test"] = [self.addresses[i] for i in some]
                self.await_engines(proxy, [self.urls[i] for i in some])
                traffic.more()
            until(lambda: all(engine.state()["served"] > 0 for engine in self.engines))
        self.assertEqual(set(traffic.statuses), {200})
        proxy.idle()

    def test_keeps_engines_while_the_name_server_fails_and_over_reloads(self):
        self.names.records["engines.test"] = self.addresses[:2]
        proxy = self.proxy(self.pool(), http=self.http)
        self.await_engines(proxy, self.urls[:2])
        self.names.records["engines.test"] = 2  # the server's failure
        asked = self.names.asked
        until(lambda: self.names.asked > asked + 2)
        proxy.reload(self.pool("max_requests=4"))
        self.assertEqual(self.enabled(proxy), set(self.urls[:2]))
        self.assertEqual(together(6, lambda i: proxy.complete(prompt=tokens(i, 64), max_tokens=1)[0]), [200] * 6)
        self.assertGreater(proxy.metric("moesaic_proxy_discovery_errors_total"), 0)
        del self.names.records["engines.test"]  # there is no such name: no engine is left
        self.await_engines(proxy, [])
        self.names.records["engines.test"] = self.addresses[2:]
        self.await_engines(proxy, self.urls[2:])
        self.assertEqual(proxy.complete(prompt="a", max_tokens=1)[0], 200)

    def test_a_prefix_of_etcd_is_listed_once(self):
        with self.assertRaises(ValueError) as caught:
            Proxy("etcd /e/ http://127.0.0.1:1; etcd /e/ http://127.0.0.1:2;")
        self.assertIn("listed twice", str(caught.exception))

    def test_a_name_needs_a_resolver(self):
        with self.assertRaises(ValueError) as caught:
            Proxy(self.pool())
        self.assertIn("resolver", str(caught.exception))


@unittest.skipUnless(shutil.which("etcd"), "SKIPPED: etcd is not installed (Debian: etcd-server)")
class Keys(Discovered):
    def setUp(self):
        super().setUp()
        self.etcd = Etcd()
        self.addCleanup(self.etcd.stop)

    def test_follows_keys_under_traffic_and_survives_restarts(self):
        engines = [self.mock() for _ in range(3)]
        urls = [engine.url for engine in engines]
        self.etcd.put("/engines/a", urls[0])
        self.etcd.put("/other", urls[2])
        # The first member does not answer.
        proxy = self.proxy(f"etcd /engines/ http://{HOST}:1 {self.etcd.client}; health off;")
        self.await_engines(proxy, urls[:1])
        with Traffic(proxy) as traffic:
            self.etcd.put("/engines/b", urls[1] + " max_requests=7")
            self.await_engines(proxy, urls[:2])
            traffic.more()
            self.etcd.delete("/engines/a")
            self.await_engines(proxy, urls[1:2])
            traffic.more()
            self.etcd.kill()
            traffic.more()
            self.assertEqual(self.enabled(proxy), set(urls[1:2]))
            self.etcd.start()
            self.etcd.put("/engines/c", urls[2])
            self.await_engines(proxy, urls[1:])
            self.etcd.compact()
            self.etcd.put("/engines/a", urls[0])
            self.await_engines(proxy, urls)
            traffic.more()
        self.assertEqual(set(traffic.statuses), {200})
        proxy.idle()

    def test_forgets_engines_whose_lease_expires(self):
        engine = self.mock()
        proxy = self.proxy(f"etcd /e/ {self.etcd.client};")
        lease = self.etcd.call("/v3/lease/grant", {"TTL": 2})["ID"]
        self.etcd.put("/e/a", engine.url, lease)

        def is_there():
            self.etcd.call("/v3/lease/keepalive", {"ID": lease})
            return self.enabled(proxy) == {engine.url}
        until(is_there, what=proxy.log)
        self.await_engines(proxy, [])

    def test_reports_values_that_are_not_engines(self):
        engine = self.mock()
        proxy = self.proxy(f"etcd /e/ {self.etcd.client};")
        self.etcd.put("/e/wrong", "ftp://x")
        self.etcd.put("/e/name", "http://some.name:1")
        self.etcd.put("/e/role", f"http://{HOST}:1 role=prefill")
        self.etcd.put("/e/right", engine.url)
        self.await_engines(proxy, [engine.url])
        log = proxy.log()
        for key, fault in (("wrong", "URL"), ("name", "resolve"), ("role", "transfer")):
            self.assertRegex(log, f"'/e/{key}' in etcd is no engine: .*{fault}")
        # A key whose value becomes wrong keeps its engine.
        self.etcd.put("/e/right", "ftp://y")
        until(lambda: "'/e/right' in etcd is no engine" in proxy.log(), what=proxy.log)
        self.assertEqual(self.enabled(proxy), {engine.url})
        self.etcd.delete("/e/right")
        self.await_engines(proxy, [])

    def test_a_name_without_an_answer_keeps_no_engines_of_other_keys(self):
        engine = self.mock()
        names = NameServer()
        self.addCleanup(names.stop)
        names.records["engines.test"] = 2  # the server's failure
        proxy = self.proxy(f"etcd /e/ {self.etcd.client}; health off;", http=f"resolver {names.address} ipv6=off;")
        self.etcd.put("/e/name", f"http://engines.test:{engine.port} resolve")
        self.etcd.put("/e/a", engine.url)
        self.await_engines(proxy, [engine.url])
        self.etcd.delete("/e/a")
        self.await_engines(proxy, [])

    def test_leaves_out_engines_without_room_until_there_is_room(self):
        engines = [self.mock() for _ in range(3)]
        for i, engine in enumerate(engines):
            self.etcd.put(f"/e/{i}", engine.url)
        proxy = self.proxy(f"etcd /e/ {self.etcd.client}; max_engines 2; health off;")
        self.await_engines(proxy, [engine.url for engine in engines[:2]])
        self.assertIn("'/e/2' is left out", proxy.log())
        self.etcd.delete("/e/0")
        self.await_engines(proxy, [engine.url for engine in engines[1:]])

    def test_a_changed_value_of_an_engine_counts_at_once(self):
        prefill = self.mock("--transfer", "mooncake", "--role", "prefill")
        decode = self.mock("--transfer", "mooncake", "--role", "decode")
        proxy = self.proxy(f"transfer mooncake; skip_prefill 16; retries 0; etcd /e/ {self.etcd.client};")
        self.etcd.put("/e/p", f"{prefill.url} role=prefill bootstrap_port=1")
        self.etcd.put("/e/d", f"{decode.url} role=decode")
        self.await_engines(proxy, [prefill.url, decode.url])
        self.assertNotEqual(proxy.complete(prompt=tokens(1, 300), max_tokens=3)[0], 200)
        self.etcd.put("/e/p", f"{prefill.url} role=prefill bootstrap_port={prefill.port}")
        until(lambda: proxy.complete(prompt=tokens(2, 300), max_tokens=3)[0] == 200, what=proxy.log)

    def test_another_worker_becomes_master(self):
        self.killed = True
        engines = [self.mock() for _ in range(2)]
        self.etcd.put("/e/a", engines[0].url)
        proxy = self.proxy(f"etcd /e/ {self.etcd.client};")
        self.await_engines(proxy, [engines[0].url])
        os.kill(proxy.state()["master"], signal.SIGKILL)
        self.etcd.put("/e/b", engines[1].url)
        until(lambda: attempt(lambda: self.enabled(proxy)) == {e.url for e in engines}, what=proxy.log)

    def test_reads_roles_and_ports_of_prefill_and_decode_engines(self):
        prefill = self.mock("--transfer", "mooncake", "--role", "prefill")
        decode = self.mock("--transfer", "mooncake", "--role", "decode")
        proxy = self.proxy(f"transfer mooncake; skip_prefill 16; etcd /e/ {self.etcd.client};")
        self.etcd.put("/e/p", f"{prefill.url} role=prefill bootstrap_port={prefill.port}")
        self.etcd.put("/e/d", f"{decode.url} role=decode")
        self.await_engines(proxy, [prefill.url, decode.url])
        self.assertEqual(together(6, lambda i: proxy.complete(prompt=tokens(i, 300), max_tokens=3)[0]), [200] * 6)
        self.assertEqual(prefill.state()["served"], 6)
        proxy.idle()


if __name__ == "__main__":
    main()
