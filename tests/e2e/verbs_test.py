#!/usr/bin/env python3
"""Tests files, text and exit codes of the verbs that run a model, against the goldens' oracle."""
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import unittest

import moesaic_cli as cli
from moesaic_cli import GOLDEN, run

CHECKPOINTS = ["deepseek-v3-mtp", "deepseek-v2-lite", "qwen3-moe-norm-tied", "llama3-rope-bias"]


def prompts(name):
    """Returns (ids, rows, logits by row, greedy continuation) of each golden prompt."""
    tensors = cli.read_safetensors(GOLDEN / name / "golden.safetensors")
    index = 0
    while f"prompt_{index}.ids" in tensors:
        get = lambda part: tensors[f"prompt_{index}.{part}"]
        (_, vocab), logits = get("logits")
        rows = list(get("rows")[1])
        by_row = [logits[i * vocab : (i + 1) * vocab] for i in range(len(rows))]
        yield list(get("ids")[1]), rows, by_row, list(get("greedy")[1])
        index += 1


def joined(ids):
    return ",".join(map(str, ids))


class CarveTest(unittest.TestCase):
    def test_text_lines_and_token_ids_give_the_same_experts(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            model = folder / "model"
            shutil.copytree(GOLDEN / "llama-untied-f16", model)
            cli.add_tokenizer(model)
            text = "".join(chr(32 + (i * i + 7 * i // 5) % 95) for i in range(1536))
            (folder / "a.txt").write_text(text)
            (folder / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
            ids = json.loads(run("tokenize", model, text, "--no-special").stdout)["ids"]
            cli.write_tokens(folder / "a.safetensors", ids, rows=3)  # the context has 512 tokens
            carved = []
            for ending in ("safetensors", "txt", "jsonl"):
                out = folder / f"carved-{ending}"
                run("carve", model, "--calibration", folder / f"a.{ending}", "--slices", "8", "--shared", "2", "--active", "2",
                    "--out", out)
                carved.append((out / "model.safetensors").read_bytes())
            self.assertEqual(carved[0], carved[1])
            self.assertEqual(carved[0], carved[2])


class GoldenTest(unittest.TestCase):
    def test_logits_equal_the_oracles(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "x.npy"
            for name in CHECKPOINTS:
                for ids, rows, expected, _ in prompts(name):
                    run("logits", GOLDEN / name, "--ids", joined(ids), "--dtype", "f32", "--out", out)
                    found = cli.read_npy(out)
                    self.assertEqual(len(found), len(ids))
                    worst = max(abs(a - b) for r, row in zip(rows, expected) for a, b in zip(found[r], row))
                    self.assertLess(worst, 1e-4, f"{name}, prompt of {len(ids)}")
            self.assertEqual(os.listdir(folder), ["x.npy"])

    def test_batched_greedy_text_equals_the_oracles(self):
        for name in CHECKPOINTS:
            lines = [json.dumps({"id": i, "ids": ids}) for i, (ids, *_) in enumerate(prompts(name))]
            flags = ["--jsonl", "-", "--format", "jsonl", "--dtype", "f32", "-n", "64", "--temperature", "0",
                     "--ignore-eos"]
            answers = [json.loads(l) for l in run("generate", GOLDEN / name, *flags, stdin="\n".join(lines)).stdout.splitlines()]
            for answer, (ids, _, _, greedy) in zip(answers, prompts(name), strict=True):
                self.assertEqual(answer["ids"], greedy, f"{name}, prompt of {len(ids)}")
                self.assertEqual(answer["finish_reason"], "length")
                self.assertEqual(answer["usage"], {"prompt_tokens": len(ids), "completion_tokens": 64})

    def test_logprobs_equal_the_log_softmax_of_the_logits(self):
        ids, rows, expected, greedy = list(prompts("deepseek-v3-mtp"))[1]
        result = run("generate", GOLDEN / "deepseek-v3-mtp", "--ids", joined(ids), "--dtype", "f32", "-n", "1",
                     "--temperature", "0", "--format", "jsonl", "--logprobs", "3", "--prompt-logprobs", "--ignore-eos")
        answer = json.loads(result.stdout)
        self.assertEqual(rows, list(range(len(ids))))
        tables = [cli.log_softmax(row) for row in expected]
        entry = answer["logprobs"][0]
        self.assertEqual(entry["id"], greedy[0])
        self.assertAlmostEqual(entry["logprob"], tables[-1][greedy[0]], delta=2e-4)
        top = sorted(range(len(tables[-1])), key=lambda i: -tables[-1][i])[:3]
        self.assertEqual([other["id"] for other in entry["top"]], top)
        self.assertEqual([e["id"] for e in answer["prompt_logprobs"]], ids[1:])
        for i, entry in enumerate(answer["prompt_logprobs"]):
            self.assertAlmostEqual(entry["logprob"], tables[i][ids[i + 1]], delta=2e-4)

    def test_log_probabilities_need_json_lines(self):
        for flags in (["--logprobs", "1"], ["--prompt-logprobs"]):
            self.assertIn("--format jsonl", run("generate", GOLDEN / "qwen3-tied", "--ids", "1", *flags, code=2).stderr)

    def test_ids_may_be_spaced_and_repeated(self):
        def say(*flags):
            return run("generate", GOLDEN / "qwen3-tied", *flags, "-n", "5", "--temperature", "0", "--ignore-eos").stdout

        self.assertEqual(say("--ids", "5, 6"), say("--ids", "5,6"))
        self.assertEqual(say("--ids", "5", "--ids", "6"), say("--ids", "5,6"))

    def test_model_without_a_tokenizer_accepts_ids_only(self):
        name = "llama3-rope-bias"
        ids, _, _, greedy = list(prompts(name))[1]
        result = run("generate", GOLDEN / name, "--ids", joined(ids), "--dtype", "f32", "-n", "5", "--temperature", "0",
                     "--ignore-eos")
        self.assertEqual(result.stdout, joined(greedy[:5]) + "\n")
        self.assertIn("tokenizer", run("generate", GOLDEN / name, "--prompt", "a", code=1).stderr)


class TextTest(cli.TalkingCase):
    def test_same_seed_gives_the_same_text(self):
        def say(seed):
            return run("generate", self.model, "--prompt", "hello", "-n", "20", "--seed", seed, "--ignore-eos").stdout

        def say_both(seed):
            flags = ["-n", "20", "--seed", seed, "--ignore-eos", "--format", "jsonl"]
            lines = run("generate", self.model, "--prompt", "hello", "--prompt", "hello", *flags).stdout.splitlines()
            return [json.loads(line)["text"] + "\n" for line in lines]

        for seed in (0, 1):
            first, second = say_both(seed)
            self.assertEqual(first, say(seed))
            self.assertNotIn(second, (first, say(seed + 1)))  # equal prompts have different seeds
            self.assertEqual(say_both(seed), [first, second])
        self.assertEqual(say(1), say(1))
        self.assertNotEqual(say(1), say(2))

    def test_output_does_not_depend_on_the_batch(self):
        texts = ["a", "some longer prompt, " * 8, "Hello there!", "x y z"]
        flags = ["--format", "jsonl", "-n", "30", "--temperature", "0", "--ignore-eos"]
        alone = [json.loads(run("generate", self.model, "--prompt", t, *flags).stdout) for t in texts]
        repeated = [part for t in texts for part in ("--prompt", t)]
        for limit in (1, 2, 16):
            batch = run("generate", self.model, *repeated, *flags, "--max-sequences", limit)
            for one, line in zip(alone, batch.stdout.splitlines(), strict=True):
                self.assertEqual(one["ids"], json.loads(line)["ids"])
                self.assertEqual(one["text"], json.loads(line)["text"])

    def test_stop_strings_end_the_text(self):
        flags = ["--prompt", "hello", "-n", "60", "--temperature", "0", "--ignore-eos", "--format", "jsonl"]
        whole = json.loads(run("generate", self.model, *flags).stdout)["text"]
        stop = whole[10:12]
        cut = json.loads(run("generate", self.model, *flags, "--stop", stop).stdout)
        self.assertEqual(cut["text"], whole[: whole.index(stop)])
        self.assertEqual(cut["finish_reason"], "stop")

    def test_prompts_are_read_from_all_sources(self):
        flags = ["-n", "8", "--temperature", "0", "--ignore-eos"]
        expected = run("generate", self.model, "--prompt", "hello", *flags).stdout
        self.assertEqual(run("generate", self.model, *flags, stdin="hello").stdout, expected)
        path = self.folder / "prompt.txt"
        path.write_text("hello")
        self.assertEqual(run("generate", self.model, "--file", path, *flags).stdout, expected)
        lines = self.folder / "prompts.jsonl"
        lines.write_text('{"prompt": "hello"}\n\n{"text": "hello", "id": 7}\n')
        self.assertEqual(run("generate", self.model, "--jsonl", lines, *flags).stdout, expected * 2)

    def test_perplexity_follows_from_the_logits(self):
        text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 3
        path, out = self.folder / "text.txt", self.folder / "x.npy"
        path.write_text(text)
        flags = ["--dtype", "f32", "-c", "64"]
        report = json.loads(run("perplexity", self.model, path, *flags, "--stride", "32", "--format", "json").stdout)
        ids = [5 + [10, *range(32, 127)].index(ord(c)) for c in text]
        self.assertEqual((report["tokens"], report["scored"]), (len(ids), len(ids) - 1))
        run("logits", self.model, "--prompt", text[:64], "--dtype", "f32", "--out", out)
        first = cli.read_npy(out)
        nll = [-cli.log_softmax(first[i])[ids[i + 1]] for i in range(63)]
        alone = json.loads(run("perplexity", self.model, path, *flags, "--max-tokens", 64, "--format", "json").stdout)
        self.assertAlmostEqual(alone["nll"], math.fsum(nll) / 63, delta=1e-4)
        self.assertAlmostEqual(alone["perplexity"], math.exp(alone["nll"]), delta=1e-6)

    def test_divergence_is_zero_only_from_itself(self):
        path, saved = self.folder / "text2.txt", self.folder / "saved.safetensors"
        path.write_text("All happy families are alike; each unhappy family is unhappy in its own way. " * 4)
        run("perplexity", self.model, path, "-c", "100", "--dtype", "f32", "--save-logits", saved)
        json_flags = ["-c", "100", "--kl-base", saved, "--format", "json"]
        same = json.loads(run("perplexity", self.model, path, "--dtype", "f32", *json_flags).stdout)
        self.assertLess(same["kl_max"], 1e-4)
        self.assertGreater(same["same_top"], 0.98)
        self.assertAlmostEqual(same["base_perplexity"], same["perplexity"], delta=0.01 * same["perplexity"])
        int8 = json.loads(run("perplexity", self.model, path, "--dtype", "int8", *json_flags).stdout)
        self.assertGreater(int8["kl"], same["kl"])
        self.assertLess(int8["kl"], 0.1)
        fault = run("perplexity", self.model, path, "-c", "50", "--kl-base", saved, code=1).stderr
        self.assertIn("saved with -c 100", fault)


    def test_broken_template_is_reported(self):
        model = self.folder / "broken"
        shutil.copytree(self.model, model)
        (model / "chat_template.jinja").write_text("{% if %}")
        for verb in (["chat", model, "-p", "x"], ["render", model], ["serve", model, "--port", "0"]):
            fault = run(*verb, stdin='{"messages": []}', code=1).stderr
            self.assertIn(f"chat template: {model}", fault)

    def test_perplexity_of_one_token_has_no_error_and_reports_invalid_utf8(self):
        path = self.folder / "two.txt"
        path.write_text("hello")
        self.assertIn("± n/a", run("perplexity", self.model, path, "--max-tokens", "2").stdout)
        path.write_bytes(b"ab\xff")
        self.assertIn(f"{path}: ", run("perplexity", self.model, path, code=1).stderr)


    def test_outputs_ended_by_the_context_are_reported(self):
        flags = ["--temperature", "0", "--ignore-eos", "-c", "64"]
        cut = run("generate", self.model, "--prompt", "hello", "-n", "1000", *flags).stderr
        self.assertEqual(cut, "1 of 1 outputs reached the context of 64 tokens before --max-tokens 1000\n")
        self.assertEqual(run("generate", self.model, "--prompt", "hello", "-n", "10", *flags).stderr, "")

    def test_too_many_threads_are_reported(self):
        here = os.cpu_count() + 1
        told = run("generate", self.model, "--prompt", "hello", "-n", "1", "--threads", here).stderr
        self.assertIn(f"{here} threads share the ", told)

    def test_window_beyond_the_context_is_rejected(self):
        path = self.folder / "text3.txt"
        path.write_text("The quick brown fox.\n")
        self.assertIn("--ctx-size 1000000", run("perplexity", self.model, path, "-c", "1000000", code=1).stderr)
        report = json.loads(run("perplexity", self.model, path, "--format", "json").stdout)
        self.assertLessEqual(report["window"], 1024)


class InspectTest(unittest.TestCase):
    def test_unloaded_layers_are_reported_separately(self):
        facts = json.loads(run("inspect", GOLDEN / "deepseek-v3-mtp", "--json").stdout)
        self.assertGreater(facts["mtp_parameters"], 0)
        self.assertGreater(facts["mtp_weight_bytes"], facts["mtp_parameters"])
        wide = json.loads(run("inspect", GOLDEN / "deepseek-v3-mtp", "--json", "--dtype", "f32").stdout)
        self.assertEqual((facts["kv_dtype"], wide["kv_dtype"]), ("f32" if facts["weight_format"] == "f32" else "bf16", "f32"))
        bf16 = json.loads(run("bench", GOLDEN / "deepseek-v3-mtp", "-p", "1", "-n", "0", "-t", "1", "-r", "1", "-o", "json").stdout)
        self.assertEqual(bf16[0]["weight_bytes"], facts["weight_bytes"])


class BenchTest(unittest.TestCase):
    def test_tables_come_in_three_formats(self):
        model = GOLDEN / "deepseek-v3-mtp"
        flags = ["-p", "32,64", "-n", "8", "-d", "0,16", "-s", "1,2", "-t", "1", "-r", "2"]
        lines = json.loads(run("bench", model, *flags, "-o", "json").stdout)
        self.assertEqual(len(lines), 2 * 2 * 3)
        for line in lines:
            self.assertEqual(len(line["samples"]), 2)
            self.assertGreater(line["tokens_per_s"], 0)
            self.assertEqual(line["bytes_per_token"] > 0, line["generate"] > 0)
        # Two sequences share the reads of weights.
        decodes = {(l["depth"], l["sequences"]): l["bytes_per_token"] for l in lines if l["generate"] > 0}
        for depth in (0, 16):
            self.assertLess(decodes[depth, 2], decodes[depth, 1])
            self.assertGreater(2 * decodes[depth, 2], decodes[depth, 1])
        self.assertEqual({l["test"] for l in lines}, {"pp32", "pp64", "tg8", "pp32 @ d16", "pp64 @ d16", "tg8 @ d16"})
        csv = run("bench", model, "-p", "16", "-n", "0", "-t", "1", "-r", "1", "-o", "csv").stdout.splitlines()
        self.assertEqual(len(csv), 2)
        self.assertEqual(len(csv[0].split(",")), len(csv[1].split(",")))
        table = run("bench", model, "-p", "16", "-n", "4", "-t", "1", "-r", "1").stdout.splitlines()
        self.assertEqual(len(table), 4)
        self.assertTrue(all(row.startswith("|") for row in table))


class FaultTest(unittest.TestCase):
    MODEL = GOLDEN / "llama3-rope-bias"

    def assert_one_line(self, result, *parts):
        self.assertEqual(result.stdout, "")
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def test_failures_are_one_line_and_exit_1(self):
        self.assert_one_line(run("generate", self.MODEL, "--ids", "1,160", code=1), "moesaic generate:", "160")
        self.assert_one_line(run("logits", self.MODEL, "--ids", "1", "--out", "/nowhere/x.npy", code=1), "/nowhere/x.npy")
        self.assert_one_line(run("generate", self.MODEL, "--ids", "1", "-c", "100000", code=1), "context")
        self.assert_one_line(run("bench", self.MODEL, "-n", "100000", code=1), "context")
        with tempfile.TemporaryDirectory() as empty:
            self.assert_one_line(run("generate", empty, "--ids", "1", code=1), "config.json")

    def test_wrong_usage_exits_2(self):
        for arguments in (["generate"], ["generate", "/nowhere"], ["chat", self.MODEL, "--top-k", "many"],
                          ["logits", self.MODEL, "--out", "x"], ["bench", self.MODEL, "-o", "xml"], ["nonsense"], [],
                          ["generate", self.MODEL, "--ids", "1", "--temperature", "-1"],
                          ["chat", self.MODEL, "--top-p", "nan"], ["serve", self.MODEL, "--tool-format", "foo"],
                          ["inspect", self.MODEL, "--dtype", "foo"], ["inspect", "/nowhere"], ["tokenize", "/nowhere"],
                          ["render", "/nowhere"], ["convert", "/nowhere", "-o", "x"], ["carve"],
                          ["perplexity", self.MODEL, __file__, "-c", "8", "--stride", "9"]):
            run(*arguments, code=2)

    def test_unknown_verb_is_reported(self):
        self.assert_one_line(run("frobnicate", code=2), 'there is no verb "frobnicate"; moesaic --help lists them')

    def test_file_that_is_not_a_model_is_reported(self):
        self.assert_one_line(run("inspect", __file__, code=1), __file__, "neither GGUF, safetensors nor a packed file")

    def test_completion_knows_every_flag_of_the_help(self):
        script = run("completion", "bash").stdout
        verbs = dict(re.findall(r'^    (\w+)\) words="(.*)" ;;$', script, re.MULTILINE))
        self.assertIn("logits", verbs)
        for verb, words in verbs.items():
            flags = set()
            for line in run(verb, "--help").stdout.split("Examples:")[0].splitlines():
                if found := re.match(r"\s*((?:-\w,)?--[a-z][\w,-]*)", line):
                    flags.update(f for f in found[1].split(",") if f.startswith("--"))
            self.assertLessEqual(flags, set(words.split()), verb)
            self.assertEqual(len(words.split()), len(set(words.split())), verb)

    def test_help_gives_examples(self):
        for verb in ("chat", "generate", "logits", "perplexity", "bench"):
            self.assertIn("Examples:", run(verb, "--help").stdout)


if __name__ == "__main__":
    cli.main()
