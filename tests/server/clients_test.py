#!/usr/bin/env python3
"""Tests the official OpenAI and Anthropic clients with the server on models/moesaic-tiny."""
import asyncio
import concurrent.futures
import contextlib
import io
import json
import re
import unittest
from typing import Literal

import anthropic
import openai
import pydantic

from serving import MODEL, ROOT, ServingCase, serving, until

NAME = "moesaic-tiny"
WEATHER = {"name": "get_weather", "description": "Weather of a city",
           "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}


def shipped_call():
    """Returns a prompt of the model's held-out set that the model answers by calling a tool."""
    for line in (MODEL / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["category"] == "tool" and row["messages"][-1]["role"] == "user" and "<tool_call>" in row["expected"]:
            return row
    raise AssertionError("no call in heldout.jsonl")


class Clients(ServingCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.openai = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="-", max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=cls.server.url, api_key="-", max_retries=0)

    def ask(self, text, **fields):
        return self.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **fields)


class Documentation(Clients):
    def test_the_examples_in_python_print_an_answer(self):
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "server.md").read_text(), re.MULTILINE | re.DOTALL)
        self.assertTrue(blocks)
        for block in blocks:
            self.assertIn("http://127.0.0.1:8000", block)
            code = block.replace("http://127.0.0.1:8000", self.server.url).replace("stream=True", "stream=True, temperature=0")
            printed = io.StringIO()
            with self.subTest(block=block), contextlib.redirect_stdout(printed):
                exec(compile(code, "docs/server.md", "exec"), {})
            self.assertEqual(printed.getvalue(), self.ask("Tell me a story.", temperature=0).choices[0].message.content)


