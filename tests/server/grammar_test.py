#!/usr/bin/env python3
"""Tests hostile grammars. The server refuses each with a 400 that names the field and the fault, or answers it, and
continues to serve."""
import json
import socket
import threading
import unittest

from serving import ANSWER_SECONDS, chat, serving, until, wire

CHAT = "/v1/chat/completions"
FAILURES = "moesaic:request_failures_total"


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def intersection(count):
    return {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(count)]}


def forced(parameters):
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "tool_choice": "required"}


# Schemas whose references lead back to themselves, at the start or where an answer would reach them later.
LOOPS = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}},
     "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": {"anyOf": [{"$ref": "#/$defs/x"}]}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}},
     "$defs": {"x": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}}}},
]
# (fields, name of the field in the error, part of the message)
REFUSED = [
    ({"response_format": schema_format({"$ref": "#"})}, "response_format.json_schema.schema", "no finite text"),
    ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
     "guided_json", "no finite text"),
    ({"guided_json": {"const": "x" * 1_000_000}}, "guided_json", "at most 262144"),
    ({"guided_json": {"type": "string", "pattern": "a" * 20_000}}, "guided_json", "at most 16384"),
    ({"guided_json": intersection(60)}, "guided_json", "intersects"),
    ({"guided_json": {"type": "integer", "multipleOf": 9999991}}, "guided_json", "costs too much"),
    ({"guided_grammar": 'start: a\na: a "x"\n'}, "guided_grammar", "no finite text"),
    ({"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "guided_grammar", "nested"),
    ({"guided_grammar": 'start: "' + "a" * 70_000 + '"'}, "guided_grammar", "at most 65536"),
    ({"guided_regex": "[" + "".join(chr(0x4e00 + i) for i in range(16_000)) + "]+"}, "guided_regex", "at most 16384"),
    ({"guided_regex": "a" * 1_000_000}, "guided_regex", "at most 16384"),
    ({"guided_regex": "(" * 8000 + "a" + ")" * 8000}, "guided_regex", "invalid regex"),
    ({"guided_regex": r"\w?" * 4000}, "guided_regex", "too"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "Invalid"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": intersection(60)}, "required": ["a"]}}}],
      "tool_choice": "required"}, "tools", "intersects"),
    *((forced(schema), "tools", "no finite text") for schema in LOOPS),
    *(({"guided_json": schema}, "guided_json", "no finite text") for schema in LOOPS),
]
# Large repetitions are cheap, so that the server answers them.
ANSWERED = [
    {"guided_regex": "[a-z]{1,100000}"},
    {"guided_json": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}},
    {"guided_json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
    # References that end on some path.
    {"guided_json": {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]}},
    {"guided_json": {"type": "array", "items": {"$ref": "#"}}},
]
# The first masks of this regex are cheap. Each token multiplies the ways to split the text, until a mask exceeds its fuel.
FAILS_LATE = "(([a-z]{1,1000}){1,1000}){1,1000}"


