#!/usr/bin/env python3
"""Clients that leave in each stage, or read slowly. Every counter and slot of the proxy must return to zero."""
import collections
import json
import os
import random
import signal
import socket
import time

from proxying import HOST, MODEL, STAGES, WAIT_SECONDS, ProxyTest, attempt, main, pair, raw, request, together, tokens, until


class Stages(ProxyTest):
    """Clients leave in each stage. A request passes from tokenized to prefill waiting in one call, so that no client can leave
    between these; the core's tests kill processes there."""
    COUNT = 20

    def aborted(self, proxy):
        """Returns the stages in which clients left, as the access log has them."""
        begun = proxy.idle()["stages"][0]["entered"]
        found = collections.Counter()
        for fields in proxy.access(begun):
            entered = [name for name, at in zip(STAGES[:-1], fields[2:11]) if at != "-"]
            if fields[1] == "aborted":
                found[entered[-1]] += 1
        return found

    def now(self, state, stage):
        return next(s["now"] for s in state["stages"] if s["name"] == stage)

    def close_in(self, proxy, stage, bodies):
        """Sends requests, waits until all are in the stage, and closes their connections."""
        clients = [raw(proxy.port, body) for body in bodies]
        until(lambda: self.now(proxy.state(), stage) == len(clients), what=proxy.state)
        for client in clients:
            client.close()
        until(lambda: self.now(proxy.state(), stage) == 0, what=proxy.state)  # before an engine becomes free

    def leave(self, proxy, stage, bodies):
        """Closes the connections of requests in the stage, and checks that all count as aborted there."""
        self.close_in(proxy, stage, bodies)
        self.assertEqual(self.aborted(proxy)[stage], len(bodies), self.aborted(proxy))

    def bodies(self, size=300, count=COUNT, **body):
        return [{"model": "m", "prompt": tokens(i, size), "max_tokens": 5, "stream": i % 2 == 0, **body} for i in range(count)]

    def test_clients_may_leave_while_their_request_is_received(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; model {MODEL};", workers=1)
        chance = random.Random(5)
        text = lambda: " ".join(f"{chance.random()}" for _ in range(1500))
        begun = 0

        def leave():
            """Returns whether clients left before their text was tokenized."""
            nonlocal begun
            clients = [raw(proxy.port, {"model": "m", "prompt": text(), "max_tokens": 1}) for _ in range(16)]
            begun += len(clients)
            until(lambda: proxy.state()["stages"][0]["entered"] == begun, what=proxy.state)
            for client in clients:
                client.close()
            return self.aborted(proxy)["received"] > 0
        until(leave)
        self.assertEqual(proxy.complete(prompt="a", max_tokens=1)[0], 200)

    def test_clients_may_leave_while_prefill_waits_or_runs(self):
        engine = self.mock("--prefill-us", "100000")
        proxy = self.proxy(f"engine {engine.url} max_requests={self.COUNT};")
        running = [raw(proxy.port, body) for body in self.bodies()]
        # Those that do not stream are soon assumed to decode.
        until(lambda: sum(proxy.state()["stages"][i]["now"] for i in (5, 8)) == self.COUNT, what=proxy.state)
        waiting = [raw(proxy.port, body) for body in self.bodies()]
        until(lambda: proxy.state()["stages"][3]["now"] == self.COUNT, what=proxy.state)
        for client in waiting:
            client.close()
        until(lambda: proxy.state()["stages"][3]["now"] == 0, what=proxy.state)  # before the engine becomes free
        for client in running:
            client.close()
        self.assertEqual(self.aborted(proxy)["prefill_waiting"], self.COUNT)
        # Requests that do not stream count as decoding after the predicted time of their prefill.
        self.assertGreaterEqual(self.aborted(proxy)["prefill_running"], self.COUNT // 2)
        until(lambda: engine.state()["live"] == 0, what=engine.state)

    def pair(self, decode_options=""):
        prefill = self.mock("--transfer", "nixl", "--role", "prefill")
        decode = self.mock("--transfer", "nixl", "--role", "decode", "--step-ms", "20")
        proxy = self.proxy(f"transfer nixl; skip_prefill 16; engine {prefill.url} role=prefill; engine {decode.url} role=decode {decode_options};")
        return prefill, decode, proxy

    def test_clients_may_leave_while_decode_waits(self):
        prefill, decode, proxy = self.pair("max_requests=1")
        with proxy.streaming(prompt=tokens(99, 300), max_tokens=20000) as first:
            first.readline()
            self.close_in(proxy, "decode_waiting", self.bodies())
        self.assertEqual(self.aborted(proxy)["decode_waiting"], self.COUNT)
        until(lambda: prefill.state()["pinned"] == 0, what=prefill.state)

    def test_clients_may_leave_while_decode_runs(self):
        _, decode, proxy = self.pair()
        self.leave(proxy, "decode_running", self.bodies(max_tokens=20000))
        until(lambda: decode.state()["live"] == 0, what=decode.state)

    def test_clients_may_leave_after_the_last_token(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        clients = [raw(proxy.port, body) for body in self.bodies(max_tokens=1)]
        until(lambda: proxy.state()["outcomes"]["completed"] == len(clients), what=proxy.state)
        for client in clients:
            client.close()
        proxy.idle()

    def state_of_the_other(self, proxy):
        """The state while a worker is stopped. The kernel may wake the stopped one for a connection: another one is tried."""
        return until(lambda: attempt(
            lambda: json.loads(request(HOST, proxy.port, "GET", "/moesaic?state", timeout=WAIT_SECONDS / 200)[2])))

    def owned(self, proxy, other, body):
        """Sends a request that a worker accepts while the other one is stopped."""
        os.kill(other, signal.SIGSTOP)
        try:
            used = self.state_of_the_other(proxy)["slots_used"]
            client = raw(proxy.port, body)
            until(lambda: self.state_of_the_other(proxy)["slots_used"] == used + 1)
        finally:
            os.kill(other, signal.SIGCONT)
        return client

    def leave_scheduled(self, proxy, waiting, scheduled, body):
        """A worker is stopped when the master places its request, whose client has left. The worker sees first that it left.
        A round in which the master changed, because it was stopped for too long, does not count."""
        for _ in range(20):
            master = proxy.state()["master"]
            other = next(pid for pid in proxy.workers() if pid != master)
            first = self.owned(proxy, other, {**body, "max_tokens": 20000, "stream": True})
            first.recv(1)  # it is served
            second = self.owned(proxy, master, body)
            until(lambda: self.now(proxy.state(), waiting) == 1, what=proxy.state)
            same = proxy.state()["master"] == master
            if same:
                os.kill(other, signal.SIGSTOP)
            second.close()
            first.close()
            if same:
                try:
                    until(lambda: self.now(state := self.state_of_the_other(proxy), scheduled) == 1 or state["master"] != master)
                finally:
                    os.kill(other, signal.SIGCONT)
            if self.aborted(proxy)[scheduled] > 0:
                return
        self.fail(f"no client left in the stage {scheduled}: {self.aborted(proxy)}")

    def test_clients_may_leave_while_prefill_is_scheduled(self):
        engine = self.mock("--step-ms", "20")
        proxy = self.proxy(f"engine {engine.url} max_requests=1; health off;", workers=2)
        self.leave_scheduled(proxy, "prefill_waiting", "prefill_scheduled", self.bodies()[0])
        until(lambda: engine.state()["live"] == 0, what=engine.state)

    def test_clients_may_leave_while_decode_is_scheduled(self):
        prefill, decode, proxy = self.pair("max_requests=1")
        self.leave_scheduled(proxy, "decode_waiting", "decode_scheduled", self.bodies()[0])
        until(lambda: decode.state()["live"] == 0 and prefill.state()["pinned"] == 0, what=prefill.state)


class Clients(ProxyTest):
    def storm(self, proxy, delays, count=60, size=300, max_tokens=30):
        """Clients that leave after a random part of `delays` seconds, half of them streaming."""
        chance = random.Random(1)
        plan = [(chance.uniform(*delays), chance.random() < 0.5) for _ in range(count)]

        def leave(i):
            client = raw(proxy.port, {"model": "m", "prompt": tokens(i, size), "max_tokens": max_tokens, "stream": plan[i][1]})
            time.sleep(plan[i][0])
            client.close()
        together(count, leave)
        return proxy.idle()

    def test_aborts_free_all_resources(self):
        engines = [self.mock("--step-ms", "5") for _ in range(2)]
        proxy = self.proxy("".join(f"engine {e.url} max_requests=8;" for e in engines))
        for delays in ((0, 0.001), (0, 0.02), (0, 0.2)):
            state = self.storm(proxy, delays, max_tokens=300)
        self.assertGreater(state["outcomes"]["aborted"], 50)
        for engine in engines:
            until(lambda: engine.state()["live"] == 0, what=engine.state)
        self.assertEqual(proxy.complete(prompt="a", max_tokens=2)[0], 200)

    def test_aborts_leave_no_blocks_at_prefill_engines(self):
        for transfer in ("nixl", "sglang"):
            with self.subTest(transfer):
                prefill, decode, proxy = pair(self, transfer, prefill_us=50)
                for delays in ((0, 0.01), (0, 0.3)):
                    self.storm(proxy, delays, count=40)
                until(lambda: prefill.state()["live"] == 0 and decode.state()["live"] == 0, what=decode.state)
                if transfer == "nixl":
                    until(lambda: prefill.state()["pinned"] == 0, what=prefill.state)
                self.assertEqual(proxy.complete(prompt=tokens(900, 300), max_tokens=2)[0], 200)

    def test_aborts_leave_no_blocks_at_engines_that_work_at_once(self):
        for transfer in ("mooncake", "ascend"):
            with self.subTest(transfer):
                prefill, decode, proxy = pair(self, transfer, prefill_us=50)
                free = [engine.state()["free_blocks"] for engine in (prefill, decode)]
                for delays in ((0, 0.01), (0, 0.3)):
                    self.storm(proxy, delays, count=40)
                for engine in (prefill, decode):
                    until(lambda: engine.state()["live"] == 0 and engine.state()["pinned"] == 0 and engine.state()["rooms"] == 0,
                          what=engine.state)
                self.assertEqual(proxy.complete(prompt=tokens(900, 300), max_tokens=2)[0], 200)
                until(lambda: [engine.state()["free_blocks"] for engine in (prefill, decode)] == free, what=prefill.state)

    def test_slow_clients_do_not_fill_the_memory(self):
        engine = self.mock("--step-ms", "0.2", "--sequence-us", "1")
        proxy = self.proxy(f"engine {engine.url};")
        client = raw(proxy.port, {"model": "m", "prompt": "a", "max_tokens": 25000, "stream": True})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        time.sleep(0.5)
        total, end = 0, b""
        while not end.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 16)
            self.assertTrue(piece)
            total += len(piece)
            end = (end + piece)[-16:]
        client.close()
        self.assertGreater(total, 25000 * 100)
        self.assertEqual(proxy.idle()["outcomes"]["completed"], 1)


if __name__ == "__main__":
    main()