class OpenAiChat(Clients):
    def test_answers_a_question(self):
        answer = self.ask("What is the capital of France?", temperature=0)
        self.assertIn("Paris", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_streams_the_same_answer(self):
        whole = self.ask("Tell me a story.", temperature=0, max_tokens=60)
        stream = self.ask("Tell me a story.", temperature=0, max_tokens=60, stream=True,
                          stream_options={"include_usage": True})
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual([c.choices[0].finish_reason for c in chunks if c.choices][-1], whole.choices[0].finish_reason)
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
        self.assertGreater(len(chunks), 10)

    def test_counts_cached_tokens(self):
        long = " ".join(f"item {i} is {i * 7 % 13}." for i in range(80))
        first = self.ask(long, max_tokens=1)
        again = self.ask(long, max_tokens=1)
        cached = again.usage.prompt_tokens_details.cached_tokens
        self.assertGreaterEqual(cached, again.usage.prompt_tokens - 128)
        self.assertLess(first.usage.prompt_tokens_details.cached_tokens, cached)
        salted = self.ask(long, max_tokens=1, extra_body={"cache_salt": "mine"})
        self.assertEqual(salted.usage.prompt_tokens_details.cached_tokens, 0)

    def test_counts_cached_tokens_of_an_answer_that_ends_at_once(self):
        long = " ".join(f"thing {i} is {i * 5 % 11}." for i in range(80))
        first = self.ask(long, max_tokens=2, temperature=0, extra_body={"return_token_ids": True})
        whole = self.ask(long, max_tokens=2, temperature=0)
        ended = self.ask(long, max_tokens=2, temperature=0, extra_body={"stop_token_ids": [first.choices[0].token_ids[0]]})
        cached = whole.usage.prompt_tokens_details.cached_tokens
        self.assertGreaterEqual(cached, whole.usage.prompt_tokens - 128)
        self.assertEqual(ended.usage.prompt_tokens_details.cached_tokens, cached)

    def test_accepts_the_schema_of_a_set(self):
        class Tags(pydantic.BaseModel):
            tags: set[Literal["a", "b"]]
        schema = Tags.model_json_schema()
        self.assertTrue(schema["properties"]["tags"]["uniqueItems"])
        answer = self.ask("Tags?", max_tokens=60, temperature=0, response_format={
            "type": "json_schema", "json_schema": {"name": "tags", "schema": schema}})
        self.assertTrue(answer.choices[0].message.content.lstrip().startswith("{"))

    def test_template_variables_cannot_replace_the_request(self):
        with self.assertRaises(openai.BadRequestError) as refused:
            self.ask("Hi", extra_body={"chat_template_kwargs": {"messages": []}})
        self.assertEqual(refused.exception.param, "chat_template_kwargs.messages")

    def test_stops_at_strings_over_token_borders(self):
        whole = self.ask("Tell me a story.", temperature=0, max_tokens=80).choices[0].message.content
        for start, length in [(5, 3), (17, 9), (30, 1), (33, 14)]:
            stop = whole[start:start + length]
            for stream in (False, True):
                answer = self.ask("Tell me a story.", temperature=0, max_tokens=80, stop=["never seen", stop], stream=stream)
                if stream:
                    chunks = list(answer)
                    text = "".join(c.choices[0].delta.content or "" for c in chunks)
                    reason = chunks[-1].choices[0].finish_reason
                else:
                    text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
                self.assertEqual((text, reason), (whole[:whole.index(stop)], "stop"))
        kept = self.ask("Tell me a story.", temperature=0, max_tokens=80, stop=stop,
                        extra_body={"include_stop_str_in_output": True})
        self.assertEqual(kept.choices[0].message.content, whole[:whole.index(stop)] + stop)

    def test_repeats_all_choices_of_a_seed(self):
        fields = dict(temperature=1.5, seed=11, n=3, max_tokens=12)
        one, two = self.ask("Tell me a story.", **fields), self.ask("Tell me a story.", **fields)
        texts = [c.message.content for c in one.choices]
        self.assertEqual(texts, [c.message.content for c in two.choices])
        self.assertGreater(len(set(texts)), 1)
        self.assertEqual([c.index for c in one.choices], [0, 1, 2])
        streamed = {}
        for chunk in self.ask("Tell me a story.", stream=True, **fields):
            choice = chunk.choices[0]
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        self.assertEqual([streamed[i] for i in range(3)], texts)

    def test_returns_logprobs(self):
        answer = self.ask("What is the capital of France?", temperature=0, logprobs=True, top_logprobs=3)
        content = answer.choices[0].logprobs.content
        self.assertEqual(b"".join(bytes(t.bytes) for t in content).decode(), answer.choices[0].message.content)
        for token in content:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertAlmostEqual(token.logprob, max(t.logprob for t in token.top_logprobs), places=5)  # greedy
            self.assertLessEqual(token.logprob, 0)
        streamed = []
        for chunk in self.ask("What is the capital of France?", temperature=0, logprobs=True, top_logprobs=3, stream=True):
            if chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content
        self.assertEqual([t.token for t in streamed], [t.token for t in content])

    def test_applies_logit_bias(self):
        answer = self.ask("What is the capital of France?", temperature=0, logprobs=True, max_tokens=5)
        _, ids = self.server.json("POST", "/tokenize", {"prompt": answer.choices[0].message.content})
        biased = self.ask("What is the capital of France?", temperature=0, logit_bias={ids["tokens"][0]: -100}, max_tokens=5)
        self.assertNotEqual(answer.choices[0].logprobs.content[0].token, biased.choices[0].message.content[:1])
        self.assertNotEqual(answer.choices[0].message.content, biased.choices[0].message.content)

    def test_stops_at_token_ids_and_lengths(self):
        fields = dict(temperature=0, max_tokens=30)

        def said(**extra):
            answer = self.ask("What is the capital of France?", extra_body={"return_token_ids": True, **extra}, **fields)
            return answer.choices[0], answer.choices[0].token_ids
        whole, ids = said()
        cut, cut_ids = said(stop_token_ids=[ids[3]])
        self.assertEqual((cut.finish_reason, cut.stop_reason, cut.message.content), ("stop", ids[3], "The capital of"))
        self.assertEqual(cut_ids[:3], ids[:3])
        late, late_ids = said(min_tokens=20)
        self.assertGreaterEqual(len(late_ids), 20)
        self.assertTrue(late.message.content.startswith(whole.message.content))
        endless, endless_ids = said(ignore_eos=True)
        self.assertEqual((endless.finish_reason, len(endless_ids)), ("length", 30))

    def test_returns_token_ids(self):
        answer = self.ask("Hello", max_tokens=5, extra_body={"return_token_ids": True})
        _, rendered = self.server.json("POST", "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "Hello"}]})
        self.assertEqual(answer.prompt_token_ids, rendered["prompt_token_ids"])
        self.assertEqual(len(answer.choices[0].token_ids), answer.usage.completion_tokens)
        streamed = []
        for chunk in self.ask("Hello", max_tokens=5, stream=True, extra_body={"return_token_ids": True}):
            streamed += getattr(chunk.choices[0], "token_ids", None) or []
        self.assertEqual(streamed, answer.choices[0].token_ids)

    def test_follows_json_schemas(self):
        for seed in range(3):
            answer = self.ask("Tell me a story.", temperature=1, seed=seed, max_tokens=80,
                              response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}})
            person = json.loads(answer.choices[0].message.content)
            self.assertEqual(set(person), {"name", "age"})
            self.assertIsInstance(person["age"], int)
        for choice in self.ask("yes?", extra_body={"guided_choice": ["red", "green"]}, n=2).choices:
            self.assertIn(choice.message.content, ["red", "green"])
        text = self.ask("x", extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}}).choices[0].message.content
        self.assertRegex(text, "^[0-9]{3}-[a-c]{2}$")

    def test_calls_tools_of_its_own(self):
        row = shipped_call()
        tools = [{"type": "function", "function": t.get("function", t)} for t in row["tools"]]
        answer = self.openai.chat.completions.create(model=NAME, messages=row["messages"], tools=tools, temperature=0)
        choice = answer.choices[0]
        self.assertEqual(choice.finish_reason, "tool_calls")
        call = choice.message.tool_calls[0]
        self.assertIn(call.function.name, [t["function"]["name"] for t in tools])
        json.loads(call.function.arguments)
        name, arguments, ids = "", "", []
        for chunk in self.openai.chat.completions.create(model=NAME, messages=row["messages"], tools=tools, temperature=0,
                                                         stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
                ids += [piece.id] if piece.id else []
        self.assertEqual((name, arguments), (call.function.name, call.function.arguments))
        self.assertEqual(len(ids), 1)
        # The model continues after the result of the call.
        messages = row["messages"] + [choice.message.model_dump(exclude_none=True),
                                      {"role": "tool", "tool_call_id": call.id, "content": "{\"result\": 7}"}]
        after = self.openai.chat.completions.create(model=NAME, messages=messages, tools=tools, temperature=0)
        self.assertTrue(after.choices[0].message.content or after.choices[0].message.tool_calls)

    def test_forces_calls(self):
        tools = [{"type": "function", "function": WEATHER},
                 {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}]
        named = self.ask("Hello", tools=tools, max_tokens=60,
                         tool_choice={"type": "function", "function": {"name": "get_weather"}})
        call = named.choices[0].message.tool_calls[0]
        self.assertEqual((call.function.name, named.choices[0].finish_reason), ("get_weather", "stop"))
        self.assertIsInstance(json.loads(call.function.arguments)["city"], str)
        required = self.ask("Hello", tools=tools, tool_choice="required", max_tokens=200, parallel_tool_calls=False)
        self.assertEqual(len(required.choices[0].message.tool_calls), 1)
        self.assertEqual(required.choices[0].finish_reason, "tool_calls")
        none = self.ask("Hello", tools=tools, tool_choice="none", max_tokens=20)
        self.assertIsNone(none.choices[0].message.tool_calls)

    def test_continues_a_message(self):
        messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Par"}]
        answer = self.openai.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=5, extra_body={
            "continue_final_message": True, "add_generation_prompt": False})
        self.assertTrue(answer.choices[0].message.content.startswith("is"), answer.choices[0].message.content)

    def test_raises_the_errors_of_the_client(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.ask("Hello", temperature=-1)
        self.assertEqual(raised.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError):
            self.openai.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        with self.assertRaises(openai.BadRequestError) as raised:
            self.ask("word " * 5000)
        self.assertEqual(raised.exception.code, "context_length_exceeded")

    def test_cancels_when_the_client_leaves(self):
        before = self.server.aborted()
        stream = self.ask("Tell me a story.", max_tokens=3500, n=64, stream=True, extra_body={"ignore_eos": True})
        for _, chunk in zip(range(5), stream):
            pass
        stream.close()
        self.server.wait_until_quiet()
        until(lambda: self.server.aborted() > before)

    def test_serves_many_at_once(self):
        client = openai.AsyncOpenAI(base_url=self.server.url + "/v1", api_key="-", max_retries=0)
        prompts = [f"What is {a} plus {b}?" for a in range(2, 8) for b in range(3, 7)]

        async def ask(text):
            answer = await client.chat.completions.create(model=NAME, temperature=0, max_tokens=24,
                                                          messages=[{"role": "user", "content": text}])
            return answer.choices[0].message.content

        async def all_of_them():
            answers = await asyncio.gather(*map(ask, prompts))
            await client.close()
            return answers
        together = asyncio.run(all_of_them())
        alone = [self.ask(text, temperature=0, max_tokens=24).choices[0].message.content for text in prompts]
        self.assertEqual(together, alone)


class OpenAiChatOverRanks(OpenAiChat):
    FLAGS = ("--tensor-parallel-size", "2")


class ParallelCalls(unittest.TestCase):
    """Two calls in one answer, in each format. A grammar forces the model to write them."""
    TEXTS = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
                  '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>',
        "deepseek-v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Bern"}\n```'
                       '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{"zone": "CET"}\n```'
                       '<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "kimi-k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
                   '{"city": "Bern"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'
                   '{"zone": "CET"}<|tool_call_end|><|tool_calls_section_end|>',
        "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>\n"
                       "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
    }
    CALLS = [("get_weather", {"city": "Bern"}), ("get_time", {"zone": "CET"})]

    def test_are_complete_in_answers_and_streams(self):
        tools = [{"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {key: {"type": "string"} for key in arguments}}}} for name, arguments in self.CALLS]
        for tool_format, text in self.TEXTS.items():
            with self.subTest(tool_format=tool_format), serving("--tool-format", tool_format) as server, \
                    openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
                fields = dict(model=NAME, messages=[{"role": "user", "content": "Both, please."}], tools=tools,
                              extra_body={"guided_choice": ["Both.\n" + text]})
                whole = client.chat.completions.create(**fields).choices[0]
                self.assertEqual((whole.finish_reason, whole.message.content.strip()), ("tool_calls", "Both."))
                self.assertEqual([(c.function.name, json.loads(c.function.arguments)) for c in whole.message.tool_calls],
                                 self.CALLS)
                calls, content = {}, ""
                for chunk in client.chat.completions.create(stream=True, **fields):
                    content += chunk.choices[0].delta.content or ""
                    for piece in chunk.choices[0].delta.tool_calls or []:
                        call = calls.setdefault(piece.index, {"ids": [], "name": "", "arguments": ""})
                        call["ids"] += [piece.id] if piece.id else []
                        call["name"] += piece.function.name or ""
                        call["arguments"] += piece.function.arguments or ""
                self.assertEqual((content.strip(), chunk.choices[0].finish_reason), ("Both.", "tool_calls"))
                self.assertEqual([(calls[i]["name"], json.loads(calls[i]["arguments"])) for i in range(2)], self.CALLS)
                self.assertEqual([len(set(call["ids"])) for call in calls.values()], [1, 1])


class OpenAiOthers(Clients):
    def test_completions_accept_text_and_token_ids(self):
        create = self.openai.completions.create
        one = create(model=NAME, prompt="<|begin|><|user|>Hi", max_tokens=8, temperature=0)
        _, ids = self.server.json("POST", "/tokenize", {"prompt": "<|begin|><|user|>Hi"})
        both = create(model=NAME, prompt=[ids["tokens"], ids["tokens"]], max_tokens=8, temperature=0)
        self.assertEqual([c.text for c in both.choices], [one.choices[0].text] * 2)
        self.assertEqual(both.usage.prompt_tokens, 2 * one.usage.prompt_tokens)
        same = create(model=NAME, prompt=ids["tokens"], max_tokens=8, temperature=0, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in same), one.choices[0].text)
        echo = create(model=NAME, prompt="Hello there", max_tokens=2, temperature=0, echo=True, logprobs=2)
        lists = echo.choices[0].logprobs
        self.assertTrue(echo.choices[0].text.startswith("Hello there"))
        self.assertEqual("".join(lists.tokens), echo.choices[0].text)
        self.assertIsNone(lists.token_logprobs[0])
        self.assertTrue(all(p <= 0 for p in lists.token_logprobs[1:]))
        self.assertEqual([echo.choices[0].text[o:o + len(t)] for o, t in zip(lists.text_offset, lists.tokens)], lists.tokens)
        best = create(model=NAME, prompt="Hello", max_tokens=6, n=2, best_of=4, temperature=1.2, seed=3)
        self.assertEqual(len(best.choices), 2)
        scored = create(model=NAME, prompt="Hello there", max_tokens=0, echo=True, logprobs=0)
        self.assertEqual(scored.choices[0].text, "Hello there")

    def test_responses_answer_and_stream(self):
        answer = self.openai.responses.create(model=NAME, input="What is the capital of France?", temperature=0)
        self.assertIn("Paris", answer.output_text)
        self.assertEqual(answer.status, "completed")
        events = list(self.openai.responses.create(model=NAME, input="What is the capital of France?", temperature=0, stream=True))
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        self.assertEqual(events[0].type, "response.created")
        self.assertEqual(events[-1].type, "response.completed")
        self.assertEqual(events[-1].response.output_text, answer.output_text)
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual(deltas, answer.output_text)
        cut = self.openai.responses.create(model=NAME, input=[{"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}],
                                           max_output_tokens=16, instructions="Be brief.")
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))
        shaped = self.openai.responses.create(model=NAME, input="x", max_output_tokens=100, text={
            "format": {"type": "json_schema", "name": "person", "schema": PERSON}})
        self.assertEqual(set(json.loads(shaped.output_text)), {"name", "age"})
        with self.assertRaises(openai.BadRequestError) as raised:
            self.openai.responses.create(model=NAME, input="x", previous_response_id="resp_1")
        self.assertEqual(raised.exception.param, "previous_response_id")

    def test_responses_are_stored(self):
        create = self.openai.responses.create
        first = create(model=NAME, input="What is the capital of France?", temperature=0, instructions="Be brief.", metadata={"a": "b"})
        kept = self.openai.responses.retrieve(first.id)
        self.assertEqual((kept.output_text, kept.metadata, kept.store), (first.output_text, {"a": "b"}, True))
        events = list(create(model=NAME, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=30,
                             stream=True))
        second = events[-1].response
        self.assertEqual(second.previous_response_id, first.id)
        # The same conversation in one request gives the same prompt, without the instructions of the first request.
        whole = create(model=NAME, temperature=0, max_output_tokens=30, store=False, input=[
            {"role": "user", "content": "What is the capital of France?"}, first.output[0].model_dump(),
            {"role": "user", "content": "And of Italy?"}])
        self.assertEqual((second.usage.input_tokens, second.output_text), (whole.usage.input_tokens, whole.output_text))
        third = create(model=NAME, input="And of Spain?", previous_response_id=second.id, temperature=0, max_output_tokens=5)
        self.assertGreater(third.usage.input_tokens, second.usage.input_tokens)
        self.openai.responses.delete(first.id)
        for gone in (first.id, whole.id):
            with self.assertRaises(openai.NotFoundError):
                self.openai.responses.retrieve(gone)

    def test_stored_responses_can_be_replayed(self):
        fields = dict(model=NAME, input=[{"role": "user", "content": "What is the capital of France?"}], temperature=0,
                      max_output_tokens=30)
        streamed = list(self.openai.responses.create(stream=True, **fields))
        final = streamed[-1].response
        replayed = list(self.openai.responses.retrieve(final.id, stream=True))
        self.assertEqual(replayed[-1].response.model_dump(), final.model_dump())
        self.assertEqual([event.sequence_number for event in replayed], list(range(len(replayed))))

        def types(events):  # a replay sends each text in one piece
            kinds = [event.type for event in events]
            return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        self.assertEqual(types(replayed), types(streamed))
        text = "".join(event.delta for event in replayed if event.type == "response.output_text.delta")
        self.assertEqual(text, final.output_text)
        rest = list(self.openai.responses.retrieve(final.id, stream=True, starting_after=3))
        self.assertEqual([event.sequence_number for event in rest], list(range(4, len(replayed))))
        items = list(self.openai.responses.input_items.list(final.id, limit=1))
        self.assertEqual([item.content[0].text for item in items], ["What is the capital of France?"])
        with self.assertRaises(openai.BadRequestError) as refused:
            self.openai.responses.cancel(final.id)
        self.assertIn("synchronous", refused.exception.message)
        for call in (self.openai.responses.cancel, self.openai.responses.input_items.list):
            with self.assertRaises(openai.NotFoundError):
                call("resp_none")

    def test_replays_calls_of_tools(self):
        final = self.openai.responses.create(
            model=NAME, input="Hello", tools=[{"type": "function", "strict": False, **WEATHER}], max_output_tokens=60,
            tool_choice={"type": "function", "name": "get_weather"}, temperature=0)
        replayed = list(self.openai.responses.retrieve(final.id, stream=True))
        (done,) = [event for event in replayed if event.type == "response.function_call_arguments.done"]
        self.assertEqual((done.name, done.arguments), ("get_weather", final.output[0].arguments))
        self.assertEqual(replayed[-1].response.model_dump(), final.model_dump())

    def test_items_that_are_sent_again_get_ids_of_their_own(self):
        conversations = self.openai.conversations
        talk = conversations.create(items=[{"type": "message", "role": "user", "content": "a"}])
        item = conversations.items.list(talk.id).data[0].model_dump(exclude_none=True)
        conversations.items.create(talk.id, items=[item, item])
        listed = []
        for item in conversations.items.list(talk.id, limit=1):  # in pages of one
            listed.append(item.id)
            self.assertLess(len(listed), 5)
        self.assertEqual(len(set(listed)), 3)

    def test_conversations_keep_their_items(self):
        conversations, create = self.openai.conversations, self.openai.responses.create
        talk = conversations.create(metadata={"a": "b"}, items=[
            {"type": "message", "role": "user", "content": "What is the capital of France?"}])
        self.assertEqual(conversations.retrieve(talk.id).metadata, {"a": "b"})
        first = create(model=NAME, conversation=talk.id, temperature=0, max_output_tokens=30)
        self.assertEqual(first.conversation.id, talk.id)
        self.assertIn("Paris", first.output_text)
        counted = self.openai.responses.input_tokens.count(model=NAME, conversation=talk.id, input="And of Italy?")
        second = create(model=NAME, conversation={"id": talk.id}, input="And of Italy?", temperature=0, max_output_tokens=30)
        self.assertEqual(counted.input_tokens, second.usage.input_tokens)
        # The same conversation in one request gives the same prompt.
        whole = create(model=NAME, temperature=0, max_output_tokens=30, store=False, input=[
            {"role": "user", "content": "What is the capital of France?"}, first.output[0].model_dump(),
            {"role": "user", "content": "And of Italy?"}])
        self.assertEqual((second.usage.input_tokens, second.output_text), (whole.usage.input_tokens, whole.output_text))
        items = list(conversations.items.list(talk.id, order="asc", limit=1))  # in pages of one
        self.assertEqual([item.role for item in items], ["user", "assistant", "user", "assistant"])
        self.assertEqual(items[3].content[0].text, second.output_text)
        self.assertEqual(conversations.items.retrieve(items[2].id, conversation_id=talk.id).content[0].text, "And of Italy?")
        added = conversations.items.create(talk.id, items=[{"type": "message", "role": "user", "content": "And of Spain?"}])
        self.assertEqual(conversations.items.list(talk.id).data[0].id, added.data[0].id)  # the newest first
        conversations.items.delete(added.data[0].id, conversation_id=talk.id)
        self.assertEqual(len(conversations.items.list(talk.id).data), 4)
        self.assertEqual(conversations.update(talk.id, metadata={"c": "d"}).metadata, {"c": "d"})
        with self.assertRaises(openai.BadRequestError):
            create(model=NAME, conversation=talk.id, previous_response_id=second.id, input="x")
        self.assertTrue(conversations.delete(talk.id).deleted)
        for use in (lambda: conversations.retrieve(talk.id), lambda: create(model=NAME, conversation=talk.id, input="x"),
                    lambda: conversations.items.list(talk.id), lambda: self.openai.responses.retrieve(talk.id)):
            with self.assertRaises(openai.NotFoundError):
                use()

    def test_responses_count_cached_tokens(self):
        long = " ".join(f"point {i} is {i * 3 % 17}." for i in range(60))
        first, again = (self.openai.responses.create(model=NAME, input=long, max_output_tokens=1).usage for _ in range(2))
        self.assertGreaterEqual(first.input_tokens_details.cache_write_tokens, first.input_tokens - 64)
        self.assertEqual(again.input_tokens_details.cache_write_tokens, 0)

    def test_responses_call_tools(self):
        tool = {"type": "function", "strict": False, **WEATHER}
        fields = dict(model=NAME, input="Hello", tools=[tool], tool_choice={"type": "function", "name": "get_weather"},
                      max_output_tokens=60, temperature=0)
        answer = self.openai.responses.create(**fields)
        call = answer.output[0]
        self.assertEqual((call.type, call.name), ("function_call", "get_weather"))
        events = list(self.openai.responses.create(stream=True, **fields))
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        self.assertEqual(done[0].arguments, call.arguments)
        after = self.openai.responses.create(model=NAME, tools=[tool], max_output_tokens=20, input=[
            {"role": "user", "content": "Hello"}, call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}])
        self.assertIn(after.status, ("completed", "incomplete"))

    def test_models_are_listed_and_embeddings_are_normalized(self):
        self.assertEqual([m.id for m in self.openai.models.list()], [NAME])
        self.assertEqual(self.openai.models.retrieve(NAME).id, NAME)
        two = self.openai.embeddings.create(model=NAME, input=["cat", "dog"]).data
        again = self.openai.embeddings.create(model=NAME, input="cat", encoding_format="float").data
        self.assertEqual(len(two), 2)
        self.assertAlmostEqual(sum(x * x for x in two[0].embedding), 1, places=3)
        for a, b in zip(two[0].embedding, again[0].embedding):
            self.assertAlmostEqual(a, b, places=4)


