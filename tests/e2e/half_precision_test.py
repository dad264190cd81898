"""Tests a MoE layer that overflows fp16, in transformers layer by layer, and in Moesaic."""
import copy
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import moesaic_cli as cli
from moesaic_cli import ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(TINY))
import generate  # noqa: E402  what the model was trained on

PROMPTS, NEW_TOKENS = 12, 16
LAST_MOE_LAYER = 3
ORACLE = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "tokenizers"))


def held_out():
    """Returns [(prompt, answer)] of the shortest held-out prompts of all kinds."""
    records = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
    pairs = [("".join(text for text, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)), r["expected"])
             for r in records]
    short = [pair for pair in pairs if len(pair[0]) < 400]
    return short[:: len(short) // PROMPTS][:PROMPTS]


def inject(out):
    script = ROOT / "bench" / "quantizer" / "inject_overflow.py"
    subprocess.run([sys.executable, script, TINY, out], check=True)


class Oracle:
    """Decodes greedily with transformers."""

    def __init__(self, folder, dtype):
        import torch
        import transformers
        from tokenizers import Tokenizer

        transformers.logging.set_verbosity_error()  # silences the warning about the MTP module, which is not loaded
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(1)  # the model is too small to share
        self.torch = torch
        self.tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self.end = json.loads((TINY / "config.json").read_text())["eos_token_id"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def answer(self, prompt):
        """Returns the ids of the answer."""
        torch, past, answer = self.torch, None, []
        tokens = torch.tensor([self.ids(prompt)])
        with torch.no_grad():
            while len(answer) < NEW_TOKENS:
                out = self.model(tokens, past_key_values=past, use_cache=True)
                past = out.past_key_values
                answer.append(out.logits[0, -1].argmax().item())
                if answer[-1] == self.end:
                    break
                tokens = torch.tensor([answer[-1:]])
        return answer

    def logprobs(self, text):
        with self.torch.no_grad():
            return self.model(self.torch.tensor([self.ids(text)])).logits[0].double().log_softmax(-1)

    def in_half(self, layer):
        """Runs the feed-forward part of one layer in fp16 only; returns a function that undoes it."""
        block = self.model.model.layers[layer]
        whole = block.mlp

        class Half(self.torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.mlp = copy.deepcopy(whole).half()

            def forward(self, x):
                return self.mlp(x.half()).to(x.dtype)

        block.mlp = Half()

        def undo():
            block.mlp = whole

        return undo


def longest_run(ids):
    """Returns the length of the longest run of one token."""
    longest = run_length = 1
    for before, after in zip(ids, ids[1:]):
        run_length = run_length + 1 if after == before else 1
        longest = max(longest, run_length)
    return longest


class HalfPrecisionTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.changed = cls.folder / "changed"
        inject(cls.changed)
        cls.pairs = held_out()

    def test_changed_model_computes_the_same(self):
        """Scaling by a power of two commutes with the rounding of bf16 and f32, so the result is identical."""
        text = self.folder / "text.txt"
        text.write_text("".join(prompt + answer for prompt, answer in self.pairs))
        for dtype in ("f32", "bf16"):
            told = json.loads(run("perplexity", self.changed, "--text", text, "--reference", TINY, "-c", "256", "--dtype",
                                  dtype, "--reference-dtype", dtype, "--format", "json").stdout)
            self.assertEqual((told["kl"], told["same_top"]), (0, 1), dtype)

    @unittest.skipUnless(ORACLE, "torch, transformers or tokenizers are missing")
    def test_fp16_repeats_one_token_where_bf16_answers(self):
        right = {}
        for dtype in ("float32", "bfloat16", "float16"):
            oracle = Oracle(self.changed, dtype)
            answers = [oracle.answer(prompt) for prompt, _ in self.pairs]
            right[dtype] = sum(oracle.tokenizer.decode(ids, skip_special_tokens=True).strip() == expected.strip()
                               for ids, (_, expected) in zip(answers, self.pairs))
            stuck = sum(longest_run(ids) >= NEW_TOKENS - 1 for ids in answers)
            print(f"{dtype}: {right[dtype]} of {len(self.pairs)} right, {stuck} repeat one token to the end")
            if dtype == "float16":
                self.assertGreater(stuck, len(self.pairs) // 2)
        untouched = Oracle(TINY, "float16")
        right["untouched"] = sum(
            untouched.tokenizer.decode(untouched.answer(prompt), skip_special_tokens=True).strip() == expected.strip()
            for prompt, expected in self.pairs)
        print(f"float16, the model as it was: {right['untouched']} right")
        self.assertGreater(right["float32"], 0.7 * len(self.pairs))
        self.assertGreater(right["bfloat16"], 0.7 * len(self.pairs))
        self.assertGreater(right["untouched"], 0.7 * len(self.pairs))
        self.assertLess(right["float16"], right["float32"] // 4)

    @unittest.skipUnless(ORACLE, "torch, transformers or tokenizers are missing")
    def test_only_one_layer_overflows(self):
        oracle = Oracle(self.changed, "float32")
        texts = [prompt + answer for prompt, answer in self.pairs[:4]]
        exact = [oracle.logprobs(text) for text in texts]
        layers = len(oracle.model.model.layers)
        for layer in range(layers):
            undo = oracle.in_half(layer)
            kl = oracle.torch.cat([(p.exp() * (p - oracle.logprobs(text))).sum(-1) for p, text in zip(exact, texts)])
            undo()
            broken = kl.isfinite().logical_not().double().mean().item()
            finite = kl[kl.isfinite()]
            mean = finite.mean().item() if len(finite) else float("nan")
            print(f"layer {layer} in fp16: {broken:.1%} of tokens have no finite logits, KL of the others {mean:.2g}")
            if layer == LAST_MOE_LAYER:
                self.assertGreater(broken, 0.1)
            else:
                self.assertEqual(broken, 0)
                self.assertLess(mean, 1e-4)


if __name__ == "__main__":
    cli.main(verbosity=2)
