#!/usr/bin/env python3
"""Wrong usage and damaged files give one line that names the fault and its place, and never a crash."""
import json
import os
import pathlib
import shutil
import socket
import struct
import tempfile
import unittest

import moesaic_cli as cli
from moesaic_cli import ROOT, run


GGUF = ROOT / "models" / "moesaic-smol" / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class BrokenCase(cli.TalkingCase):
    def assert_one_line(self, arguments, *parts, code=1, stdin=""):
        result = run(*arguments, code=code, stdin=stdin)
        self.assertEqual(result.stdout, "")
        (line,) = [line for line in result.stderr.splitlines() if "] [info] " not in line]  # serve logs that it starts
        self.assertTrue(line.startswith(f"moesaic {arguments[0]}: "), line)
        for part in parts:
            self.assertIn(str(part), line)
        if code == 2:
            self.assertTrue(line.endswith(f"; see moesaic {arguments[0]} --help"), line)


class ModelTest(BrokenCase):
    def refuse(self, path, *parts):
        """Checks that all verbs that load the model name the file."""
        for arguments in (["inspect", path], ["generate", path, "--ids", "7", "-n", "1"],
                          ["convert", path, "--out", self.folder / "never.moesaic"]):
            with self.subTest(arguments=arguments):
                self.assert_one_line(arguments, path, *parts)
        self.assertFalse((self.folder / "never.moesaic").exists())

    def cut(self, source, name, length):
        path = self.folder / name
        with open(source, "rb") as file:
            path.write_bytes(file.read(length))
        return path

    def test_truncated_packed_file_is_reported(self):
        packed = self.folder / "whole.moesaic"
        run("convert", self.model, "--out", packed)
        size = packed.stat().st_size
        (header,) = struct.unpack("<Q", packed.read_bytes()[:8])
        for length in (8 + header + (size - 8 - header) // 2, size - 1, 8 + header, 8 + header // 2, 100):
            self.refuse(self.cut(packed, f"cut{length}.moesaic", length), "complete?")
        for length in (0, 4, 7):
            self.refuse(self.cut(packed, f"cut{length}.moesaic", length), "neither GGUF, safetensors nor a packed file")

    @unittest.skipUnless(GGUF.exists() or "CI" in os.environ, "the GGUF is not there: ./run test fetches it")
    def test_truncated_gguf_file_is_reported(self):
        for length in (10_000_000, 1000, 100, 30):
            self.refuse(self.cut(GGUF, f"cut{length}.gguf", length))

    def test_truncated_or_missing_shard_is_reported(self):
        model = self.folder / "short"
        shutil.copytree(self.model, model)
        shard = model / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        self.refuse(model, shard, "complete?")
        shard.unlink()
        self.refuse(model, shard, "no such file")
        (model / "model.safetensors.index.json").unlink()
        self.assert_one_line(["generate", model, "--ids", "7"], model, "no weights", "model.safetensors.index.json",
                             "model-00001-of-00003.safetensors")
        for file in model.glob("*.safetensors"):
            file.unlink()
        (model / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")
        self.assert_one_line(["generate", model, "--ids", "7"], model, "no weights", "pytorch_model-00001-of-00002.bin")
        self.assert_one_line(["quantize", model, "-o", self.folder / "never", "--scheme", "w8a8"], model, "no weights", "pytorch_model")

    def test_git_lfs_pointer_is_reported(self):
        model = self.folder / "pointers"
        shutil.copytree(self.model, model)
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
        (model / "tokenizer.json").write_text(pointer)
        self.assert_one_line(["tokenize", model, "a"], model / "tokenizer.json", "Git LFS pointer", "git lfs pull")
        shard = model / "model-00002-of-00003.safetensors"
        shard.write_text(pointer)
        self.refuse(model, shard, "Git LFS pointer")

    def test_layers_beyond_the_config_are_reported(self):
        model = self.folder / "fewer"
        shutil.copytree(self.model, model)
        config = json.loads((model / "config.json").read_text())
        config["num_hidden_layers"] -= 1
        (model / "config.json").write_text(json.dumps(config))
        self.refuse(model, f"layer {config['num_hidden_layers']} lies beyond", "not a complete MTP module")

    def test_tokenize_needs_neither_config_nor_weights(self):
        folder = self.folder / "tokenizer"
        folder.mkdir()
        shutil.copy(self.model / "tokenizer.json", folder)
        expected = run("tokenize", self.model, "--no-special", "abc").stdout
        for path in (folder, folder / "tokenizer.json"):
            self.assertEqual(run("tokenize", path, "--no-special", "abc").stdout, expected)

    def test_report_rejects_unquantized_folders(self):
        model = self.folder / "plain"
        shutil.copytree(self.model, model)
        before = sorted(os.listdir(model))
        self.assert_one_line(["report", model], model, "not quantized", "quantization_config")
        self.assert_one_line(["report", model, "--source", model], model, "--source is the same folder")
        self.assertEqual(sorted(os.listdir(model)), before)

    def test_files_that_are_not_models_are_rejected(self):
        garbage = self.folder / "garbage.bin"
        garbage.write_bytes(bytes(range(255, 0, -1)) * 20)
        self.refuse(garbage, "neither GGUF, safetensors nor a packed file")
        self.refuse(shutil.copy(garbage, self.folder / "garbage.gguf"), "GGUF")
        empty = self.folder / "empty"
        empty.mkdir()
        self.refuse(empty, "no config.json")
        for verb in (["chat"], ["tokenize"], ["render"], ["serve", "--port", "0"]):
            self.assert_one_line([verb[0], empty, *verb[1:]], empty, "no config.json", stdin='{"messages": []}')
        for verb in ("inspect", "chat", "generate", "serve", "tokenize", "render", "bench"):
            self.assert_one_line([verb, "/nowhere/model"], "MODEL: path does not exist: /nowhere/model", code=2)

    def test_invalid_config_is_reported(self):
        model = self.folder / "config"
        shutil.copytree(self.model, model)
        for text, part in (("{", "not JSON"), ("[]", "config.json"), ("{}", "config.json"), ("\xff\xfe", "config.json"),
                           ('{"architectures": ["FooForCausalLM"]}', '"FooForCausalLM" is not supported')):
            (model / "config.json").write_bytes(text.encode("latin-1"))
            self.refuse(model, part)


class PromptTest(BrokenCase):
    def test_files_without_a_prompt_are_reported(self):
        empty, garbage = self.folder / "empty.txt", self.folder / "garbage.txt"
        empty.write_text("")
        garbage.write_bytes(b"text \xff\xfe\x00")
        for path in (empty, garbage):
            part = "the prompt is empty" if path is empty else "not UTF-8 at byte 5"
            self.assert_one_line(["generate", self.model, "--file", path], path, part)
            self.assert_one_line(["perplexity", self.model, path], path)
        self.assert_one_line(["generate", self.model], "standard input: the prompt is empty")
        self.assert_one_line(["generate", self.model, "--jsonl", empty], empty, "no line has a prompt")
        self.assert_one_line(["generate", self.model, "--jsonl", garbage], f"{garbage}:1: not a JSON object")
        self.assert_one_line(["generate", self.model, "--jsonl", "-"], "standard input:2: ", stdin='{"ids": [7]}\n{"ids": 7}\n')
        self.assert_one_line(["generate", self.model, "--prompt", ""], "prompt is empty")
        self.assert_one_line(["render", self.model, garbage], garbage, "JSON object")

    def test_ids_outside_the_vocabulary_are_reported(self):
        vocab = json.loads((self.model / "config.json").read_text())["vocab_size"]
        out = self.folder / "x.npy"
        for arguments in (["generate", self.model], ["logits", self.model, "--out", out]):
            self.assert_one_line([*arguments, "--ids", f"7,{vocab}"], f"[0, {vocab}): {vocab}", "token 1")
            for ids in ("7,x", "-1", "", "1.5", "7,,8", "7,", "7 8"):
                self.assert_one_line([*arguments, f"--ids={ids}"], "--ids", code=2)
            for ids in ("2147483648", "99999999999999999999"):
                self.assert_one_line([*arguments, "--ids", f"7,{ids}"], f"--ids: token id {ids} is out of range", code=2)
        self.assertFalse(out.exists())

    def test_unknown_dtypes_are_reported(self):
        for verb in (["generate", self.model, "--ids", "7"], ["convert", self.model, "--out", self.folder / "x"],
                     ["inspect", self.model], ["bench", self.model]):
            self.assert_one_line([*verb, "--dtype", "fp8"], "--dtype: fp8 not in {auto,f32,bf16,int8,fp8_g128,int8_g32,int4_g32,mxfp4,nvfp4}", code=2)
        self.assert_one_line(["chat", self.model, "--kv-dtype", "f16"], "--kv-dtype: f16 not in {auto,f32,bf16,int8}", code=2)
        self.assertFalse((self.folder / "x").exists())


class HubTest(BrokenCase):
    """Tests ids of the Hugging Face hub as MODEL."""

    def setUp(self):
        self.cache = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        os.environ["HF_HUB_CACHE"] = str(self.cache)
        self.addCleanup(os.environ.pop, "HF_HUB_CACHE")

    def add_model(self):
        repository = self.cache / "models--Org--Name"
        snapshot = repository / "snapshots" / "0123abcd"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0123abcd")
        (repository / "blobs").mkdir()
        snapshot.mkdir(parents=True)
        for file in self.model.iterdir():
            shutil.copy(file, repository / "blobs" / file.name)
            (snapshot / file.name).symlink_to(pathlib.Path("..", "..", "blobs", file.name))
        return repository, snapshot

    def test_cached_model_runs_by_its_id(self):
        _, snapshot = self.add_model()
        flags = ["--ids", "7,8", "-n", "4", "--temperature", "0", "--ignore-eos"]
        expected = run("generate", self.model, *flags).stdout
        result = run("generate", "Org/Name", *flags)
        self.assertEqual(result.stdout, expected)
        self.assertIn(f"Org/Name: {snapshot}\n", result.stderr)
        self.assertEqual(run("generate", "-hf", "Org/Name", *flags).stdout, expected)

    def test_missing_model_error_explains_how_to_download(self):
        self.assert_one_line(["chat", "Qwen/Qwen3-30B-A3B"], self.cache, "hf download Qwen/Qwen3-30B-A3B", code=2)
        repository, _ = self.add_model()
        (repository / "blobs" / "config.json").unlink()
        self.assert_one_line(["chat", "Org/Name"], "incomplete, config.json is missing", "hf download Org/Name", code=2)


class FamiliarFlagsTest(BrokenCase):
    def test_flags_of_other_programs_are_translated(self):
        expected = run("generate", self.model, "--prompt", "hello", "--max-tokens", "8", "--temperature", "0.7", "--seed", "3",
                       "--threads", "1", "--ctx-size", "64", "--ignore-eos").stdout
        result = run("generate", "-m", self.model, "-p", "hello", "-n", "8", "--temp", "0.7", "--seed", "3", "-t", "1",
                     "--max-model-len", "64", "--ignore-eos", "-ngl", "99", "--tensor-parallel-size", "1")
        self.assertEqual(result.stdout, expected)
        self.assertIn("moesaic generate: -ngl has no effect: ", result.stderr)
        self.assertNotIn("tensor-parallel", result.stderr)

    def test_serve_accepts_vllm_settings(self):
        printed = run("serve", self.model, "--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
                      "--enable-prefix-caching", "--kv-cache-dtype", "auto", "--tool-call-parser", "qwen3_coder",
                      "--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--gpu-memory-utilization", "0.9",
                      "--served-model-name", "m", "--seed", "7", "--dtype", "bfloat16", "--quantization", "compressed-tensors",
                      "--print-config")
        for line in ("ctx-size = 128", "max-sequences = 4", "max-batch-tokens = 64", "prefix-cache = true",
                     'kv-dtype = "auto"', 'tool-format = "qwen3-coder"', 'reasoning-format = "think"',
                     'served-model-name = "m"', "seed = 7", 'dtype = "bf16"'):
            self.assertIn(f"\n{line}\n", printed.stdout)
        for flag in ("--gpu-memory-utilization", "--enable-auto-tool-choice", "--quantization"):
            self.assertIn(f"moesaic serve: {flag} has no effect: ", printed.stderr)

    def test_unsupported_values_are_rejected_by_name(self):
        for flags, part in ((["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is not supported; supported: auto"),
                            (["--tool-call-parser", "granite"], "--tool-call-parser granite is not supported"),
                            (["--quantization", "awq"], "--quantization awq is not supported")):
            self.assert_one_line(["serve", self.model, *flags], part, code=2)

    def test_misspelled_names_get_a_suggestion(self):
        for arguments, part in ((["serve", self.model, "--max-sequnces", "4"], "(did you mean --max-sequences?)"),
                                (["serve", self.model, "--max_model_len", "4"], "(did you mean --max-model-len?)"),
                                (["help", "sevre"], 'no verb "sevre" (did you mean serve?)')):
            self.assert_one_line(arguments, part, code=2)
        self.assertIn('no verb "sevre" (did you mean serve?)', run("sevre", code=2).stderr)

    def test_help_and_version_are_verbs(self):
        self.assertEqual(run("help").stdout, run("--help").stdout)
        self.assertEqual(run("help", "serve").stdout, run("serve", "--help").stdout)
        self.assertEqual(run("version").stdout, run("--version").stdout)


class UsageTest(BrokenCase):
    def test_wrong_usage_names_the_flag_and_the_help(self):
        model, text = self.model, __file__
        for arguments, part in ((["generate"], "MODEL is required"), (["chat", model, "--top-k"], "--top-k needs a value"),
                                (["chat", model, "--top-k", "many"], "many"), (["chat", model, "--load", "x"], "no flag --load"),
                                (["chat", model, "--temperature", "-1"], "--temperature"),
                                (["logits", model, "--out", "x"], "either --ids or --prompt"),
                                (["logits", model, "--out", "x", "--ids", "7", "--prompt", "a"], "either --ids or --prompt"),
                                (["chat", "--hlep"], "no flag --hlep"),
                                (["chat", model, "--seed", "-1"], "--seed: seed must be a whole number from 0"),
                                (["generate", model, "--seed", "99999999999999999999"], "found \"99999999999999999999\""),
                                (["inspect", model, "more"], '"more"'),
                                (["bench", model, "-o", "xml"], "xml"), (["bench", model, "-p", "0", "-n", "0"], "measure nothing"),
                                (["bench", model, "-t", "two"], "two"), (["serve", model, "--port", "99999"], "--port"),
                                (["serve", model, "--kv-memory", "lots"], "--kv-memory"), (["carve"], "--calibration"),
                                (["perplexity", model, text, "-c", "8", "--stride", "9"], "--stride 9"),
                                (["perplexity", model, text, "-c", "1"], "--ctx-size"),
                                (["generate", model, "--threads", "-1"], "--threads"),
                                (["render", model, "/nowhere"], "REQUEST: file does not exist: /nowhere"),
                                (["completion", "tcsh"], "tcsh")):
            with self.subTest(arguments=arguments):
                self.assert_one_line(arguments, part, code=2)
        for arguments, part in ((["--colour"], "no flag --colour"), (["frobnicate"], 'no verb "frobnicate"')):
            (line,) = run(*arguments, code=2).stderr.splitlines()
            self.assertIn(part, line)
            self.assertIn("moesaic --help", line)

    def test_port_in_use_is_reported_before_loading(self):
        model = self.folder / "weightless"
        shutil.copytree(self.model, model, ignore=shutil.ignore_patterns("*.safetensors*"))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.assert_one_line(["serve", model, "--port", taken.getsockname()[1]], "Address already in use")
        self.assert_one_line(["serve", model, "--port", "0"], "no weights")

    def test_serve_checks_its_flags_before_loading(self):
        self.assert_one_line(["serve", self.model, "--max-sequences", "600"],
                             "--max-batch-tokens must be at least --max-sequences (600), found 512")


if __name__ == "__main__":
    cli.main()
