#!/usr/bin/env python3
"""Killed workers and masters, reloads and upgrades of the binary under traffic."""
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import threading
import time

from proxying import HOST, WAIT_SECONDS, ProxyTest, attempt, main, pair, patient, request, together, tokens, until


def wake_ups(pid):
    """Returns how often the threads of a process have begun to wait."""
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)[1])
               for task in pathlib.Path(f"/proc/{pid}/task").iterdir())


class Workers(ProxyTest):
    def test_idle_workers_sleep(self):
        """No thread of a worker wakes up in 10 seconds without an event. The master does for health checks: wake-ups are counted."""
        engine = self.mock()
        for health in ("off", "/health 200ms"):
            with self.subTest(health):
                proxy = self.proxy(f"engine {engine.url}; health {health};", workers=3)
                results = together(6, lambda i: proxy.complete(prompt=tokens(i, 200), max_tokens=5)[0])
                self.assertEqual(results, [200] * 6)
                master = proxy.idle()["master"]

                def woken(seconds):
                    """Returns the workers that woke up within this time."""
                    before = {pid: wake_ups(pid) for pid in proxy.workers()}
                    self.assertEqual(len(before), 3)
                    time.sleep(seconds)
                    return [pid for pid, count in before.items() if wake_ups(pid) != count]
                expected = [] if health == "off" else [master]
                until(lambda: woken(2) == expected, what=lambda: woken(2))  # the requests have left nothing to do
                self.assertEqual(woken(10), expected)

    def test_survives_kills_of_workers_and_of_the_master(self):
        """Kills the scheduling master 50 times, and other workers 50 times."""
        self.killed = True
        engines = [self.mock() for _ in range(2)]
        proxy = self.proxy("".join(f"engine {e.url};" for e in engines), workers=3)
        chance, stop, statuses, victims = random.Random(2), threading.Event(), [], []

        def roles():
            """Returns the scheduling master and the two other workers once all of them run."""
            pids, master = sorted(proxy.workers()), proxy_state(proxy)["master"]
            return (master, [pid for pid in pids if pid != master]) if len(pids) == 3 and master in pids else None

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
            for turn in range(100):
                master, others = until(roles)
                time.sleep(chance.uniform(0, 0.02))  # a random moment in the life of the requests
                victim = master if turn % 2 == 0 else others[turn // 2 % len(others)]
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
        self.assertEqual((victims.count(True), victims.count(False)), (50, 50))
        proxy.idle()
        for engine in engines:
            until(lambda: engine.state()["live"] == 0)

    def test_schedules_soon_after_the_master_was_killed(self):
        self.killed = True
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};", workers=2)
        proxy.complete(prompt="a", max_tokens=1)
        delays = []
        for _ in range(5):
            until(lambda: len(proxy.workers()) == 2)
            master = proxy_state(proxy)["master"]
            killed = time.monotonic_ns()
            os.kill(master, signal.SIGKILL)
            # A process has the lease a moment before it stores the time.
            state = until(lambda: state if (state := proxy_state(proxy))["master_since_ns"] > killed else None)
            self.assertNotEqual(state["master"], master)
            delays.append((state["master_since_ns"] - killed) / 1e9)
            status, _, text = until(lambda: attempt(
                lambda: proxy.request("POST", "/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 1})))
            self.assertEqual(status, 200, text)
            self.assertIn("choices", json.loads(text))
        # The workers see the death by a descriptor of the process. A busy machine may delay a single one.
        self.assertLess(statistics.median(delays), patient(0.1), delays)
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


class Upgrades(ProxyTest):
    """nginx's procedure for a new binary: USR2 starts a second master, WINCH ends the workers of the first one, QUIT ends it."""

    @contextlib.contextmanager
    def traffic(self, ask):
        """Calls ask(seed) in threads and yields the list of its results."""
        stop, answers = threading.Event(), []

        def load(seed):
            while not stop.is_set():
                try:
                    answers.append(ask(seed))
                except (OSError, http.client.HTTPException) as error:
                    answers.append(error)
                seed += 10
        threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def test_loses_no_request_and_follows_the_engines_again(self):
        with socket.create_server((HOST, 0)) as free:
            bound = f"tcp://{HOST}:{free.getsockname()[1]}"
        names = [self.endpoint("upgrade"), self.endpoint("bound")]
        engines = [self.mock("--kv-events", events, "--kv-replay", name + "-replay") for events, name in zip((names[0], bound), names)]
        proxy = self.proxy(f"engine {engines[0].url} kv_events={names[0]} kv_replay={names[0]}-replay;"
                           f"engine {engines[1].url} kv_events=bind:{bound} kv_replay={names[1]}-replay;", daemon=True)

        def ask(seed):
            if seed % 2:
                return proxy.complete(prompt=tokens(seed, 64), max_tokens=8)[0]
            with proxy.streaming(prompt=tokens(seed, 64), max_tokens=30) as answer:
                return answer.status if answer.read().endswith(b"data: [DONE]\n\n") else "cut"

        def more(answers):
            done = len(answers)
            until(lambda: len(answers) > done + 12, what=proxy.log)
        with self.traffic(ask) as answers:
            more(answers)
            before = proxy.workers()
            old = proxy.upgrade()
            self.addCleanup(lambda: old.poll() is None and old.terminate())
            after, seen = proxy.workers(), set()
            until(lambda: seen.add(proxy_state(proxy)["pid"]) or seen & set(before) and seen & set(after))  # both serve
            more(answers)
            old.send_signal(signal.SIGWINCH)
            until(lambda: not proxy.workers(old, exiting=True), what=proxy.log)
            more(answers)
            self.assertIsNone(old.poll())
            old.send_signal(signal.SIGQUIT)
            old.wait(WAIT_SECONDS)
            more(answers)
        self.assertEqual(set(answers), {200})
        # The new workers have a state of their own, which the events of the engines fill.
        self.assertIn(proxy.idle()["master"], after)
        until(lambda: all(e["index"] == "exact" for e in proxy.state()["engines"]), what=proxy.state)
        for number, engine in enumerate(engines):
            known = proxy.state()["index"]["memberships"]
            request(HOST, engine.port, "POST", "/v1/completions", {"model": "m", "prompt": tokens(7000 + number, 1600), "max_tokens": 1})
            until(lambda: proxy.state()["index"]["memberships"] >= known + 100, what=proxy.state)
        completed = proxy.metrics()['moesaic_proxy_requests_total{pool="pool",outcome="completed"}']
        self.assertTrue(0 < completed < len(answers), completed)
        self.assertEqual(sum(e.state()["served"] for e in engines), len(answers) + len(engines))

    def test_old_workers_serve_their_queue(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url} max_requests=1; queue_timeout 1h; health off;", daemon=True)
        waiting = lambda: proxy.state()["stages"][3]["now"]
        ended = []

        def ask(seed):
            with proxy.streaming(prompt=tokens(seed, 32), max_tokens=20) as answer:
                ended.append(answer.read().endswith(b"data: [DONE]\n\n"))
        with proxy.streaming(prompt="a", max_tokens=100) as held:
            held.readline()
            engine.faults(stall_ms=3600_000)
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
            for thread in threads:
                thread.start()
            until(lambda: waiting() == 5, what=proxy.state)
            old = proxy.upgrade()
            self.addCleanup(lambda: old.poll() is None and old.terminate())
            old.send_signal(signal.SIGWINCH)
            until(lambda: not proxy.workers(old), what=proxy.log)
            old.send_signal(signal.SIGQUIT)
            state = proxy.idle()  # that of the new workers
            self.assertIn(state["pid"], proxy.workers())
            self.assertEqual((state["stages"][0]["entered"], ended), (0, []))
            self.assertIsNone(old.poll())
            engine.faults()  # the engine continues
            self.assertTrue(held.read().endswith(b"data: [DONE]\n\n"))
        for thread in threads:
            thread.join()
        self.assertEqual(ended, [True] * 5)
        old.wait(WAIT_SECONDS)
        self.assertEqual(proxy.complete(prompt="b", max_tokens=1)[0], 200)
        self.assertEqual((engine.state()["served"], engine.state()["live"]), (7, 0))
        proxy.idle()

    def test_blocks_of_decode_engines_reach_the_workers_of_their_requests(self):
        """vllm-ascend's decode engines send their blocks to the proxy's address, at which both masters have workers."""
        prefill, decode, proxy = pair(self, "ascend", "retries 0; health off;", daemon=True)
        old = proxy.upgrade()
        self.addCleanup(lambda: old.poll() is None and old.terminate())
        statuses = together(4, lambda i: [proxy.complete(prompt=tokens(10 * i + n, 300), max_tokens=2)[0] for n in range(10)])
        self.assertEqual(statuses, [[200] * 10] * 4)
        old.send_signal(signal.SIGWINCH)
        until(lambda: not proxy.workers(old, exiting=True), what=proxy.log)
        old.send_signal(signal.SIGQUIT)
        old.wait(WAIT_SECONDS)
        self.assertEqual(proxy.complete(prompt=tokens(99, 300), max_tokens=2)[0], 200)
        proxy.idle()
        for engine in (prefill, decode):
            self.assertEqual((engine.state()["live"], engine.state()["pinned"]), (0, 0))

    def test_an_upgrade_can_be_taken_back(self):
        name = self.endpoint("back")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay;", daemon=True)
        self.assertEqual(proxy.complete(prompt=tokens(1, 320), max_tokens=1)[0], 200)
        old = proxy.upgrade()
        new, proxy.process = proxy.process, old
        self.addCleanup(lambda: new.poll() is None and new.terminate())
        old.send_signal(signal.SIGWINCH)
        until(lambda: not proxy.workers(exiting=True), what=proxy.log)
        self.assertEqual(proxy.complete(prompt=tokens(2, 320), max_tokens=1)[0], 200)
        old.send_signal(signal.SIGHUP)
        until(lambda: len(proxy.workers()) == 2, what=proxy.log)
        new.send_signal(signal.SIGQUIT)
        new.wait(WAIT_SECONDS)
        until(lambda: old.read_pid() == old.pid)
        state = proxy.idle()
        self.assertEqual(state["outcomes"]["completed"], 1)  # its state was kept
        # The events of the time without workers are replayed.
        until(lambda: proxy.state()["index"]["memberships"] >= 40, what=proxy.state)
        self.assertEqual(proxy.complete(prompt=tokens(1, 320) + tokens(3, 32), max_tokens=1)[0], 200)
        self.assertEqual(proxy.access(3)[-1][17], "320")
        proxy.idle()


def proxy_state(proxy):
    """The state, from a worker that lives."""
    return until(lambda: attempt(proxy.state))


if __name__ == "__main__":
    main()
