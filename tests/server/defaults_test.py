#!/usr/bin/env python3
"""Tests that sampling parameters which a request or a command line leaves out come from generation_config.json."""
import json
import subprocess
import unittest

from serving import ANSWER_SECONDS, BINARY, chat, model_with, serving

CHAT = "/v1/chat/completions"
STORY = "Tell me a story."
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
HIGH = 5.0  # moesaic-tiny answers most questions alike at lower temperatures


def model(**defaults):
    """Makes a folder of moesaic-tiny with another generation_config.json."""
    return model_with("generation_config.json", {**ENDS, **defaults})


def message_text(server, **fields):
    body = {"model": "", "max_tokens": 40, "messages": [{"role": "user", "content": STORY}], **fields}
    status, answer = server.json("POST", "/v1/messages", body)
    assert status == 200, answer
    return answer["content"][0]["text"]


def echoed(server, **fields):
    """Returns the temperature and top_p of a response."""
    status, answer = server.json("POST", "/v1/responses", {"input": STORY, "max_output_tokens": 1, **fields})
    assert status == 200, answer
    return round(answer["temperature"], 4), round(answer["top_p"], 4)


class ServerDefaults(unittest.TestCase):
    def test_equal_those_of_the_model(self):
        with model(temperature=0.25, top_p=0.5) as folder, serving(model=folder) as server:
            self.assertEqual(echoed(server), (0.25, 0.5))
            self.assertEqual(echoed(server, temperature=0.75), (0.75, 0.5))

    def test_have_temperature_1_where_the_model_has_none(self):
        for defaults in ({}, {"temperature": None}):
            with model(**defaults) as folder, serving(model=folder) as server:
                self.assertEqual(echoed(server), (1, 1))

    def test_apply_to_clients_of_anthropic(self):
        with model(do_sample=False) as folder, serving(model=folder) as server:
            greedy = message_text(server, temperature=0)
            self.assertEqual({message_text(server) for _ in range(3)}, {greedy})
        with model(temperature=HIGH, top_k=1) as folder, serving(model=folder) as server:
            self.assertEqual({message_text(server) for _ in range(3)}, {greedy})
        with model(temperature=HIGH) as folder, serving(model=folder) as server:
            self.assertNotIn(greedy, {message_text(server) for _ in range(3)})

    def test_limit_the_answers_of_requests_without_a_limit(self):
        with model(max_new_tokens=7) as folder, serving(model=folder) as server:
            def tokens(**fields):
                return server.json("POST", CHAT, chat(STORY, ignore_eos=True, **fields))[1]["usage"]["completion_tokens"]
            self.assertEqual(tokens(), 7)
            self.assertEqual(tokens(max_tokens=9), 9)
            answer = server.json("POST", "/v1/responses", {"input": STORY, "ignore_eos": True})[1]
            self.assertEqual((answer["status"], answer["usage"]["output_tokens"]), ("incomplete", 7))
            answer = server.json("POST", "/v1/completions", {"prompt": STORY, "ignore_eos": True})[1]
            self.assertEqual(answer["usage"]["completion_tokens"], 16)

    def test_error_names_a_wrong_value(self):
        with model(max_new_tokens="many") as folder:
            refused = subprocess.run([BINARY, "serve", folder, "--port", "0"], capture_output=True, text=True,
                                     timeout=ANSWER_SECONDS)
        self.assertEqual(refused.returncode, 1)
        self.assertIn('"max_new_tokens" must be a positive integer, found "many"', refused.stderr)


class VerbDefaults(unittest.TestCase):
    def texts(self, folder, *flags):
        """Yields the outputs of generate, and of chat with a pipe."""
        common = ["--max-tokens", "40", "--seed", "1", "--ignore-eos", *flags]
        for verb, text in ((["generate", folder, "--prompt", "zebra flux"], None), (["chat", folder], STORY + "\n")):
            done = subprocess.run([BINARY, *verb, *common], input=text, capture_output=True, text=True,
                                  timeout=ANSWER_SECONDS)
            self.assertEqual(done.returncode, 0, done.stderr)
            yield done.stdout

    def test_equal_those_of_the_model(self):
        with model(do_sample=False) as folder:
            own, greedy = [list(self.texts(folder, *flags)) for flags in ((), ("--temperature", "0"))]
            self.assertEqual(own, greedy)
            for sampled, text in zip(self.texts(folder, "--temperature", str(HIGH)), greedy):
                self.assertNotEqual(sampled, text)

    def test_have_temperature_0_7_where_the_model_has_none(self):
        with model() as folder:
            own, given, higher = [list(self.texts(folder, *flags))
                                  for flags in ((), ("--temperature", "0.7"), ("--temperature", str(HIGH)))]
            self.assertEqual(own, given)
            for text, other in zip(own, higher):
                self.assertNotEqual(text, other)


if __name__ == "__main__":
    unittest.main()
