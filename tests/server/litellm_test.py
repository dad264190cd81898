#!/usr/bin/env python3
"""Tests LiteLLM, which many agents use, with the server on models/moesaic-tiny."""
import asyncio
import json
import os
import unittest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # disables requests to other servers

import litellm

from serving import ServingCase, chat, serving, until

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}}}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}


class LiteLlm(ServingCase):
    def where(self, provider):
        base = self.server.url + ("/v1" if provider != "anthropic" else "")
        return {"model": f"{provider}/moesaic-tiny", "api_base": base, "api_key": "-", "num_retries": 0, "timeout": 60}

    def ask(self, text, provider="openai", **fields):
        return litellm.completion(messages=[{"role": "user", "content": text}], **self.where(provider), **fields)

    def test_answers_over_every_api(self):
        for provider in ("openai", "hosted_vllm", "anthropic"):
            with self.subTest(provider=provider):
                fields = {"max_tokens": 60, "temperature": 0}
                whole = self.ask("What is the capital of France?", provider, **fields)
                self.assertIn("Paris", whole.choices[0].message.content)
                self.assertEqual(whole.choices[0].finish_reason, "stop")
                self.assertGreater(whole.usage.completion_tokens, 0)
                chunks = list(self.ask("What is the capital of France?", provider, stream=True, **fields))
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                self.assertEqual(text, whole.choices[0].message.content)

    def test_calls_tools(self):
        for provider in ("openai", "hosted_vllm", "anthropic"):
            with self.subTest(provider=provider):
                fields = dict(tools=[WEATHER], max_tokens=60, temperature=0,
                              tool_choice={"type": "function", "function": {"name": "get_weather"}})
                call = self.ask("Hello", provider, **fields).choices[0].message.tool_calls[0]
                self.assertEqual(call.function.name, "get_weather")
                self.assertIsInstance(json.loads(call.function.arguments)["city"], str)
                chunks = list(self.ask("Hello", provider, stream=True, **fields))
                rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
                self.assertEqual(json.loads(rebuilt.function.arguments), json.loads(call.function.arguments))

    def test_follows_a_schema(self):
        answer = self.ask("x", max_tokens=80, seed=1, response_format={
            "type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}})
        self.assertEqual(set(json.loads(answer.choices[0].message.content)), {"name", "age"})

    def test_passes_logprobs_and_our_own_fields(self):
        answer = self.ask("Hello", max_tokens=4, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
        self.assertEqual(len(answer.choices[0].logprobs.content), answer.usage.completion_tokens)

    def test_completions_responses_and_embeddings(self):
        text = litellm.text_completion(prompt="Hello there", max_tokens=4, **{
            **self.where("openai"), "model": "text-completion-openai/moesaic-tiny"})
        self.assertEqual(text.usage.completion_tokens, 4)
        answer = litellm.responses(input="What is the capital of France?", temperature=0, **self.where("openai"))
        self.assertIn("Paris", answer.output[0].content[0].text)
        embedded = litellm.embedding(input=["cat", "dog"], encoding_format="float", **self.where("openai"))
        self.assertEqual(len(embedded.data), 2)

    def test_an_answer_that_its_deadline_ends_keeps_the_native_reason(self):
        body = chat("Tell me a story.", max_tokens=4000, n=128, extra_body={"ignore_eos": True})
        with serving("--request-timeout", "1") as server:
            for provider in ("openai", "hosted_vllm"):
                where = {**self.where(provider), "api_base": server.url + "/v1"}
                answer = litellm.completion(**body, **where)
                last = answer.choices[-1]
                # LiteLLM reports a reason that it does not know as "stop".
                self.assertEqual((last.finish_reason, last.provider_specific_fields["native_finish_reason"]),
                                 ("stop", "deadline"))

    def test_raises_its_own_errors(self):
        with self.assertRaises(litellm.BadRequestError):
            self.ask("Hello", temperature=-1)
        with self.assertRaises(litellm.NotFoundError):
            litellm.completion(
                messages=[{"role": "user", "content": "x"}], **{**self.where("openai"), "model": "openai/other"})
        with self.assertRaises(litellm.ContextWindowExceededError):
            self.ask("word " * 5000)

    def test_leaving_ends_the_request(self):
        before = self.server.aborted()

        async def leave():
            stream = await litellm.acompletion(messages=[{"role": "user", "content": "Tell me a story."}], stream=True,
                                               max_tokens=3500, n=64, extra_body={"ignore_eos": True}, **self.where("openai"))
            count = 0
            async for _ in stream:
                count += 1
                if count == 5:
                    break
            await stream.aclose()
        asyncio.run(leave())
        self.server.wait_until_quiet()
        until(lambda: self.server.aborted() > before)


if __name__ == "__main__":
    unittest.main()
