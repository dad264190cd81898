#!/usr/bin/env python3
"""Tests requests that compete for KV blocks, through the official OpenAI client. Some are preempted, and all answers have
the same log-probabilities, to the last bit, as with enough blocks for all requests.

The model has grouped-query attention, where computing a prompt again gives the same bits. MLA computes a chunk in one of two
ways, which round differently (models/model.h).
"""
import functools
import json
import pathlib
import shutil
import tempfile
import unittest

import openai

from serving import ROOT, serving

GOLDEN = ROOT / "tests" / "golden" / "qwen3-moe-norm-tied"
VOCABULARY = 160
PROMPTS = [[(7 * i + j * j) % VOCABULARY for j in range(40)] for i in range(6)]  # sent in one call
TOKENS = 450  # with its prompt, a sequence needs eight blocks at its end
ROOMY, TIGHT = 64, 18  # number of blocks for all sequences, and for two or three
# 64 tokens x 4 layers x keys and values x 2 heads x 24 elements, and one scale per row for int8.
BLOCK_BYTES = {"f32": 64 * 4 * 2 * 2 * 24 * 4, "int8": 64 * 4 * 2 * 2 * (24 + 4)}


def make_model(folder):
    """Makes the golden model with a tokenizer of single letters. The test uses token ids."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    letters = [chr(code) for code in range(0x21, 0x7f)] + [chr(code) for code in range(0xae, 0x100)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "merges": [], "vocab": {letter: i for i, letter in enumerate(letters[:VOCABULARY])}}}))


class Pressure(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        make_model(pathlib.Path(cls.folder.name))

    @functools.cache
    def told(self, dtype, blocks, *flags):
        """Returns the tokens and log-probabilities of each answer, and the metrics after them."""
        with serving("--kv-dtype", dtype, "--kv-memory", blocks * BLOCK_BYTES[dtype], *flags, model=self.folder.name) as server:
            self.assertEqual(server.json("GET", "/state")[1]["kv"]["total_blocks"], blocks)
            name = server.json("GET", "/v1/models")[1]["data"][0]["id"]
            with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
                answer = client.completions.create(model=name, prompt=PROMPTS, max_tokens=TOKENS, temperature=1, seed=1, logprobs=0,
                                                   extra_body={"ignore_eos": True, "return_token_ids": True})
            server.wait_until_quiet()
            metrics = {name.split("{")[0]: value for name, value in server.metrics().items()}
        return [(choice.token_ids, choice.logprobs.token_logprobs) for choice in answer.choices], metrics

    def press(self, dtype, *flags):
        expected, metrics = self.told(dtype, ROOMY)
        self.assertEqual(metrics["vllm:num_preemptions_total"], 0)
        answers, metrics = self.told(dtype, TIGHT, *flags)
        self.assertGreater(metrics["vllm:num_preemptions_total"], 0)
        self.assertEqual(answers, expected)
        return metrics

    def test_recomputes_preempted_requests(self):
        metrics = self.press("f32")
        self.assertEqual(metrics["moesaic:swapped_out_blocks_total"], 0)

    def test_swaps_preempted_requests(self):
        metrics = self.press("f32", "--swap-space", "16MiB")
        self.assertGreater(metrics["moesaic:swapped_out_blocks_total"], 0)
        self.assertGreater(metrics["moesaic:swapped_in_blocks_total"], 0)

    def test_recomputes_requests_with_an_int8_cache(self):
        self.press("int8")
        self.assertNotEqual(self.told("int8", ROOMY)[0], self.told("f32", ROOMY)[0])

    def test_swaps_requests_with_an_int8_cache(self):
        metrics = self.press("int8", "--swap-space", "16MiB")
        self.assertGreater(metrics["moesaic:swapped_in_blocks_total"], 0)


if __name__ == "__main__":
    unittest.main()
