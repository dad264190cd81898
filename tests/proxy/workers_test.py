#!/usr/bin/env python3
"""Killed workers and masters, and reloads under traffic."""
import http.client
import json
import os
import random
import signal
import threading
import time

from proxying import ProxyTest, attempt, main, patient, tokens, until


class Workers(ProxyTest):
    def test_survives_kills_of_workers_and_of_the_master(self):
        self.killed = True
        engines = [self.mock() for _ in range(2)]
        proxy = self.proxy("".join(f"engine {e.url};" for e in engines), workers=3)
        chance, stop, statuses, victims = random.Random(2), threading.Event(), [], []

        def load(seed):
            while not stop.is_set():
                try:
                    statuses.append(proxy.complete(prompt=tokens(seed, 100), max_tokens=5)[0])
                except (OSError, http.client.HTTPException):
                    statuses.append(0)  # its worker was killed
                seed += 10
        threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(50):
                pids = until(lambda: sorted(pids) if len(pids := proxy.workers()) == 3 else None)
                time.sleep(chance.uniform(0, 0.02))  # a random moment in the life of the requests
                master = proxy_state(proxy)["master"]
                others = [pid for pid in pids if pid != master]
                victim = master if turn % 2 == 0 and master in pids else others[turn // 2 % len(others)]
                victims.append(victim == master)
                os.kill(victim, signal.SIGKILL)
                done = statuses.count(200)
                until(lambda: statuses.count(200) > done + 2, what=proxy.log)
                until(lambda: proxy_state(proxy)["master"] != victim)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual(set(statuses) - {0, 200}, set())
        self.assertGreaterEqual(victims.count(True), 20)
        self.assertGreaterEqual(victims.count(False), 15)
        proxy.idle()
        for engine in engines:
            until(lambda: engine.state()["live"] == 0)

    def test_schedules_soon_after_the_master_was_killed(self):
        self.killed = True
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};", workers=2)
        proxy.complete(prompt="a", max_tokens=1)
        for _ in range(5):
            until(lambda: len(proxy.workers()) == 2)
            master = proxy_state(proxy)["master"]
            killed = time.monotonic_ns()
            os.kill(master, signal.SIGKILL)
            # A process has the lease a moment before it stores the time.
            state = until(lambda: state if (state := proxy_state(proxy))["master_since_ns"] > killed else None)
            self.assertNotEqual(state["master"], master)
            # The workers see the death by a descriptor of the process.
            self.assertLess(state["master_since_ns"] - killed, patient(0.1) * 1e9)
            status, _, text = until(lambda: attempt(
                lambda: proxy.request("POST", "/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 1})))
            self.assertEqual(status, 200, text)
            self.assertIn("choices", json.loads(text))
        proxy.idle()

    def test_reloads_under_traffic_while_engines_come_and_go(self):
        engines = [self.mock() for _ in range(3)]
        lists = [[0, 1], [1, 2], [2], [0, 1, 2], [0]]
        pool = lambda numbers: "".join(f"engine {engines[n].url};" for n in numbers)
        proxy = self.proxy(pool([0, 1]))
        stop, statuses = threading.Event(), []

        def load(seed):
            while not stop.is_set():
                statuses.append(proxy.complete(prompt=tokens(seed, 64), max_tokens=8)[0])
                seed += 10
        threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            for numbers in lists:
                proxy.reload(pool(numbers))
                until(lambda: {e["url"] for e in proxy.state()["engines"] if e["state"] == "enabled"}
                      == {engines[n].url for n in numbers}, what=proxy.state)
                done = len(statuses)
                until(lambda: len(statuses) > done + 5)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual(set(statuses), {200})
        proxy.idle()

    def test_finishes_streams_after_a_reload(self):
        engine = self.mock("--step-ms", "30")
        proxy = self.proxy(f"engine {engine.url};")
        with proxy.streaming(prompt="a", max_tokens=60) as answer:
            answer.readline()
            proxy.reload(f"engine {engine.url}; queue 100;")
            self.assertEqual(proxy.complete(prompt="b", max_tokens=1)[0], 200)
            self.assertTrue(answer.read().endswith(b"[DONE]\n\n"))
        proxy.idle()


def proxy_state(proxy):
    """The state, from a worker that lives."""
    return until(lambda: attempt(proxy.state))


if __name__ == "__main__":
    main()