class Deadlines(unittest.TestCase):
    def test_every_api_names_the_deadline_as_the_reason(self):
        fields = {"model": NAME, "extra_body": {"ignore_eos": True}}
        messages = [{"role": "user", "content": "Tell me a story."}]
        with (serving("--request-timeout", "1", "--max-sequences", "256") as server,
              concurrent.futures.ThreadPoolExecutor(8) as pool):
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
            claude = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
            # The clients import their modules with the first call. Later calls begin together, so that all of the 133 choices
            # run at once, and the steps are so long that no answer ends by its length.
            client.chat.completions.create(messages=messages, max_tokens=1, **fields)
            client.completions.create(prompt="Once", max_tokens=1, **fields)
            client.responses.create(input="Tell me a story.", max_output_tokens=1, **fields)
            claude.messages.create(model=NAME, messages=messages, max_tokens=1)
            chat = pool.submit(client.chat.completions.create, messages=messages, max_tokens=3900, n=64, **fields)
            text = pool.submit(client.completions.create, prompt="Once upon a time", max_tokens=3900, n=64, **fields)
            stream = pool.submit(lambda: list(client.chat.completions.create(
                messages=messages, max_tokens=3900, stream=True, **fields)))
            response = pool.submit(client.responses.create, input="Tell me a story.", max_output_tokens=3900, **fields)
            events = pool.submit(lambda: list(client.responses.create(
                input="Tell me a story.", max_output_tokens=3900, stream=True, **fields)))
            # Anthropic's API has no ignore_eos, but the greedy answer to this prompt does not end.
            song = {"model": NAME, "messages": [{"role": "user", "content": "Repeat: la la la la la la"}],
                    "max_tokens": 3900, "extra_body": {"temperature": 0}}
            message = pool.submit(claude.messages.create, **song)

            def streamed():
                with claude.messages.stream(**song) as pieces:
                    return pieces.get_final_message()
            final = pool.submit(streamed)
            self.assertEqual({choice.finish_reason for choice in chat.result().choices}, {"deadline"})
            self.assertEqual({choice.finish_reason for choice in text.result().choices}, {"deadline"})
            self.assertEqual(stream.result()[-1].choices[0].finish_reason, "deadline")
            ended = events.result()[-1]
            self.assertEqual(ended.type, "response.incomplete")
            for answer in (response.result(), ended.response):
                self.assertEqual((answer.status, answer.incomplete_details.reason), ("incomplete", "deadline"))
            stored = client.responses.retrieve(ended.response.id)
            self.assertEqual((stored.status, stored.incomplete_details.reason), ("incomplete", "deadline"))
            self.assertEqual((message.result().stop_reason, message.result().stop_sequence), ("deadline", None))
            self.assertEqual(final.result().stop_reason, "deadline")


