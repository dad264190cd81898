"""Tests the dense model that moesaic-smol is made from: SmolLM2-135M-Instruct, a Q4_1 GGUF."""
import hashlib
import json
import math
import os
import unittest

import moesaic_cli
from moesaic_cli import GOLDEN, ROOT, run

GGUF = ROOT / "models" / "moesaic-smol" / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT.parent / "shared" / "data" / "text" / "wikitext-2_valid.txt"

moesaic_cli.TIMEOUT = 600  # a text of 4096 tokens on a busy machine


@unittest.skipUnless(GGUF.exists() or "CI" in os.environ, "the GGUF is not there: ./run test fetches it")
class Dense(unittest.TestCase):
    @unittest.skipUnless(TEXT.exists(), f"{TEXT} is not there")
    def test_perplexity_equals_that_of_transformers(self):
        golden = json.loads((GOLDEN / "smollm2_perplexity.json").read_text())
        self.assertEqual(hashlib.sha256(TEXT.read_bytes()).hexdigest(), golden["text_sha256"])
        flags = ["-c", golden["window"], "--max-tokens", golden["tokens"], "--format", "json"]
        for dtype, tolerance in (("f32", 1e-5), ("auto", 0.01)):
            with self.subTest(dtype=dtype):
                mine = json.loads(run("perplexity", GGUF, TEXT, *flags, "--dtype", dtype).stdout)
                self.assertEqual(mine["scored"], golden["scored"])
                ratio = math.exp(mine["nll"] - golden["mean_nll"])
                print(f"perplexity with {dtype} weights: {mine['perplexity']:.4f}, {ratio:.6f} of transformers' fp32")
                self.assertLess(abs(ratio - 1), tolerance)

    def test_chat_answers(self):
        answer = run("chat", GGUF, "--prompt", "What is the capital of France?", "--temperature", "0").stdout
        self.assertIn("Paris", answer)


if __name__ == "__main__":
    unittest.main()
