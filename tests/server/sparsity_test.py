#!/usr/bin/env python3
"""Tests block-sparse attention through the server's API: the request's field, the defaults, and the metrics."""
import unittest

from serving import serving

PROMPT = [(7 * i + i * i // 3) % 1000 + 5 for i in range(1200)]
TOKENS = 40


def completion(server, status=200, **fields):
    got, answer = server.json("POST", "/v1/completions", {
        "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "return_token_ids": True, **fields})
    assert got == status, answer
    if status != 200:
        return answer["error"]
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def counters(server):
    server.wait_until_quiet()
    metrics = {}
    for name, value in server.metrics().items():
        metrics[name.split("{")[0]] = value
    return {name.removeprefix("moesaic:kv_sparsity_"): value for name, value in metrics.items() if "kv_sparsity" in name}


class Sparsity(unittest.TestCase):
    def test_requests_choose_sparse_attention(self):
        with serving("--kv-sparsity", "dense", "--kv-sparsity-audit", 1) as server:
            dense = completion(server)
            self.assertEqual(completion(server, kv_sparsity={"mode": "dense"}), dense)
            self.assertEqual(completion(server, kv_sparsity=None), dense)
            self.assertEqual(completion(server, kv_sparsity={"budget": 4096}), dense, "a budget that holds everything")
            self.assertEqual(counters(server)["choices_total"], 0)
            sparse = completion(server, kv_sparsity={"budget": 256})
            self.assertNotEqual(sparse, dense)
            told = counters(server)
            # Two of four layers choose blocks, for each token after the first.
            self.assertEqual(told["choices_total"], 2 * (TOKENS - 1))
            self.assertEqual(told["blocks_read_total"], 4 * told["choices_total"])
            self.assertGreater(told["blocks_total"], 4 * told["blocks_read_total"])
            self.assertEqual(told["missed_count"], 4 * told["choices_total"], "four heads each")
            self.assertGreater(told["missed_sum"], 0)
            self.assertEqual(completion(server, kv_sparsity={"mode": "decode", "budget": 256}), sparse)

    def test_choices_are_reused(self):
        with serving("--kv-sparsity", "dense", "--kv-sparsity-audit", 0) as server:
            each = completion(server, kv_sparsity={"budget": 256})
            self.assertEqual(completion(server, kv_sparsity={"budget": 256, "reuse": 1}), each)
            self.assertEqual(counters(server)["reused_total"], 0)
            reused = completion(server, kv_sparsity={"budget": 256, "reuse": 4})
            self.assertEqual(completion(server, kv_sparsity={"budget": 256, "reuse": 4}), reused)
            after = counters(server)
            # Outputs are computed at positions 1200 to 1238. Position 1200 and every fourth position choose blocks.
            choosers = len([p for p in range(len(PROMPT), len(PROMPT) + TOKENS - 1) if p % 64 % 4 == 0])
            self.assertEqual(after["reused_total"], 2 * 2 * (TOKENS - 1 - choosers))
            self.assertEqual(counters(server)["rechosen_total"], 0)
            # In every mode, rows of the prompt reuse choices as well.
            told = counters(server)["reused_total"]
            completion(server, kv_sparsity={"mode": "all", "budget": 256, "reuse": 64})
            rows = len(PROMPT) + TOKENS - 1 - 256
            self.assertEqual(counters(server)["reused_total"] - told, 2 * (rows - (rows + 63) // 64))

    def test_flags_set_the_defaults(self):
        with serving("--kv-sparsity-budget", 320) as server:
            completion(server)
            told = counters(server)
            self.assertEqual(told["choices_total"], 2 * (TOKENS - 1))
            self.assertEqual(told["blocks_read_total"], 5 * told["choices_total"])
            self.assertIn("block-sparse attention: decode, 320 tokens a row", server.read_log())
            completion(server, kv_sparsity={"mode": "all"})
            more = counters(server)["choices_total"] - told["choices_total"]
            self.assertEqual(more, 2 * (len(PROMPT) - 320 + TOKENS - 1))

    def test_errors_name_the_field(self):
        with serving("--kv-sparsity", "dense") as server:
            for value, param in (({"mode": "some"}, "kv_sparsity.mode"), ({"budget": 255}, "kv_sparsity.budget"),
                                 ({"budget": 1.5}, "kv_sparsity.budget"), ({"reuse": 0}, "kv_sparsity.reuse"),
                                 ({"reuse": 65}, "kv_sparsity.reuse"), ({"reuse": 1.5}, "kv_sparsity.reuse"),
                                 ({"reuse": "4"}, "kv_sparsity.reuse"), ({"reuse": True}, "kv_sparsity.reuse"),
                                 (5, "kv_sparsity"), ([], "kv_sparsity")):
                self.assertEqual(completion(server, status=400, kv_sparsity=value)["param"], param)
        with serving() as server:
            error = completion(server, status=400, kv_sparsity={"budget": 512})
            self.assertEqual(error["param"], "kv_sparsity.mode")
            self.assertIn("--kv-sparsity", error["message"])
            completion(server, kv_sparsity={"mode": "dense"})
            self.assertEqual(counters(server)["choices_total"], 0)

    def test_the_schema_has_the_modes(self):
        for flags, modes in (((), ["dense"]), (("--kv-sparsity", "dense"), ["dense", "decode", "all"])):
            with serving(*flags) as server:
                self.assertIn(str(modes).replace("'", '"').replace(" ", ""),
                              server.request("GET", "/openapi.json")[2].decode().replace(" ", ""))


if __name__ == "__main__":
    unittest.main()
