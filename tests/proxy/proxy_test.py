#!/usr/bin/env python3
"""Tests the proxy module: pass-through, streaming, scheduling, transfers between prefill and decode engines, operations."""
import contextlib
import itertools
import json
import threading
import unittest

from proxying import HOST, MODEL, STAGES, Proxy, ProxyTest, has_ipv6, main, request, together, tokens, until

others = itertools.count(1000)  # seeds of prompts that are sent once


class Aggregated(ProxyTest):
    def test_answers_completions_chats_and_other_paths(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        status, answer = proxy.complete(prompt="Once upon a time", max_tokens=5)
        self.assertEqual((status, answer["usage"]["completion_tokens"]), (200, 5))
        status, headers, text = proxy.request("POST", "/v1/chat/completions",
                                              {"model": "mock", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
        self.assertEqual((status, json.loads(text)["object"]), (200, "chat.completion"))
        self.assertTrue(headers["x-request-id"])
        self.assertEqual(json.loads(proxy.request("GET", "/v1/models")[2])["data"][0]["id"], "mock")
        self.assertEqual(proxy.request("POST", "/v1/unknown", {})[0], 404)
        state = proxy.idle()
        self.assertEqual(state["outcomes"]["completed"], 2)

    def test_leaves_bytes_of_the_body_as_they_are(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        body = b'{ "prompt" : "caf\\u00e9" ,"temperature":0.70, "model":"mock","x":{"b":1e0,"a":[1 ,2]}}'
        self.assertEqual(proxy.request("POST", "/v1/completions", body)[0], 200)
        self.assertEqual(engine.get("/mock/requests")[-1]["body"].encode(), body)

    def test_leaves_bytes_of_requests_that_it_cannot_render_as_they_are(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; model {MODEL};")
        parts = b'[ {"type":"text","text":"caf\\u00e9"},{"type":"image_url" , "image_url":{"url":"data:,x"}}]'
        for path, body in (("/v1/chat/completions", b'{ "messages" : [{"content":' + parts + b', "role":"user"}],"temperature":0.70,"model":"mock" }'),
                           ("/v1/completions", b'{"prompt":[ "one","t\\u0077o" ], "max_tokens":1,"model":"mock","x":[1 ,2e0]}')):
            status, _, text = proxy.request("POST", path, body)
            self.assertEqual(status, 200, text)
            self.assertEqual(engine.get("/mock/requests")[-1]["body"].encode(), body)
        self.assertEqual(proxy.metric("moesaic_proxy_unrendered_total"), 2)
        self.assertEqual(proxy.metric("moesaic_proxy_rendered_total"), 0)
        proxy.idle()

    def test_streams_tokens_as_they_come(self):
        engine = self.mock("--step-ms", "20")
        proxy = self.proxy(f"engine {engine.url};")
        with proxy.streaming(prompt="Hello", max_tokens=20, stream_options={"include_usage": True}) as answer:
            self.assertEqual(answer.getheader("content-type"), "text/event-stream; charset=utf-8")
            first = answer.readline()
            self.assertTrue(first.startswith(b"data: "))
            self.assertEqual(proxy.state()["slots_used"], 1)  # the answer has not ended
            rest = answer.read()
        self.assertEqual(rest.count(b"data: "), 21)  # 19 tokens, usage and [DONE]
        self.assertTrue(rest.endswith(b"data: [DONE]\n\n"))
        proxy.idle()
        fields = proxy.access(1)[-1]
        self.assertEqual(fields[:2], ["200", "completed"])
        self.assertEqual(fields[14], "20")

    def test_stamps_stages_in_order(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        with proxy.streaming(prompt="Hello", max_tokens=5) as answer:
            answer.read()
        proxy.idle()
        times = proxy.access(1)[-1][2:12]
        self.assertEqual([t for i, t in enumerate(times) if t == "-"], ["-", "-"])  # decode waiting and scheduled
        known = [float(t) for t in times if t != "-"]
        self.assertEqual(known, sorted(known))
        self.assertEqual(known[0], 0)
        entered = {s["name"]: s["entered"] for s in proxy.state()["stages"]}
        self.assertEqual([entered[name] for name in STAGES], [1, 1, 1, 1, 1, 1, 0, 0, 1, 1])

    def test_sends_requests_with_a_known_prefix_to_the_same_engine(self):
        names = [self.endpoint(f"same{i}") for i in range(3)]
        engines = [self.mock("--kv-events", name, "--kv-replay", name + "-replay") for name in names]
        proxy = self.proxy("".join(f"engine {e.url} kv_events={n} kv_replay={n}-replay;" for e, n in zip(engines, names)))
        for engine in engines:  # a message makes the index exact
            until(lambda: request(HOST, engine.port, "POST", "/v1/completions", {"prompt": tokens(next(others), 32)})
                  and [e for e in proxy.state()["engines"] if e["url"] == engine.url][0]["index"] == "exact", what=proxy.state)
        before = [e.state()["served"] for e in engines]
        prompt = tokens(1, 1600)
        for _ in range(6):
            status, answer = proxy.complete(prompt=prompt, max_tokens=1)
            self.assertEqual(status, 200)
        self.assertEqual(sorted(e.state()["served"] - b for e, b in zip(engines, before)), [0, 0, 6])
        self.assertGreater(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 1500)
        self.assertGreater(proxy.idle()["tokens"]["cached"], 0)

    def test_spreads_requests_without_a_common_prefix(self):
        engines = [self.mock("--step-ms", "20") for _ in range(2)]
        proxy = self.proxy("".join(f"engine {e.url};" for e in engines))
        with contextlib.ExitStack() as streams:  # none ends before all have begun
            for i in range(12):
                streams.enter_context(proxy.streaming(prompt=tokens(i, 800), max_tokens=20000)).readline()
            live = [e.state()["live"] for e in engines]
        self.assertEqual(sum(live), 12)
        self.assertGreaterEqual(min(live), 3)
        proxy.idle()

    def test_follows_kv_events(self):
        for encoding in ("array", "map"):
            with self.subTest(encoding):
                name = self.endpoint(encoding)
                engine = self.mock("--kv-events", name, "--kv-replay", name + "-replay", "--kv-encoding", encoding)
                other = self.mock()
                proxy = self.proxy(f"engine {engine.url} kv_events={name} kv_replay={name}-replay; engine {other.url};")
                # The engine computes a prompt that the proxy has not seen.
                prompt = tokens(5, 1600)
                direct = lambda ids: request(HOST, engine.port, "POST", "/v1/completions", {"model": "m", "prompt": ids, "max_tokens": 1})
                direct(prompt)
                # Messages that were sent before the subscription are found missing by the next one.
                until(lambda: direct(tokens(next(others), 32)) and proxy.state()["index"]["memberships"] >= 100
                      and proxy.state()["engines"][0]["index"] == "exact", what=proxy.state)
                for i in range(4):
                    proxy.complete(prompt=prompt + tokens(100 + i, 50), max_tokens=1)
                self.assertEqual(other.state()["served"], 0)
                engine.reset()
                until(lambda: proxy.state()["index"]["memberships"] == 0, what=proxy.state)

    @unittest.skipUnless(has_ipv6(), "this machine has no IPv6")
    def test_follows_kv_events_over_ipv6(self):
        """Both directions of a subscription, and the replay of messages that were sent before it."""
        engine = self.mock("--kv-events", "tcp://[::1]:*", "--kv-replay", "tcp://[::1]:*")
        state = engine.state()
        self.assertRegex(state["kv_events"], r"^tcp://\[::1\]:\d+$")
        request(HOST, engine.port, "POST", "/v1/completions", {"model": "m", "prompt": tokens(5, 1600), "max_tokens": 1})
        proxy = self.proxy(f"engine {engine.url} kv_events={state['kv_events']} kv_replay={state['kv_replay']};")
        until(lambda: proxy.state()["index"]["memberships"] >= 100, what=proxy.state)
        until(lambda: proxy.state()["engines"][0]["index"] == "exact", what=proxy.state)
        engine.reset()
        until(lambda: proxy.state()["index"]["memberships"] == 0, what=proxy.state)

    def test_renders_prompts_once(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; model {MODEL};")
        proxy.complete(prompt="The capital of France is", max_tokens=1)
        sent = engine.requests()[-1][2]["prompt"]
        self.assertTrue(all(isinstance(token, int) for token in sent))
        body = {"model": "mock", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 1}
        self.assertEqual(proxy.request("POST", "/v1/chat/completions", body)[0], 200)
        self.assertEqual(engine.requests()[-1][2], body)  # vLLM takes no ids in an aggregated chat
        self.assertNotEqual(proxy.access(2)[-1][12], "-")
        self.assertEqual(proxy.metric("moesaic_proxy_rendered_total"), 2)
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        self.assertEqual(proxy.request("POST", "/v1/chat/completions", {"model": "mock", "messages": image})[0], 200)
        self.assertEqual(proxy.metric("moesaic_proxy_unrendered_total"), 1)
        proxy.idle()

    def test_enforces_caps_and_limits_the_queue(self):
        engine = self.mock("--step-ms", "20")
        proxy = self.proxy(f"engine {engine.url} max_requests=2; queue 3;")
        ask = lambda i: proxy.request("POST", "/v1/completions", {"model": "mock", "prompt": tokens(i, 100), "max_tokens": 10})
        waiting, served = lambda: proxy.state()["stages"][STAGES.index("prefill_waiting")]["now"], []
        queue = threading.Thread(target=lambda: served.extend(together(3, ask)))
        with contextlib.ExitStack() as streams:  # the engine has as many requests as it may have
            for i in range(2):
                streams.enter_context(proxy.streaming(prompt=tokens(10 + i, 100), max_tokens=20000)).readline()
            queue.start()
            until(lambda: waiting() == 3, what=proxy.state)
            for i in range(4):
                status, headers, text = ask(20 + i)
                self.assertEqual(status, 429)
                self.assertGreaterEqual(int(headers["retry-after"]), 1)
                self.assertEqual(json.loads(text)["error"]["type"], "rate_limit_error")
            self.assertEqual((waiting(), engine.state()["live"]), (3, 2))
        queue.join()
        self.assertEqual([answer[0] for answer in served], [200] * 3)
        self.assertEqual(proxy.idle()["outcomes"]["rejected"], 4)

    def test_refuses_malformed_bodies(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; max_body 100k;")
        for body, status in ((b"", 400), (b"{", 400), (b"[]", 400), (b'{"model":"m"}', 400), (b'{"prompt":3}', 400),
                             (b'{"prompt":"a","stream":"x"}', 400), (b"\x00\xff", 400), (b'{"prompt":"a"} x', 400),
                             (b'{"prompt":"a","ec_transfer_params":{"x":1}}', 501),
                             (b'{"prompt":"' + b"a" * 110_000 + b'"}', 413)):
            answer = proxy.request("POST", "/v1/completions", body)
            self.assertEqual(answer[0], status, body[:60])
            self.assertIn("error", json.loads(answer[2]))
        self.assertEqual(engine.state()["served"], 0)
        proxy.idle()

    def test_accepts_bodies_that_nginx_stores_in_files(self):
        engine = self.mock("--blocks", "20000")
        proxy = self.proxy(f"engine {engine.url};")
        status, answer = proxy.complete(prompt=tokens(1, 60_000), max_tokens=2)
        self.assertEqual((status, answer["usage"]["prompt_tokens"]), (200, 60_000))

    def test_requires_keys(self):
        engine = self.mock()
        proxy = self.proxy(f'engine {engine.url}; key secret-1 alice; key secret-2;')
        body = {"model": "mock", "prompt": "a", "max_tokens": 1}
        self.assertEqual(proxy.request("POST", "/v1/completions", body)[0], 401)
        self.assertEqual(proxy.request("POST", "/v1/completions", body, {"authorization": "Bearer secret"})[0], 401)
        self.assertEqual(proxy.request("POST", "/v1/completions", body, {"authorization": "Bearer secret-1"})[0], 200)
        self.assertEqual(proxy.request("POST", "/v1/completions", body, {"x-api-key": "secret-2"})[0], 200)
        self.assertNotIn("authorization", engine.requests()[0][1])

    def test_a_session_returns_to_its_engine(self):
        engines = [self.mock() for _ in range(3)]
        proxy = self.proxy("".join(f"engine {e.url};" for e in engines))
        used = lambda: [e.state()["served"] for e in engines]
        for session in ("one", "two"):
            before = used()
            for i in range(6):
                self.assertEqual(proxy.complete({"x-session-id": session}, prompt=tokens(next(others), 64), max_tokens=1)[0], 200)
                proxy.idle()
            self.assertEqual(sorted(b - a for a, b in zip(before, used())), [0, 0, 6])

    def test_engines_that_were_idle_longest_become_warm(self):
        engines = [self.mock() for _ in range(3)]
        pool = "".join(f"engine {e.url};" for e in engines)
        proxy = self.proxy(pool)
        for _ in range(3):
            self.assertEqual(proxy.complete(prompt=tokens(next(others), 64), max_tokens=1)[0], 200)
            proxy.idle()
        self.assertEqual([e.state()["served"] for e in engines], [1, 1, 1])
        added = self.mock()
        proxy.reload(pool + f"engine {added.url};")
        self.assertEqual(proxy.complete(prompt=tokens(next(others), 64), max_tokens=1)[0], 200)
        self.assertEqual(added.state()["served"], 1)

    def test_limits_the_tokens_of_a_key(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; key a; key b; tenant_rate 1 500;")
        ask = lambda key: proxy.request("POST", "/v1/completions", {"model": "mock", "prompt": tokens(1, 400), "max_tokens": 10},
                                        {"authorization": f"Bearer {key}"})
        self.assertEqual(ask("a")[0], 200)
        refused = ask("a")
        self.assertEqual(refused[0], 429)
        self.assertGreater(int(refused[1]["retry-after"]), 1)
        self.assertEqual(ask("b")[0], 200)

    def test_passes_errors_of_the_engine_on(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        status, answer = proxy.complete({"x-mock-status": "422"}, prompt="a")
        self.assertEqual((status, answer["error"]["message"]), (422, "fault injected by x-mock-status"))
        self.assertEqual(proxy.idle()["outcomes"]["failed"], 1)

    def test_passes_trace_headers_on(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        proxy.complete({"traceparent": parent, "x-request-id": "mine"}, prompt="a", max_tokens=1)
        headers = engine.requests()[-1][1]
        self.assertEqual((headers["traceparent"], headers["x-request-id"]), (parent, "mine"))

    def test_serves_pages(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        proxy.complete(prompt="a", max_tokens=2)
        self.assertIn(b"Moesaic proxy", proxy.request("GET", "/moesaic")[2])
        proxy.idle()  # nginx frees a request after the client has its answer
        trace = json.loads(proxy.request("GET", "/moesaic?trace")[2])["traceEvents"]  # has requests that ended
        self.assertEqual((trace[0]["name"], trace[-1]["name"]), ("received", "decode_running"))
        self.assertTrue(all(event["dur"] >= 0 for event in trace), trace)
        metrics = proxy.metrics()
        self.assertEqual(metrics['moesaic_proxy_requests_total{pool="pool",outcome="completed"}'], 1)
        self.assertEqual(metrics['moesaic_proxy_stage_seconds_count{pool="pool",stage="prefill_running"}'], 1)
        self.assertEqual(proxy.request("POST", "/metrics", {})[0], 405)

    def test_refuses_wrong_settings(self):
        for pool, word in (("", "no engine"), ("engine ftp://a;", "URL"), ("engine http://127.0.0.1:1 role=x;", "role"),
                           ("engine http://127.0.0.1:1; nonsense 1;", "nonsense"), ("engine http://127.0.0.1:1; queue x;", "queue"),
                           ("engine https://127.0.0.1:1;", "HTTP"), ("engine http://127.0.0.1:1 role=prefill;", "transfer"),
                           ("engine http://127.0.0.1:1; engine http://127.0.0.1:1;", "twice"),
                           ("engine http://127.0.0.1:1; transfer epd;", "EPD"), ("engine http://127.0.0.1:1; model /nowhere;", "model")):
            with self.assertRaises(ValueError) as caught:
                Proxy(pool)
            self.assertIn(word, str(caught.exception))


class Pairs(ProxyTest):
    def pair(self, transfer, prefill_flags=(), decode_flags=(), **options):
        prefill = self.mock("--transfer", transfer, "--role", "prefill", *prefill_flags, **options)
        decode = self.mock("--transfer", transfer, "--role", "decode", *decode_flags, **options)
        bootstrap = f" bootstrap_port={prefill.port}" if transfer in ("sglang", "mooncake") else ""
        pool = f"transfer {transfer}; skip_prefill 16; engine {prefill.url} role=prefill{bootstrap}; engine {decode.url} role=decode;"
        return prefill, decode, pool

    def check(self, transfer, stages, api="vllm", **options):
        prefill, decode, pool = self.pair(transfer, **options)
        metaserver = f"metaserver http://{HOST}:@PORT@/v1/metaserver;" if transfer == "ascend" else ""
        proxy = self.proxy(pool + f" api {api}; {metaserver}")
        status, answer = proxy.complete(prompt=tokens(1, 500), max_tokens=8)
        self.assertEqual((status, answer["usage"]["completion_tokens"]), (200, 8), answer)
        with proxy.streaming(prompt=tokens(2, 500), max_tokens=8) as stream:
            text = stream.read()
        self.assertEqual(text.count(b"data: "), 9, text)
        results = together(8, lambda i: proxy.complete(prompt=tokens(10 + i, 300), max_tokens=4)[0])
        self.assertEqual(results, [200] * 8)
        proxy.idle()
        entered = {s["name"]: s["entered"] for s in proxy.state()["stages"]}
        self.assertEqual([entered[name] for name in STAGES], [10 * n for n in stages])
        # No block is left waiting for the other engine.
        until(lambda: prefill.state()["pinned"] == 0 and prefill.state()["live"] == 0, what=prefill.state)
        self.assertEqual(prefill.state()["cancelled"] + decode.state()["cancelled"], 0)
        return prefill, decode, proxy

    def test_nixl_runs_prefill_before_decode(self):
        prefill, decode, proxy = self.check("nixl", [1] * 10)
        _, headers, body = prefill.requests()[0]
        self.assertEqual((body["max_tokens"], body["stream"]), (1, False))
        _, other, second = decode.requests()[0]
        self.assertEqual(headers["x-request-id"], other["x-request-id"])
        self.assertTrue(second["kv_transfer_params"]["do_remote_prefill"])
        self.assertEqual(second["max_tokens"], 8)

    def test_each_stage_has_a_histogram(self):
        _, _, pool = self.pair("nixl")
        proxy = self.proxy(pool)
        for i in range(5):
            self.assertEqual(proxy.complete(prompt=tokens(i, 500), max_tokens=8)[0], 200)
        proxy.idle()
        metrics, total = proxy.metrics(), 0
        for stage in STAGES[:-1]:
            label = f'pool="pool",stage="{stage}"'
            buckets = [value for key, value in metrics.items() if key.startswith(f"moesaic_proxy_stage_seconds_bucket{{{label},le=")]
            self.assertEqual((buckets, buckets[-1]), (sorted(buckets), 5))
            self.assertEqual(metrics[f"moesaic_proxy_stage_seconds_count{{{label}}}"], 5)
            total += metrics[f"moesaic_proxy_stage_seconds_sum{{{label}}}"]
        self.assertGreater(total, 0)
        self.assertAlmostEqual(total, metrics['moesaic_proxy_request_seconds_sum{pool="pool"}'], delta=1e-6)

    def test_nixl_reports_cached_tokens_of_the_prefill_engine(self):
        _, _, pool = self.pair("nixl")
        proxy = self.proxy(pool)
        proxy.complete(prompt=tokens(1, 160), max_tokens=1)
        cached = [proxy.complete(prompt=tokens(1, 160) + tokens(i, 320), max_tokens=2)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
                  for i in (2, 3)]
        self.assertEqual(cached, [160, 160])

    def test_nixl_forwards_ids_of_chats_to_decode_engines(self):
        prefill, decode, pool = self.pair("nixl")
        proxy = self.proxy(pool + f"model {MODEL}; skip_prefill 0;")
        body = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 2}
        self.assertEqual(proxy.request("POST", "/v1/chat/completions", body)[0], 200)
        self.assertNotIn("prompt_token_ids", prefill.requests()[-1][2]["kv_transfer_params"])
        self.assertEqual(len(decode.requests()[-1][2]["kv_transfer_params"]["prompt_token_ids"]), 12)

    def test_skips_prefill_of_short_prompts(self):
        prefill, decode, pool = self.pair("nixl")
        proxy = self.proxy(pool + "skip_prefill 256;")
        self.assertEqual(proxy.complete(prompt=tokens(1, 100), max_tokens=2)[0], 200)
        self.assertEqual((prefill.state()["served"], decode.state()["served"]), (0, 1))
        self.assertNotIn("kv_transfer_params", decode.requests()[0][2])
        proxy.idle()

    PARALLEL = [1, 1, 1, 1, 1, 1, 0, 0, 1, 1]

    def test_sglang_sends_both_at_once(self):
        prefill, decode, _ = self.check("sglang", self.PARALLEL, api="sglang")
        self.assertEqual(prefill.requests()[0][2]["bootstrap_room"], decode.requests()[0][2]["bootstrap_room"])
        self.assertIsInstance(decode.requests()[0][2]["bootstrap_port"], int)

    def test_mooncake_queries_the_bootstrap_server(self):
        prefill, decode, _ = self.check("mooncake", self.PARALLEL)
        params = decode.requests()[0][2]["kv_transfer_params"]
        self.assertEqual(params["transfer_id"], prefill.requests()[0][2]["kv_transfer_params"]["transfer_id"])
        self.assertTrue(params["remote_engine_id"].startswith("mock-"))

    def test_ascend_starts_with_decode(self):
        prefill, _, _ = self.check("ascend", self.PARALLEL)
        self.assertTrue(prefill.requests()[0][2]["kv_transfer_params"]["do_remote_decode"])

    @unittest.skipUnless(has_ipv6(), "this machine has no IPv6")
    def test_engines_may_have_ipv6_addresses(self):
        self.check("nixl", [1] * 10, host="::1")
        _, decode, _ = self.check("mooncake", self.PARALLEL, host="::1")
        self.assertRegex(decode.requests()[0][2]["kv_transfer_params"]["remote_bootstrap_addr"], r"^http://\[::1\]:\d+$")
        self.check("ascend", self.PARALLEL, host="::1")


if __name__ == "__main__":
    main()
