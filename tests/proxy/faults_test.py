#!/usr/bin/env python3
"""Faults and slowness of engines, and limits of time. After each, every counter and slot of the proxy must return to zero."""
import contextlib
import signal
import socket
import threading
import time

from proxying import HOST, ProxyTest, main, pair, patient, raw, request, together, tokens, until


@contextlib.contextmanager
def killed_when_busy(engine):
    """Kills the engine as soon as it has a request."""
    def kill():
        until(lambda: engine.state()["live"] > 0, what=engine.state)
        engine.kill()
    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


class Engines(ProxyTest):
    def test_retries_on_another_engine_before_the_first_byte(self):
        bad, good = self.mock(), self.mock()
        bad.faults(fail_request=1.0)
        proxy = self.proxy(f"engine {bad.url}; engine {good.url}; retries 2 10ms; health off;")
        statuses = together(8, lambda i: proxy.complete(prompt=tokens(i, 64), max_tokens=2)[0])
        while proxy.metric("moesaic_proxy_retries_total") == 0 and len(statuses) < 100:  # none has met the engine that fails
            statuses.append(proxy.complete(prompt=tokens(len(statuses), 64), max_tokens=2)[0])
        self.assertEqual(set(statuses), {200})
        self.assertGreater(proxy.metric("moesaic_proxy_retries_total"), 0)
        self.assertEqual(proxy.idle()["outcomes"]["completed"], len(statuses))

    def test_opens_the_breaker_of_a_dead_engine(self):
        dead, good = self.mock(), self.mock()
        proxy = self.proxy(f"engine {dead.url}; engine {good.url}; retries 2 10ms; breaker 2 1h 1h; health off;")
        dead.kill()
        self.assertEqual(together(10, lambda i: proxy.complete(prompt=tokens(i, 64), max_tokens=2)[0]), [200] * 10)
        until(lambda: proxy.complete(prompt=tokens(50, 64), max_tokens=1)[0] == 200
              and proxy.state()["engines"][0]["state"] == "breaker open", what=proxy.state)
        proxy.idle()

    def test_answers_502_when_no_attempt_is_left(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; retries 1 10ms; breaker 100; health off;")
        engine.kill()
        status, answer = proxy.complete(prompt="a", max_tokens=1)
        self.assertIn(status, (502, 503))
        self.assertIn("error", answer)
        proxy.idle()

    def test_excludes_unhealthy_engines_until_they_recover(self):
        engine, other = self.mock(), self.mock()
        proxy = self.proxy(f"engine {engine.url}; engine {other.url}; health /health 50ms 1m;")
        engine.faults(unhealthy=True)
        until(lambda: proxy.state()["engines"][0]["state"] == "unhealthy")
        served = engine.state()["served"]
        self.assertEqual([proxy.complete(prompt=tokens(i, 64), max_tokens=1)[0] for i in range(4)], [200] * 4)
        self.assertEqual(engine.state()["served"], served)
        engine.faults(unhealthy=False)
        until(lambda: proxy.state()["engines"][0]["state"] == "enabled")

    def test_reports_an_engine_that_dies_inside_the_answer_to_the_client(self):
        engine = self.mock("--step-ms", "10")
        proxy = self.proxy(f"engine {engine.url};")
        with proxy.streaming({"x-mock-drop-after": "3"}, prompt="a", max_tokens=50) as answer:
            text = answer.read()
        self.assertIn(b'"error"', text)
        self.assertNotIn(b"[DONE]", text)
        self.assertEqual(proxy.idle()["outcomes"]["failed"], 1)

    def test_survives_a_decode_engine_killed_inside_the_answer(self):
        prefill = self.mock("--transfer", "nixl", "--role", "prefill")
        decode = self.mock("--transfer", "nixl", "--role", "decode", "--step-ms", "10")
        proxy = self.proxy(f"transfer nixl; skip_prefill 16; engine {prefill.url} role=prefill; engine {decode.url} role=decode; retries 0;")
        with proxy.streaming(prompt=tokens(1, 300), max_tokens=20000) as answer:
            answer.readline()
            decode.kill()
            self.assertIn(b'"error"', answer.read())
        proxy.idle()

    def test_uses_another_prefill_engine_when_one_is_killed(self):
        slow = self.mock("--transfer", "nixl", "--role", "prefill", "--prefill-us", "20000")
        other = self.mock("--transfer", "nixl", "--role", "prefill")
        decode = self.mock("--transfer", "nixl", "--role", "decode")
        proxy = self.proxy(f"transfer nixl; skip_prefill 16; engine {slow.url} role=prefill; engine {other.url} role=prefill;"
                           f"engine {decode.url} role=decode; retries 2 10ms; health off;")

        with killed_when_busy(slow):
            statuses = together(6, lambda i: proxy.complete(prompt=tokens(i, 300), max_tokens=3)[0])
        self.assertEqual(statuses, [200] * 6)
        proxy.idle()

    def test_retries_a_stream_whose_engine_dies_before_its_first_token(self):
        """The head of the answer comes before the prefill."""
        slow, other = self.mock("--prefill-us", "20000"), self.mock()
        proxy = self.proxy(f"engine {slow.url}; engine {other.url}; retries 2 10ms; health off;")

        def ask(i):
            with proxy.streaming(prompt=tokens(i, 300), max_tokens=3) as answer:
                return answer.status, answer.read()
        with killed_when_busy(slow):
            answers = together(6, ask)
        for status, text in answers:
            self.assertEqual(status, 200)
            self.assertTrue(text.endswith(b"data: [DONE]\n\n"), text)
            self.assertNotIn(b'"error"', text)
        self.assertGreater(proxy.metric("moesaic_proxy_retries_total"), 0)
        self.assertEqual(proxy.idle()["outcomes"]["completed"], 6)

    def test_computes_the_prompt_again_when_decode_dies_after_its_fetch(self):
        prefill = self.mock("--transfer", "nixl", "--role", "prefill")
        decodes = [self.mock("--transfer", "nixl", "--role", "decode", "--step-ms", "20") for _ in range(2)]
        proxy = self.proxy(f"transfer nixl; skip_prefill 16; engine {prefill.url} role=prefill; retries 2 10ms; health off;"
                           + "".join(f"engine {d.url} role=decode;" for d in decodes))
        status, _ = proxy.complete(prompt=tokens(0, 300), max_tokens=2)  # connections may be used again
        self.assertEqual(status, 200)
        served = prefill.state()["served"]
        answer = []
        asking = threading.Thread(target=lambda: answer.append(proxy.complete(prompt=tokens(1, 300), max_tokens=100)))
        asking.start()
        busy = until(lambda: next((d for d in decodes if d.state()["decode_tokens"] > 2), None))
        until(lambda: prefill.state()["pinned"] == 0, what=prefill.state)  # P may use the blocks for others now
        busy.kill()
        asking.join()
        self.assertEqual(answer[0][0], 200, answer)
        self.assertEqual(answer[0][1]["usage"]["completion_tokens"], 100)
        other = decodes[1 - decodes.index(busy)]
        self.assertEqual(other.state()["stale_fetches"], 0)
        self.assertEqual(prefill.state()["served"], served + 2)
        proxy.idle()
        until(lambda: prefill.state()["pinned"] == 0, what=prefill.state)

    def test_avoids_a_stalled_engine(self):
        slow, other = self.mock(), self.mock()
        slow.faults(stall_ms=600000)
        proxy = self.proxy(f"engine {slow.url}; engine {other.url}; prefill_timeout 5s; retries 2 10ms; breaker 1 1h 1h; health off;")
        for i in range(8):
            self.assertEqual(proxy.complete(prompt=tokens(i, 64), max_tokens=2)[0], 200)
        self.assertEqual(proxy.state()["engines"][0]["state"], "breaker open")
        self.assertEqual(slow.state()["served"], 0)
        until(lambda: slow.state()["live"] == 0, what=slow.state)
        proxy.idle()

    def test_avoids_a_slow_engine(self):
        slow, fast = self.mock(), self.mock()
        slow.faults(slowdown=1e6)
        proxy = self.proxy(f"engine {slow.url}; engine {fast.url}; health off;")
        client = raw(proxy.port, {"model": "m", "prompt": tokens(0, 64), "max_tokens": 5})
        until(lambda: slow.state()["live"] == 1 and all(e["prefill_requests"] == 0 for e in proxy.state()["engines"]), what=proxy.state)
        self.assertEqual([proxy.complete(prompt=tokens(i, 64), max_tokens=5)[0] for i in range(1, 31)], [200] * 30)
        self.assertEqual((slow.state()["live"], slow.state()["served"], fast.state()["served"]), (1, 0, 30))
        slow.faults()  # its step ends soon
        self.assertTrue(client.recv(1 << 16).startswith(b"HTTP/1.1 200 "))
        client.close()
        proxy.idle()

    def test_drains_and_resumes_an_engine_by_request(self):
        engine, other = self.mock("--step-ms", "20"), self.mock()
        proxy = self.proxy(f"engine {engine.url}; engine {other.url} drain;")
        states = lambda: {e["url"]: e["state"] for e in proxy.state()["engines"]}
        with proxy.streaming(prompt="a", max_tokens=50) as answer:
            answer.readline()
            self.assertEqual(proxy.control("resume", other.url), (200, {"url": other.url, "state": "enabled", "ranks": 1}))
            self.assertEqual(proxy.control("drain", engine.url.replace(":", "%3a").replace("/", "%2F"))[0], 200)
            self.assertEqual(states(), {engine.url: "draining", other.url: "enabled"})
            served = other.state()["served"]
            self.assertEqual([proxy.complete(prompt=tokens(i, 64), max_tokens=1)[0] for i in range(6)], [200] * 6)
            self.assertEqual(other.state()["served"], served + 6)
            self.assertTrue(answer.read().endswith(b"data: [DONE]\n\n"))
        proxy.reload(f"engine {engine.url}; engine {other.url} drain; queue 100;")  # keeps both
        self.assertEqual(states(), {engine.url: "draining", other.url: "enabled"})
        proxy.control("drain", other.url)
        waiting = []
        asking = threading.Thread(target=lambda: waiting.append(proxy.complete(prompt="b", max_tokens=1)[0]))
        asking.start()
        until(lambda: proxy.state()["stages"][3]["now"] == 1, what=proxy.state)
        self.assertEqual(proxy.control("resume", engine.url)[0], 200)
        asking.join()
        self.assertEqual(waiting, [200])
        self.assertEqual(engine.state()["served"], 2)
        for verb, url, status in (("drain", "http://127.0.0.1:1", 404), ("stop", engine.url, 400), ("drain", "", 400)):
            refused, text = proxy.control(verb, url)
            self.assertEqual(refused, status)
            self.assertIn("message", text["error"])
        self.assertEqual(proxy.request("GET", f"/engines?drain={engine.url}")[0], 405)
        # A page of another site in an operator's browser.
        self.assertEqual(proxy.request("POST", f"/engines?drain={engine.url}", headers={"origin": "http://example.com"})[0], 403)
        self.assertEqual(states()[engine.url], "enabled")
        proxy.idle()

    def test_drains_an_engine_by_its_option(self):
        engine, other = self.mock("--step-ms", "20"), self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        with proxy.streaming(prompt="a", max_tokens=50) as answer:
            answer.readline()
            proxy.reload(f"engine {engine.url} drain; engine {other.url};")
            states = {e["url"]: e["state"] for e in proxy.state()["engines"]}
            self.assertEqual(states, {engine.url: "draining", other.url: "enabled"})
            served = other.state()["served"]
            for i in range(6):
                self.assertEqual(proxy.complete(prompt=tokens(i, 64), max_tokens=1)[0], 200)
            self.assertEqual(other.state()["served"], served + 6)
            self.assertTrue(answer.read().endswith(b"data: [DONE]\n\n"))
        self.assertEqual(engine.state()["served"], 1)
        proxy.reload(f"engine {engine.url}; engine {other.url} drain;")
        self.assertEqual(proxy.complete(prompt="b", max_tokens=1)[0], 200)
        self.assertEqual(engine.state()["served"], 2)
        proxy.idle()

    def test_reports_an_engine_with_another_block_size(self):
        name = self.endpoint("blocks")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay", "--block-size", "32")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay;")
        differs = lambda: (proxy.complete(prompt=tokens(1, 128), max_tokens=1), proxy.metric("moesaic_proxy_engine_block_size_differs"))[1]
        until(differs, what=proxy.metrics)
        self.assertIn("its blocks have 32 tokens, and block_size of the pool is 16", proxy.log())

    def test_learns_the_size_of_an_engines_pool(self):
        engine = self.mock("--blocks", "777")
        proxy = self.proxy(f"engine {engine.url}; health /health 50ms 1m;")
        until(lambda: proxy.state()["engines"][0]["reported_kv_blocks"] == 777, what=proxy.state)

    def test_cancels_decode_when_parallel_prefill_fails(self):
        for transfer in ("sglang", "mooncake", "ascend"):
            with self.subTest(transfer):
                prefill, decode, proxy = pair(self, transfer, "retries 0; health off;", prefill_us=5000)
                prefill.faults(fail_request=1.0)
                for stream in (False, True):
                    status, _, text = proxy.request("POST", "/v1/completions",
                                                    {"model": "mock", "prompt": tokens(1, 100), "max_tokens": 3, "stream": stream})
                    self.assertEqual(status, 502, text)
                proxy.idle()
                until(lambda: decode.state()["live"] == 0 and decode.state()["rooms"] == 0, what=decode.state)
                until(lambda: prefill.state()["pinned"] == 0 and prefill.state()["rooms"] == 0, what=prefill.state)
                prefill.faults(fail_request=0.0)
                self.assertEqual(proxy.complete(prompt=tokens(2, 100), max_tokens=3)[0], 200)

    def test_uses_another_parallel_pair_when_prefill_is_killed(self):
        for transfer in ("sglang", "mooncake", "ascend"):
            with self.subTest(transfer):
                slow = self.mock("--transfer", transfer, "--role", "prefill", "--prefill-us", "20000")
                other, decode, proxy = pair(
                    self, transfer, f"retries 2 10ms; health off; engine {slow.url} role=prefill bootstrap_port={slow.port};")
                with killed_when_busy(slow):
                    statuses = together(6, lambda i: proxy.complete(prompt=tokens(i, 300), max_tokens=3)[0])
                self.assertEqual(statuses, [200] * 6)
                proxy.idle()
                until(lambda: decode.state()["live"] == 0 and other.state()["pinned"] == 0, what=other.state)

    def test_recovers_the_index_after_lost_and_doubled_messages(self):
        name = self.endpoint("lossy")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay", "--seed", "3")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay;")
        until(lambda: proxy.complete(prompt=tokens(0, 64), max_tokens=1)[0] == 200 and proxy.state()["engines"][0]["index"] == "exact",
              what=proxy.state)
        engine.faults(drop_message=0.3, duplicate_message=0.3, swap_messages=0.2)
        for i in range(1, 30):
            proxy.complete(prompt=tokens(i, 160), max_tokens=1)
        engine.faults(drop_message=0.0, duplicate_message=0.0, swap_messages=0.0)
        # Every message was either seen or replayed: the index knows all blocks of the engine.
        until(lambda: proxy.complete(prompt=tokens(99, 64), max_tokens=1)[0] == 200
              and proxy.state()["engines"][0]["index"] == "exact" and proxy.state()["index"]["memberships"] >= 290, what=proxy.state)
        self.assertGreater(proxy.metric("moesaic_proxy_kv_gaps_total"), 0)

    def test_recovers_the_index_of_an_engine_that_did_not_answer_for_long(self):
        name = self.endpoint("asleep")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay")
        request(HOST, engine.port, "POST", "/v1/completions", {"model": "m", "prompt": tokens(5, 1600), "max_tokens": 1})
        engine.process.send_signal(signal.SIGSTOP)
        self.addCleanup(engine.process.send_signal, signal.SIGCONT)
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay; health off;")
        until(lambda: proxy.state()["engines"][0]["index"] == "degraded", what=proxy.state)
        engine.process.send_signal(signal.SIGCONT)
        # It answers the question that was given up, and then the next one.
        until(lambda: proxy.state()["engines"][0]["index"] == "exact", what=proxy.state)
        self.assertGreaterEqual(proxy.state()["index"]["memberships"], 100)
        self.assertIn(f"{name}-replay did not answer in time", proxy.log())

    def test_recovers_the_index_after_truncated_messages(self):
        name = self.endpoint("cut")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay;")
        until(lambda: proxy.complete(prompt=tokens(0, 64), max_tokens=1)[0] == 200 and proxy.state()["engines"][0]["index"] == "exact",
              what=proxy.state)
        engine.faults(truncate_message=1.0)
        for i in range(1, 11):
            proxy.complete(prompt=tokens(i, 160), max_tokens=1)
        engine.faults(truncate_message=0.0)
        until(lambda: proxy.complete(prompt=tokens(99, 64), max_tokens=1)[0] == 200
              and proxy.state()["engines"][0]["index"] == "exact" and proxy.state()["index"]["memberships"] >= 100, what=proxy.state)
        self.assertGreater(proxy.metric("moesaic_proxy_kv_errors_total"), 0)

    def test_forgets_the_blocks_of_a_restarted_engine(self):
        name = self.endpoint("restart")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay;")
        until(lambda: proxy.complete(prompt=tokens(0, 1600), max_tokens=1)[0] == 200 and proxy.state()["index"]["memberships"] >= 100)
        engine.reset(restart=True)
        until(lambda: proxy.complete(prompt=tokens(1, 64), max_tokens=1)[0] == 200 and proxy.state()["index"]["memberships"] < 50,
              what=proxy.state)
        until(lambda: proxy.state()["index"]["speculative"] == 0, what=proxy.state)  # although no request comes

    def test_learns_the_hashes_of_an_engine_that_restarts_with_another_seed(self):
        name = self.endpoint("seed")
        engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay", "--seed", "1")
        proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay; health /health 50ms 1m;")
        ask = lambda seed: proxy.complete(prompt=tokens(seed, 160), max_tokens=1)[0]
        until(lambda: ask(0) == 200 and proxy.state()["index"]["memberships"] >= 10, what=proxy.state)
        for seed in range(1, 8):
            ask(seed)
        engine.flags = (*engine.flags[:-1], "2")
        engine.restart()
        # The engine has the blocks of the last prompts only, and the index no others.
        until(lambda: ask(100) == 200 and ask(101) == 200 and proxy.state()["engines"][0]["index"] == "exact"
              and proxy.state()["index"]["memberships"] - proxy.state()["index"]["speculative"] <= 20, what=proxy.state)
        self.assertGreaterEqual(proxy.complete(prompt=tokens(101, 160), max_tokens=1)[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 144)
        proxy.idle()


class Timeouts(ProxyTest):
    """Each limit expires once. A limit that must not expire in a test is long."""
    LIMIT_MS = 300

    def patient_limit(self):
        """Returns the limit for tests in which an engine must answer before it expires."""
        return f"{round(patient(self.LIMIT_MS))}ms"

    def expired(self, call):
        """Returns the result of `call`, which takes at least the limit."""
        begin = time.monotonic()
        result = call()
        self.assertGreaterEqual(time.monotonic() - begin, self.LIMIT_MS / 1000)
        return result

    def unconnectable(self):
        """Returns the URL of an address that leaves connections unanswered: its queue is full."""
        listener = socket.create_server((HOST, 0), backlog=0)
        self.addCleanup(listener.close)
        for _ in range(4):
            client = socket.socket()
            self.addCleanup(client.close)
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        return "http://%s:%d" % listener.getsockname()

    def test_connect_timeout_ends_an_attempt(self):
        url, other = self.unconnectable(), self.mock()
        proxy = self.proxy(f"engine {url}; connect_timeout {self.LIMIT_MS}ms; retries 1 10ms; health off;")
        status, answer = self.expired(lambda: proxy.complete(prompt="a", max_tokens=1))
        self.assertEqual((status, "connecting to the engine timed out" in answer["error"]["message"]), (504, True), answer)
        text = "connecting to the engine timed out"
        before = proxy.log().count(text)
        proxy.reload(f"engine {url}; engine {other.url}; connect_timeout {self.LIMIT_MS}ms; retries 1 10ms; breaker 0; health off;")
        statuses = [proxy.complete(prompt=tokens(i, 64), max_tokens=1)[0] for i in range(4)]
        self.assertEqual(statuses, [200] * 4)
        self.assertGreater(proxy.log().count(text), before)
        proxy.idle()

    def test_prefill_timeout_ends_a_request(self):
        engine = self.mock()
        engine.faults(stall_ms=3600_000)
        proxy = self.proxy(f"engine {engine.url}; prefill_timeout {self.LIMIT_MS}ms; retries 0; health off;")
        # The head of a stream comes at once, or does not come either.
        for stream, headers in ((False, {}), (True, {}), (True, {"x-mock-delay-ms": "3600000"})):
            status, _, text = self.expired(lambda: proxy.request(
                "POST", "/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": 1, "stream": stream}, headers))
            self.assertEqual((status, b"did not answer in time" in text), (504, True), text)
        until(lambda: engine.state()["live"] == 0, what=engine.state)
        engine.faults()
        proxy.reload(f"engine {engine.url}; retries 0; health off;")
        self.assertEqual(proxy.complete(prompt="a", max_tokens=1)[0], 200)
        proxy.idle()

    def test_idle_timeout_ends_a_stream(self):
        engine = self.mock("--step-ms", "10")
        proxy = self.proxy(f"engine {engine.url}; idle_timeout {self.patient_limit()}; retries 0; health off;")
        with proxy.streaming(prompt="a", max_tokens=20000) as answer:
            answer.readline()
            engine.faults(stall_ms=3600_000)
            text = self.expired(answer.read)
        self.assertIn(b'"error"', text)
        self.assertNotIn(b"[DONE]", text)
        self.assertIn("the engine stopped inside the answer", proxy.log())
        until(lambda: engine.state()["live"] == 0, what=engine.state)
        self.assertEqual(proxy.idle()["outcomes"]["failed"], 1)

    def test_queue_timeout_refuses_a_request(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url} max_requests=1; queue_timeout {self.patient_limit()}; health off;")
        with proxy.streaming(prompt="a", max_tokens=100) as first:
            first.readline()
            engine.faults(stall_ms=3600_000)
            status, headers, text = self.expired(
                lambda: proxy.request("POST", "/v1/completions", {"model": "mock", "prompt": "b", "max_tokens": 1}))
            self.assertEqual((status, b"no engine was free in time" in text), (503, True), text)
            self.assertEqual(headers["retry-after"], "1")
            engine.faults()  # the engine continues
            self.assertTrue(first.read().endswith(b"[DONE]\n\n"))
        self.assertEqual(proxy.complete(prompt="c", max_tokens=1)[0], 200)
        self.assertEqual(proxy.idle()["outcomes"]["rejected"], 1)


if __name__ == "__main__":
    main()
