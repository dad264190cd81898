#!/usr/bin/env python3
"""Tests the server's HTTP API: errors that name the field, limits, keys, CORS, draining, metrics, cancellation."""
import contextlib
import http.client
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import json_cases
from serving import ANSWER_SECONDS, BINARY, MODEL, WAIT_SECONDS, Server, ServingCase, chat, serving, until, wire

CHAT = "/v1/chat/completions"


class Api(ServingCase):
    FLAGS = ("--max-body", "1MiB")

    def fails(self, path, body, status, param=None, words=""):
        got, answer = self.server.json("POST", path, body)
        error = answer["error"]
        self.assertEqual(got, status, answer)
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual(error["param"], param, error)
        self.assertIn(words, error["message"])

    def test_renders_as_the_verb_does(self):
        call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"zone": 1, "area": {"q": 2, "b": 3}}'}}
        tool = {"type": "function", "function": {"name": "find", "description": "Finds", "parameters": {
            "type": "object", "properties": {"zone": {"type": "integer"}, "area": {"type": "object"}}, "required": ["zone"]}}}
        talk = [{"content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?"}], "role": "user"},
                {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "here"}]
        for request in ({"messages": talk, "tools": [tool]}, {"messages": talk[:1], "tools": [tool], "tool_choice": "none"},
                        {"messages": talk[:1] + [{"role": "assistant", "content": "It is "}], "continue_final_message": True},
                        {"messages": talk[:1], "add_generation_prompt": False}):
            status, answer = self.server.json("POST", "/v1/chat/completions/render", request)
            self.assertEqual(status, 200, answer)
            verb = subprocess.run([BINARY, "render", MODEL], input=json.dumps(request), capture_output=True, text=True,
                                  timeout=ANSWER_SECONDS, check=True)
            self.assertEqual(verb.stdout, answer["prompt"])
        refused = subprocess.run([BINARY, "render", MODEL], input='{"messages": [{"role": "king", "content": ""}]}',
                                 capture_output=True, text=True, timeout=ANSWER_SECONDS)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("messages[0].role", refused.stderr)

    def test_names_the_field_that_is_wrong(self):
        text = [{"role": "user", "content": "hi"}]
        for fields, param in [
            ({"messages": []}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            ({"messages": text, "temperature": "1"}, "temperature"),
            ({"messages": text, "temperature": -1}, "temperature"),
            ({"messages": text, "top_p": 0}, "top_p"),
            ({"messages": text, "max_tokens": 1.5}, "max_tokens"),
            ({"messages": text, "max_tokens": 10**30}, "max_tokens"),
            ({"messages": text, "max_tokens": 100000}, "messages"),
            ({"messages": text, "n": 0}, "n"),
            ({"messages": text, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
            ({"messages": text, "stop": [1]}, "stop[0]"),
            ({"messages": text, "stream": "yes"}, "stream"),
            ({"messages": text, "stream_options": {}}, "stream_options"),
            ({"messages": text, "logit_bias": {"x": 1}}, "logit_bias.x"),
            ({"messages": text, "logit_bias": {"5": 101}}, "logit_bias.5"),
            ({"messages": text, "top_logprobs": 3}, "top_logprobs"),
            ({"messages": text, "session": "goes on"}, "session"),
            ({"messages": text, "session": 3}, "session"),
            ({"messages": text, "session": {"state": "over"}}, "session.state"),
            ({"messages": text, "session": {"tokens": -1}}, "session.tokens"),
            ({"messages": text, "session": {"tokens": 1.5}}, "session.tokens"),
            ({"messages": text, "session": {"returns_in": "soon"}}, "session.returns_in"),
            ({"messages": text, "session": {"state": "ends", "returns_in": 30}}, "session.returns_in"),
            ({"messages": text, "tools": [{"type": "function"}]}, "tools[0].function"),
            ({"messages": text, "tool_choice": "required"}, "tool_choice"),
            ({"messages": text, "response_format": {"type": "xml"}}, "response_format.type"),
            ({"messages": text, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
             "response_format.json_schema.schema"),
        ]:
            with self.subTest(fields=fields):
                self.fails(CHAT, fields, 400, param)
        self.fails(CHAT, {"messages": text, "model": "gpt-9"}, 404, "model", "moesaic-tiny")
        for fields, param in [({}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": [1, "x"]}, "prompt[1]"),
                              ({"prompt": ""}, "prompt"), ({"prompt": [[-1]]}, "prompt[0]"),
                              ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
                              ({"prompt": "x", "suffix": "y"}, "suffix")]:
            with self.subTest(fields=fields):
                self.fails("/v1/completions", fields, 400, param)
        self.fails("/v1/completions", {"prompt": [10**6]}, 400, None, "1000000")
        for session in ("ends", {}, {"state": "ends"}, {"tokens": 0}, {"tokens": 2**62, "returns_in": 1e9}):
            status, answer = self.server.json("POST", CHAT, {"messages": text, "max_tokens": 2, "session": session})
            self.assertEqual(status, 200, answer)

    def test_accepts_exactly_the_json_of_the_standard(self):
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=ANSWER_SECONDS)

        def status_of(body):
            connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        for value in json_cases.well_formed():
            self.assertEqual(status_of(b'{"prompt":"x","extra":' + value + b"}"), 200, value[:60])
        for value in json_cases.malformed():
            self.assertEqual(status_of(value), 400, value[:60])
            self.assertEqual(status_of(b'{"prompt":"x","extra":[' + value + b",0]}"), 400, value[:60])
        for value in json_cases.undecided():
            self.assertIn(status_of(b'{"prompt":"x","extra":' + value + b"}"), (200, 400), value[:60])
        connection.close()

    def test_answers_errors_in_the_format_of_the_api(self):
        status, answer = self.server.json("POST", "/v1/messages", {"messages": []})
        self.assertEqual((status, answer["type"], answer["error"]["type"]), (400, "error", "invalid_request_error"))
        self.assertEqual(self.server.request("GET", "/nowhere")[0], 404)
        for method, path, allow in [("GET", CHAT, "POST"), ("PUT", "/health", "GET"), ("POST", "/v1/responses/x", "GET, DELETE")]:
            status, headers, _ = self.server.request(method, path)
            self.assertEqual((status, headers.get("allow")), (405, allow))

    def test_describes_the_parameters_of_lists(self):
        paths = self.server.json("GET", "/openapi.json")[1]["paths"]
        for path in ("/v1/responses/{response_id}/input_items", "/v1/conversations/{conversation_id}/items"):
            names = {(each["in"], each["name"]) for each in paths[path]["get"]["parameters"]}
            self.assertEqual({name for place, name in names if place == "query"}, {"limit", "order", "after"})
            self.assertEqual(len(names), 4)
        replay = paths["/v1/responses/{response_id}"]["get"]["parameters"]
        self.assertEqual([each["name"] for each in replay], ["response_id", "stream", "starting_after"])

    def test_limits_bodies_and_headers(self):
        self.assertEqual(self.server.request("POST", CHAT, b" " * (2 << 20))[0], 413)
        self.assertEqual(self.server.request("GET", "/health", headers={"x": "y" * 40_000})[0], 431)
        with socket.create_connection((self.server.host, self.server.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            client.settimeout(ANSWER_SECONDS)
            while not select.select([client], [], [], 0)[0]:
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            self.assertIn(b" 413 ", client.recv(4096)[:20])

    def test_answers_every_http_request(self):
        def raw(request):
            with socket.create_connection((self.server.host, self.server.port), timeout=ANSWER_SECONDS) as client:
                client.sendall(request)
                answer = b""
                while piece := client.recv(65536):
                    answer += piece
                return answer
        self.assertTrue(raw(b"\x16\x03\x01garbage\r\n\r\n").startswith(b"HTTP/1.1 400 "))
        self.assertTrue(raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 "))
        two = raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        self.assertEqual(two.count(b"HTTP/1.1 200 OK"), 2)  # pipelined
        head = raw(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        self.assertTrue(head.endswith(b"\r\n\r\n"), head)
        body = b'{"prompt":"hi"}'
        expect = (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\nconnection: close\r\n"
                  b"content-length: %d\r\n\r\n" % len(body)) + body
        self.assertIn(b"100 Continue\r\n\r\nHTTP/1.1 200 OK", raw(expect))
        body = b'{"prompt":"a","stream":true,"max_tokens":2}'
        stream = raw(b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        self.assertTrue(stream.endswith(b"data: [DONE]\n\n"), stream)

    def test_serves_health_version_and_models(self):
        self.assertEqual(self.server.json("GET", "/health"), (200, {"status": "ok"}))
        self.assertEqual(self.server.json("GET", "/ready"), (200, {"status": "ready"}))
        self.assertIn("version", self.server.json("GET", "/version")[1])
        models = self.server.json("GET", "/v1/models")[1]["data"]
        self.assertEqual([m["id"] for m in models], ["moesaic-tiny"])
        self.assertEqual(self.server.json("GET", "/v1/models/moesaic-tiny")[1]["max_model_len"], 4096)
        self.assertEqual(self.server.request("GET", "/v1/models/other")[0], 404)
        page = self.server.request("GET", "/")
        self.assertEqual((page[0], page[1]["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertEqual(self.server.request("GET", "/js/main.js")[1]["content-type"], "text/javascript; charset=utf-8")
        self.assertEqual(self.server.request("GET", "/../serve.cc")[0], 404)
        self.server.json("POST", CHAT, chat("word " * 200, max_tokens=1))
        kv = self.server.json("GET", "/state")[1]["kv"]
        self.assertGreater(kv["tree_nodes"], 0)
        self.assertLessEqual(kv["tree_nodes"], kv["cached_blocks"] + kv["used_blocks"])

    def test_metrics_count_tokens_and_requests(self):
        before = self.server.metrics()
        self.assertEqual(self.server.json("POST", CHAT, chat("Hello", max_tokens=4, ignore_eos=True))[0], 200)
        after = self.server.metrics()

        def grown(name):
            return sum(v for k, v in after.items() if k.startswith(name)) - sum(
                v for k, v in before.items() if k.startswith(name))
        self.assertEqual(grown("vllm:generation_tokens_total"), 4)
        self.assertEqual(grown('vllm:request_success_total'), 1)
        self.assertEqual(grown("vllm:time_to_first_token_seconds_count"), 1)
        self.assertEqual(grown("vllm:inter_token_latency_seconds_count"), 3)
        self.assertEqual(grown("vllm:e2e_request_latency_seconds_count"), 1)
        self.assertTrue(any(k.startswith("moesaic:kernel_info") for k in after))
        self.assertTrue(any(k.startswith("vllm:cache_config_info") and 'block_size="64"' in k for k in after))

    def test_counts_the_first_token_when_it_is_generated(self):
        def counted():
            name = "vllm:time_to_first_token_seconds_count"
            before = self.server.metric(name)
            with self.server.holding():
                until(lambda: self.server.metric(name) > before)
                return self.server.metric("vllm:num_requests_running") > 0
        until(counted)
        self.server.wait_until_quiet()

    def test_traces_have_the_stages_of_a_request(self):
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "mine"}
        _, answered, _ = self.server.request("POST", CHAT, chat("Hi", max_tokens=2), headers)
        self.assertEqual(answered["x-request-id"], "mine")
        self.assertEqual(answered["traceparent"].split("-")[1], trace)
        events = self.server.json("GET", "/debug/trace")[1]["traceEvents"]
        names = [e["name"] for e in events if e["args"]["trace_id"] == trace]
        self.assertEqual(sorted(names), ["decode", "prefill", "queue"])

    def test_tokenizes_renders_and_counts(self):
        _, ids = self.server.json("POST", "/tokenize", {"prompt": "Hello there"})
        self.assertEqual(ids["count"], len(ids["tokens"]))
        self.assertEqual(self.server.json("POST", "/detokenize", {"tokens": ids["tokens"]})[1]["prompt"], "Hello there")
        _, rendered = self.server.json("POST", CHAT + "/render", chat("Hi"))
        self.assertEqual(rendered["prompt"], "<|begin|><|user|>Hi<|end|><|assistant|>")
        _, same = self.server.json("POST", "/tokenize", chat("Hi"))
        self.assertEqual(same["tokens"], rendered["prompt_token_ids"])
        _, counted = self.server.json("POST", "/v1/messages/count_tokens", chat("Hi"))
        self.assertEqual(counted["input_tokens"], rendered["count"])

    def test_limits_texts_before_it_tokenizes_them(self):
        long = "a" * (2 << 20)
        with serving() as server:
            for path, body in [("/tokenize", {"prompt": long}), ("/v1/completions", {"prompt": long})]:
                status, answer = server.json("POST", path, body)
                self.assertEqual((status, answer["error"]["code"]), (400, "context_length_exceeded"), path)
            # A client may divide a text that exceeds the context by its tokens.
            self.assertEqual(server.json("POST", "/tokenize", {"prompt": "a" * 500_000})[0], 200)
            # The text of ids may be many times as long as their request.
            self.assertEqual(server.json("POST", "/detokenize", {"tokens": [5] * (128 << 10)})[0], 200)
            status, answer = server.json("POST", "/detokenize", {"tokens": [5] * ((128 << 10) + 1)})
            self.assertEqual((status, answer["error"]["code"]), (400, "array_above_max_length"))

    def test_limits_stop_strings(self):
        long = "x" * 1025
        status, answer = self.server.json("POST", CHAT, chat("Hi", max_tokens=1, stop=["y", long]))
        self.assertEqual((status, answer["error"]["param"]), (400, "stop"))
        status, answer = self.server.json("POST", "/v1/messages", chat("Hi", max_tokens=1, stop_sequences=[long]))
        self.assertEqual(status, 400, answer)
        self.assertIn("stop_sequences", answer["error"]["message"])

    def test_cancels_when_the_client_leaves(self):
        self.server.wait_until_quiet()
        for stream in (True, False):
            for leave in ("at once", "half-closed", "after a flood"):
                before = self.server.aborted()

                def cancelled():
                    with self.server.holding(stream) as client:
                        if leave == "half-closed":
                            client.shutdown(socket.SHUT_WR)
                            client.recv(65536)  # the server probes it, or streams
                        elif leave == "after a flood":
                            client.sendall(b"x" * 200_000)  # more than the server reads ahead
                    self.server.wait_until_quiet()
                    return self.server.aborted() > before
                with self.subTest(stream=stream, leave=leave):
                    until(cancelled)

    def test_answers_a_client_that_sends_no_more(self):
        for stream in (True, False):
            body = json.dumps(chat("Tell me a story.", n=4, max_tokens=500, ignore_eos=True, stream=stream)).encode()
            with socket.create_connection((self.server.host, self.server.port), timeout=ANSWER_SECONDS) as client:
                client.sendall(wire(CHAT, body))
                client.shutdown(socket.SHUT_WR)
                answer = b""
                while piece := client.recv(65536):
                    answer += piece
            self.assertIn(b"HTTP/1.1 200 OK\r\n", answer)
            if stream:
                self.assertTrue(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-100:])
            else:
                usage = json.loads(answer[answer.rindex(b"\r\n\r\n"):])["usage"]
                self.assertEqual(usage["completion_tokens"], 2000)


class Settings(unittest.TestCase):
    def test_closes_slow_clients(self):
        # The time between requests does not end these connections before the limit of the test.
        with serving("--header-timeout", "1", "--body-timeout", "1", "--idle-timeout", "100000") as server:
            for start in (b"GET /health HT", b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"):
                with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
                    client.sendall(start)
                    self.assertEqual(client.recv(100), b"")

    def test_requires_one_of_its_keys(self):
        with serving("--api-key", "one", "--api-key", "two") as server:
            for headers, status in [({}, 401), ({"authorization": "Bearer one"}, 200), ({"x-api-key": "two"}, 200),
                                    ({"authorization": "Bearer on"}, 401), ({"authorization": "Bearer onee"}, 401),
                                    ({"authorization": "Bearer "}, 401)]:
                with self.subTest(headers=headers):
                    self.assertEqual(server.request("GET", "/v1/models", headers=headers)[0], status)
                    self.assertEqual(server.request("POST", "/tokenize", {"prompt": "x"}, headers)[0], status)
            self.assertEqual(server.request("GET", "/health")[0], 200)

    def test_keys_of_a_file_may_contain_any_character(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "serve.toml"
            file.write_text("api-key = \"one#two, three\"  # a comment\nserved-model-name = 'm#1'\n")
            with serving("--config", file) as server:
                for key, status in [("one#two, three", 200), ("one", 401), ("one#two", 401)]:
                    self.assertEqual(server.request("GET", "/v1/models", headers={"x-api-key": key})[0], status)
                models = server.json("GET", "/v1/models", headers={"x-api-key": "one#two, three"})[1]["data"]
                self.assertEqual([m["id"] for m in models], ["m#1"])

    def test_answers_503_while_the_model_is_being_loaded(self):
        """Requests while the model is being loaded get 503 with the reason. Later requests get an answer."""
        with socket.create_server(("127.0.0.4", 0)) as free:
            port = free.getsockname()[1]
        started = []
        thread = threading.Thread(target=lambda: started.append(Server("--host", "127.0.0.4", port=port)))
        thread.start()
        said = {}

        def status():
            try:
                connection = http.client.HTTPConnection("127.0.0.4", port, timeout=ANSWER_SECONDS)
                connection.request("GET", "/health")
                answer = connection.getresponse()
                said[answer.status] = answer.read()
                return answer.status
            except OSError:
                return None  # the port is not open yet
        until(lambda: status() == 200)
        thread.join()
        self.assertEqual(started[0].stop(), 0)
        self.assertLessEqual(set(said), {200, 503})
        if 503 in said:  # a slow machine may miss it; the unit test of HttpServer always sees it
            self.assertEqual(json.loads(said[503])["error"]["message"], "the model is still being loaded")

    def test_refuses_an_empty_key(self):
        def said(code, *flags, **environment):
            result = subprocess.run([str(BINARY), "serve", str(MODEL), *flags], capture_output=True, text=True, timeout=ANSWER_SECONDS,
                                    env={**os.environ, **environment})
            self.assertEqual((result.returncode, result.stdout), (code, ""))
            self.assertIn("api-key is empty", result.stderr)
        said(2, "--api-key", "")
        said(2, "--api-key", "", "--api-key", "real")
        said(1, MOESAIC_API_KEY="")

    def test_keeps_responses_by_key(self):
        with serving("--api-key", "one", "--api-key", "two", "--max-stored-responses", "2") as server:
            one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}

            def ask(**fields):
                return server.json("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 1, **fields}, one)
            ids = [ask()[1]["id"] for _ in range(3)]
            self.assertEqual([server.request("GET", f"/v1/responses/{id_}", headers=one)[0] for id_ in ids], [404, 200, 200])
            self.assertEqual(server.request("GET", f"/v1/responses/{ids[2]}", headers=two)[0], 404)
            self.assertEqual(server.request("DELETE", f"/v1/responses/{ids[2]}", headers=two)[0], 404)
            status, answer = ask(previous_response_id=ids[0])
            self.assertEqual((status, answer["error"]["code"]), (400, "previous_response_not_found"))
            self.assertEqual(ask(previous_response_id=ids[2])[0], 200)
            self.assertEqual(server.request("DELETE", f"/v1/responses/{ids[2]}", headers=one)[0], 200)
            # Conversations count as stored responses and belong to their key as well.
            talk = server.json("POST", "/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}, one)[1]["id"]
            self.assertEqual(server.request("GET", f"/v1/conversations/{talk}/items", headers=one)[0], 200)
            for method, path in [("GET", ""), ("DELETE", ""), ("POST", ""), ("GET", "/items"), ("POST", "/items")]:
                body = None if method != "POST" else {"items": [], "metadata": {}}
                self.assertEqual(server.request(method, f"/v1/conversations/{talk}{path}", body, two)[0], 404, (method, path))
            status, answer = server.json("POST", "/v1/responses", {"input": "x", "conversation": talk}, two)
            self.assertEqual(status, 404, answer)
            self.assertEqual(ask(conversation=talk)[0], 200)
        with serving("--api-key", "one", "--api-key", "two", "--stored-responses-memory", "100KiB") as server:
            talk = server.json("POST", "/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}, one)[1]["id"]
            for _ in range(20):
                items = [{"role": "user", "content": "x" * 20_000}]
                self.assertEqual(server.request("POST", "/v1/conversations", {"items": items}, two)[0], 200)
            self.assertEqual(server.request("GET", f"/v1/conversations/{talk}", headers=one)[0], 200)
        with serving("--max-stored-responses", "0") as server:
            self.assertEqual(server.request("POST", "/v1/conversations", {})[0], 400)
            _, answer = server.json("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 1})
            self.assertEqual(answer["store"], False)

    def test_answers_cors_requests_of_allowed_origins(self):
        with serving("--cors-origin", "http://a.example") as server:
            good = server.request("OPTIONS", CHAT, headers={"origin": "http://a.example",
                                                            "access-control-request-method": "POST"})
            self.assertEqual((good[0], good[1]["access-control-allow-origin"]), (204, "http://a.example"))
            self.assertIn("authorization", good[1]["access-control-allow-headers"])
            # Official clients send headers of their own.
            names = "authorization,content-type,x-stainless-os,x-stainless-lang,anthropic-dangerous-direct-browser-access"
            asked = server.request("OPTIONS", CHAT, headers={"origin": "http://a.example", "access-control-request-method": "POST",
                                                             "access-control-request-headers": names})
            self.assertEqual(asked[1]["access-control-allow-headers"], names)
            bad = server.request("OPTIONS", CHAT, headers={"origin": "http://b.example"})
            self.assertEqual(bad[0], 403)
            self.assertNotIn("access-control-allow-origin", bad[1])
            answer = server.request("GET", "/v1/models", headers={"origin": "http://a.example"})
            self.assertEqual(answer[1]["access-control-allow-origin"], "http://a.example")
            self.assertIn("retry-after", answer[1]["access-control-expose-headers"])

    def test_limits_requests_and_queue(self):
        hello = chat("Hi", max_tokens=1)
        with serving("--max-requests", "1") as server:
            def refused():
                with server.holding():
                    status, headers, _ = server.request("POST", CHAT, hello)
                return (status, headers.get("retry-after")) == (429, "1")
            until(refused)
            until(lambda: server.request("POST", CHAT, hello)[0] == 200)
        with serving("--max-sequences", "1", "--max-queue", "3") as server:
            texts = ["a", "b", "c"]
            for path, crowd in ((CHAT, chat("Hi", n=3)), ("/v1/completions", {"prompt": texts}), ("/v1/embeddings", {"input": texts})):
                status, answer = server.json("POST", path, crowd)
                self.assertEqual((status, answer["error"]["message"]),
                                 (400, "one client may have at most 2 waiting sequences, half of the queue; found 3"), path)
            self.assertEqual(server.request("POST", CHAT, {**hello, "n": 2})[0], 200)

    def test_one_client_leaves_room_in_the_queue(self):
        with serving("--max-sequences", "1", "--max-queue", "255") as server:
            def ask(address):
                connection = http.client.HTTPConnection(server.host, server.port, ANSWER_SECONDS, source_address=(address, 0))
                with contextlib.closing(connection):
                    body = json.dumps(chat("Tell me a story", n=64, max_tokens=4000, ignore_eos=True, stream=True))
                    connection.request("POST", CHAT, body, {"content-type": "application/json"})
                    answer = connection.getresponse()
                    return answer.status, answer.headers.get("retry-after"), answer.read() if answer.status != 200 else b""

            def others_are_served():
                server.wait_until_quiet()
                with server.holding():  # one sequence runs, and 127 wait
                    (refused, retry, text), (served, _, _) = ask("127.0.0.1"), ask("127.0.0.2")
                return (refused, retry, served) == (429, "1", 200) and b"one client may have at most as many as are free" in text
            until(others_are_served)
            until(lambda: server.request("POST", CHAT, chat("Hi", max_tokens=1))[0] == 200)

    def test_drains_running_requests_before_it_ends(self):
        server = Server("--drain-timeout", "600")
        answers = []
        body = chat("Tell me a story", max_tokens=3900, ignore_eos=True, n=16)
        thread = threading.Thread(target=lambda: answers.append(server.json("POST", CHAT, body)))
        thread.start()
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.request("GET", "/ready")[0] != 200)
        status, headers, _ = server.request("POST", CHAT, chat("Hi"))
        self.assertEqual((status, headers["retry-after"]), (503, "5"))
        thread.join()
        self.assertEqual(answers[0][1]["usage"]["completion_tokens"], 16 * 3900)
        server.process.wait(WAIT_SECONDS)
        self.assertEqual(server.stop(), 0)

    def test_cuts_off_after_the_drain_time(self):
        def cut_off():
            server = Server("--drain-timeout", "0")
            with server.holding() as client:
                self.assertEqual(server.stop(), 0)
                said = b""
                while piece := client.recv(1 << 20):
                    said += piece
            return b"the server is shutting down" in said and b"data: [DONE]" in said
        until(cut_off)

    def test_ends_requests_that_take_too_long(self):
        with serving("--request-timeout", "1") as server:
            body = chat("Tell me a story", max_tokens=4000, ignore_eos=True, n=128)
            status, answer = server.json("POST", CHAT, body)
            last = answer["choices"][-1]
            self.assertEqual((status, last["finish_reason"], last["stop_reason"]), (200, "deadline", None))

    def test_survives_being_killed(self):
        address = "--host", "127.0.0.2"  # no other test uses a port of this address
        server = Server(*address)
        server.json("POST", CHAT, chat("Hi", max_tokens=4))
        port = server.port
        self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
        with serving(*address, port=port) as again:
            self.assertEqual(again.json("POST", CHAT, chat("Hi", max_tokens=4))[0], 200)

    def test_settings_come_from_flag_environment_and_file(self):
        def printed(*flags, **environment):
            result = subprocess.run([str(BINARY), "serve", str(MODEL), "--print-config", *flags], capture_output=True,
                                    text=True, env={**os.environ, **environment}, timeout=ANSWER_SECONDS)
            self.assertEqual(result.returncode, 0, result.stderr)
            lines = [line.split("=", 1) for line in result.stdout.splitlines() if line and line[0] not in "#;["]
            return {key.strip(): value.strip().strip('"') for key, value in lines}
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "serve.toml"
            file.write_text('max-queue = 7\nport = 81\nhost = "0.0.0.0"\naccess-log = false\n')
            got = printed("--config", str(file), "--port", "83", MOESAIC_PORT="82", MOESAIC_HOST="::")
            self.assertEqual((got["max-queue"], got["port"], got["host"], got["access-log"]), ("7", "83", "::", "off"))
            got = printed("--config", str(file), MOESAIC_CONFIG=str(file))
            self.assertEqual((got["port"], got["host"]), ("81", "0.0.0.0"))
            file.write_text("max-cue = 7\n")
            bad = subprocess.run([str(BINARY), "serve", str(MODEL), "--config", str(file)], capture_output=True, text=True)
            self.assertEqual(bad.returncode, 1)
            self.assertIn("max-cue", bad.stderr)
            file.write_text("max-queue = many\n")
            bad = subprocess.run([str(BINARY), "serve", str(MODEL), "--config", str(file)], capture_output=True, text=True)
            self.assertEqual(bad.returncode, 1)
        again = printed()
        self.assertNotIn("api-key", again)


if __name__ == "__main__":
    unittest.main()