class Anthropic(Clients):
    def create(self, text="What is the capital of France?", **fields):
        # Recent clients have no argument for the temperature, but the API has the field.
        return self.anthropic.messages.create(**{"model": NAME, "max_tokens": 60, "extra_body": {"temperature": 0},
                                                 "messages": [{"role": "user", "content": text}], **fields})

    def test_answers_and_streams(self):
        answer = self.create()
        self.assertIn("Paris", answer.content[0].text)
        self.assertEqual((answer.stop_reason, answer.role), ("end_turn", "assistant"))
        with self.anthropic.messages.stream(model=NAME, max_tokens=60, extra_body={"temperature": 0},
                                            messages=[{"role": "user", "content": "What is the capital of France?"}]) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, answer.content[0].text)
        self.assertEqual(final.stop_reason, "end_turn")
        self.assertEqual(final.usage.output_tokens, answer.usage.output_tokens)

    def test_reports_the_reason_of_a_stop(self):
        self.assertEqual(self.create("Tell me a story.", max_tokens=3).stop_reason, "max_tokens")
        whole = self.create("Tell me a story.").content[0].text
        cut = self.create("Tell me a story.", stop_sequences=[whole[10:14]])
        self.assertEqual((cut.stop_reason, cut.stop_sequence), ("stop_sequence", whole[10:14]))

    def test_calls_tools(self):
        tools = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER["parameters"]}]
        answer = self.create("Hello", tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
        use = answer.content[0]
        self.assertEqual((use.type, use.name, answer.stop_reason), ("tool_use", "get_weather", "tool_use"))
        self.assertIsInstance(use.input["city"], str)
        with self.anthropic.messages.stream(model=NAME, max_tokens=60, tools=tools,
                                            tool_choice={"type": "any"},
                                            messages=[{"role": "user", "content": "Hello"}]) as stream:
            final = stream.get_final_message()
        self.assertEqual(final.content[0].type, "tool_use")
        after = self.create(tools=tools, system=[{"type": "text", "text": "Be brief."}], messages=[
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [use.model_dump()]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}])
        self.assertTrue(after.content)

    def test_counts_tokens(self):
        counted = self.anthropic.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": "Hi"}])
        usage = self.create("Hi", max_tokens=1).usage
        self.assertEqual(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)

    def test_refuses_invalid_requests(self):
        with self.assertRaises(anthropic.BadRequestError):
            self.create(messages=[])
        with self.assertRaises(anthropic.BadRequestError):
            self.create(extra_body={"max_tokens": "many"})

    def test_lists_models(self):
        (model,) = self.anthropic.models.list()
        self.assertEqual((model.id, model.type, model.display_name), (NAME, "model", NAME))
        self.assertEqual(self.anthropic.models.retrieve(NAME).created_at, model.created_at)
        page = self.anthropic.models.list(after_id=NAME)
        self.assertEqual((page.data, page.has_more, page.first_id), ([], False, None))
        with self.assertRaises(anthropic.NotFoundError) as refused:
            self.anthropic.models.retrieve("another")
        self.assertEqual(refused.exception.body["error"]["type"], "not_found_error")


class AnthropicOverReplicas(Anthropic):
    FLAGS = ("--data-parallel-size", "2", "--enable-expert-parallel")


if __name__ == "__main__":
    unittest.main()