class Grammar(unittest.TestCase):
    def failures(self, server, cause):
        return sum(value for name, value in server.metrics().items()
                   if name.startswith(FAILURES) and f'cause="{cause}"' in name)

    def test_refuses_hostile_grammars(self):
        with serving() as server:
            for fields, param, part in REFUSED:
                for stream in (False, True):
                    with self.subTest(param=param, part=part, stream=stream):
                        status, headers, text = server.request("POST", CHAT, chat("Hi", stream=stream, max_tokens=4, **fields))
                        self.assertEqual(status, 400, text[:300])
                        self.assertEqual(headers["content-type"], "application/json")
                        error = json.loads(text)["error"]
                        self.assertEqual((error["type"], error["param"]), ("invalid_request_error", param))
                        self.assertIn(part, error["message"])
                        self.assertIn(param, error["message"])
                        self.assertLess(len(error["message"]), 600)
            self.assertGreater(self.failures(server, "grammar_refused"), 0)
            status, _ = server.json("POST", CHAT, chat("Hi", max_tokens=4, guided_regex="[0-9]{3}"))
            self.assertEqual(status, 200)

    def test_answers_large_repetitions(self):
        with serving() as server:
            for fields in ANSWERED:
                status, answer = server.json("POST", CHAT, chat("Hi", max_tokens=8, **fields))
                self.assertEqual(status, 200, answer)
                self.assertIn(answer["choices"][0]["finish_reason"], ("length", "stop"))

    def test_refusals_have_the_shape_of_each_api(self):
        tools = [{"name": "f", "input_schema": intersection(60)}]
        with serving() as server:
            status, answer = server.json("POST", "/v1/messages", {
                "model": "moesaic-tiny", "max_tokens": 4, "tools": tools, "tool_choice": {"type": "any"},
                "messages": [{"role": "user", "content": "Hi"}]})
            self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"))
            status, answer = server.json("POST", "/v1/responses", {
                "input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}})
            self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"))
            status, answer = server.json("POST", "/v1/completions", {"prompt": "Hi", "guided_json": {"$ref": "#"}})
            self.assertEqual((status, answer["error"]["param"]), (400, "guided_json"))

    def test_a_grammar_that_fails_late_is_the_clients_error(self):
        with serving() as server:
            body = {"prompt": "Hi", "max_tokens": 1000, "temperature": 0, "guided_regex": FAILS_LATE}
            status, answer = server.json("POST", "/v1/completions", body)
            self.assertEqual((status, answer["error"]["code"], answer["error"]["param"]), (400, "grammar_failed", "guided_regex"))
            _, _, text = server.request("POST", "/v1/completions", {**body, "stream": True})
            events = [line for line in text.decode().splitlines() if line.startswith("data: {")]
            self.assertEqual(json.loads(events[-1][6:])["error"]["type"], "invalid_request_error")
            self.assertEqual(self.failures(server, "grammar"), 2)
            self.assertEqual(self.failures(server, "model"), 0)

    def test_flags_set_the_limits(self):
        with serving("--max-regex", "10", "--max-schema", "40", "--max-grammar", "20", "--grammar-cache", "0") as server:
            for fields in ({"guided_regex": "a" * 11}, {"guided_json": {"const": "x" * 40}}, {"guided_grammar": "start: " + "x" * 20}):
                status, answer = server.json("POST", CHAT, chat("Hi", **fields))
                self.assertEqual(status, 400)
                self.assertIn("at most", answer["error"]["message"])
            self.assertEqual(server.json("POST", CHAT, chat("Hi", guided_regex="a" * 10))[0], 200)

    def test_clients_that_leave_and_a_drain_leave_no_compilation(self):
        """Clients leave while their grammars are compiled. Then the server drains while other clients wait."""
        server_body = json.dumps(chat("Hi", max_tokens=4, guided_regex=r"\w?" * 4000)).encode()
        with serving("--grammar-cache", "0") as server:
            for _ in range(8):
                with socket.create_connection((server.host, server.port), timeout=ANSWER_SECONDS) as client:
                    client.sendall(wire(CHAT, server_body))
            server.wait_until_quiet()
            self.assertEqual(server.json("POST", CHAT, chat("Hi", max_tokens=4, guided_regex="[0-9]{3}"))[0], 200)
            statuses = []
            askers = [threading.Thread(target=lambda: statuses.append(server.request("POST", CHAT, server_body)[0]))
                      for _ in range(4)]
            for asker in askers:
                asker.start()
            until(lambda: server.metric("moesaic:http_requests_active") >= 4 or len(statuses) == 4)
            self.assertEqual(server.stop(), 0)
            for asker in askers:
                asker.join()
            self.assertTrue(set(statuses) <= {400, 503}, statuses)

    def test_hostile_and_ordinary_requests_run_side_by_side(self):
        hostile = {"guided_regex": FAILS_LATE, "max_tokens": 40}
        with serving() as server:
            alone = server.json("POST", CHAT, chat("Tell me a story.", max_tokens=60, temperature=0, ignore_eos=True))[1]
            results = []
            askers = [threading.Thread(target=lambda: results.append(server.json("POST", CHAT, chat("Hi", **hostile))[0]))
                      for _ in range(4)]
            for asker in askers:
                asker.start()
            beside = server.json("POST", CHAT, chat("Tell me a story.", max_tokens=60, temperature=0, ignore_eos=True))[1]
            for asker in askers:
                asker.join()
            self.assertEqual(beside["choices"][0]["message"], alone["choices"][0]["message"])
            self.assertTrue(set(results) <= {200, 400}, results)

    def test_deadlines_have_their_own_label(self):
        with serving("--request-timeout", "1") as server:
            body = chat("Tell me a story", max_tokens=4000, ignore_eos=True, n=128)
            choice = server.json("POST", CHAT, body)[1]["choices"][-1]
            self.assertEqual((choice["finish_reason"], choice["stop_reason"]), ("deadline", None))
            labels = [name for name in server.metrics() if name.startswith("vllm:request_success_total{")]
            self.assertTrue(any('finished_reason="deadline"' in name for name in labels), labels)


if __name__ == "__main__":
    unittest.main()
