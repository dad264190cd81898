"""Tests `moesaic quantize` and `moesaic verify`: other readers, kills, memory limits, quality."""
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import moesaic_cli as cli
from moesaic_cli import BINARY, ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(TINY))

import generate  # noqa: E402  what the model was trained on

SCHEMES = {"w8a8": [], "w8a16-g64": [], "w4a16-g32": [], "nvfp4": ["--method", "mse"], "fp8": []}
KILLS = int(os.environ.get("MOESAIC_KILLS", "3"))


def random_checkpoint(folder, layers, experts, hidden=512, intermediate=512):
    """Writes a Qwen3-MoE with random bf16 weights; returns the size of its weights."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": hidden,
        "intermediate_size": intermediate, "moe_intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": experts,
        "num_experts_per_tok": min(4, experts), "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [256, hidden], "model.norm.weight": [hidden], "lm_head.weight": [256, hidden]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = [hidden]
        shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = [64]
        shapes[prefix + "self_attn.q_proj.weight"] = [256, hidden]
        shapes[prefix + "self_attn.k_proj.weight"] = shapes[prefix + "self_attn.v_proj.weight"] = [128, hidden]
        shapes[prefix + "self_attn.o_proj.weight"] = [hidden, 256]
        shapes[prefix + "mlp.gate.weight"] = [experts, hidden]
        for expert in range(experts):
            for part in ("gate_proj", "up_proj"):
                shapes[f"{prefix}mlp.experts.{expert}.{part}.weight"] = [intermediate, hidden]
            shapes[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = [hidden, intermediate]
    header, total = {}, 0
    for name in sorted(shapes):
        size = 2
        for n in shapes[name]:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    # bf16 numbers of both signs between 2^-8 and 2^-4
    exponents = bytes((0xBC if b & 1 else 0x3C) + (b >> 1 & 1) for b in range(256))
    source = random.Random(1)
    block = bytearray(1 << 22)
    block[0::2] = source.randbytes(1 << 21)
    block[1::2] = source.randbytes(1 << 21).translate(exponents)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = total
        while left > 0:
            file.write(block[: min(left, len(block))])
            left -= len(block)
            block[1::2] = block[3::2] + block[1:2]  # avoids repetitions
    return total


def token_file(path, sequences, length, vocab):
    """Writes random token ids for `--calibration`."""
    ids = random.Random(2)
    data = struct.pack(f"<{sequences * length}i", *(ids.randrange(vocab) for _ in range(sequences * length)))
    header = json.dumps({"tokens": {"dtype": "I32", "shape": [sequences, length], "data_offsets": [0, len(data)]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def digest(folder):
    """Hashes all files but the report, which contains times."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
            if path.name != "quantize.json"}


def command_of(source, out, *flags):
    return [str(BINARY), "quantize", str(source), "-o", str(out), *map(str, flags)]


def start(source, out, *flags):
    return subprocess.Popen(command_of(source, out, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_kills(test, source, folder, *flags):
    """Runs that are killed at random moments must produce the files of an undisturbed run."""
    begun = time.monotonic()
    whole = start(source, folder / "whole", *flags)
    output = whole.communicate()[0]
    seconds = time.monotonic() - begun
    test.assertEqual(whole.returncode, 0, output)
    expected = digest(folder / "whole")
    moments = random.Random(7)
    killed = 0
    out = folder / "killed"
    while killed < KILLS:
        process = start(source, out, *flags)
        try:
            process.wait(moments.uniform(0, seconds))
            output = process.stdout.read()
            test.assertTrue(process.returncode == 0 or "the folder is not empty" in output, output)
            test.assertEqual(digest(out), expected, output)
            shutil.rmtree(out)  # the run finished before the kill: start again
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        process.stdout.close()
    process = start(source, out, *flags)
    output = process.communicate()[0]
    if process.returncode != 0 and "the folder is not empty" in output:
        output = "it was killed when all was done"
    else:
        test.assertEqual(process.returncode, 0, output)
    test.assertEqual(digest(out), expected, output)
    print(f"{' '.join(map(str, flags))}: the same files after {killed} kills, {time.monotonic() - begun:.0f} s", flush=True)
    shutil.rmtree(folder / "whole")
    shutil.rmtree(out)


def check_memory(test, source, folder, cap, *flags):
    # A process inherits the peak of the process that starts it, so a small one starts and measures it.
    measure = ("import os, sys\n"
               "child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)\n"
               "_, status, usage = os.wait4(child, 0)\n"
               "print(f'\\npeak: {usage.ru_maxrss}', flush=True)\n"
               "sys.exit(os.waitstatus_to_exitcode(status))\n")
    command = [sys.executable, "-I", "-S", "-c", measure, *command_of(source, folder / "capped", "--memory", cap, *flags)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _, peak = process.stdout.rpartition("\npeak: ")
    test.assertEqual(process.returncode, 0, output)
    test.assertLessEqual(int(peak) * 1024, cap, output)
    shutil.rmtree(folder / "capped")


class QuantizeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        for scheme, flags in SCHEMES.items():
            run("quantize", TINY, "-o", cls.folder / scheme, "--scheme", scheme, "--memory", "1G", *flags)

    def test_verify_accepts_every_byte(self):
        for scheme in SCHEMES:
            output = run("verify", self.folder / scheme, "--source", TINY, "--loader", "vllm").stdout
            self.assertIn("to the byte", output)
            self.assertIn("experts.down_proj", output)
            verdict = output.splitlines()[-1]
            self.assertIn("no: model.layers.1.mlp.experts.0.gate_proj has 64 outputs" if scheme == "fp8" else "yes", verdict)

    def test_folder_and_packed_file_give_the_same_text(self):
        for scheme in SCHEMES:
            packed = self.folder / f"{scheme}.moesaic"
            run("convert", self.folder / scheme, "--out", packed)
            folder, file = (run("generate", model, "--prompt", "The", "--max-tokens", "4", "--temperature", "0").stdout
                            for model in (self.folder / scheme, packed))
            self.assertTrue(folder.strip(), scheme)
            self.assertEqual(file, folder, scheme)

    def test_invalid_arguments_are_rejected(self):
        result = run("quantize", TINY, "-o", self.folder / "w8a8", "--scheme", "fp8", code=1)
        self.assertIn("the folder is not empty", result.stderr)
        result = run("quantize", TINY, "-o", self.folder / "no", "--scheme", "w4a16", "--keep", "fp16", "x", code=1)
        self.assertIn("--keep needs fp32 or bf16", result.stderr)
        self.assertFalse((self.folder / "no").exists())

    @unittest.skipUnless(importlib.util.find_spec("compressed_tensors"), "the compressed-tensors package is missing")
    def test_compressed_tensors_reads_identical_values(self):
        """The package's classes parse config.json, and its decompressors agree with ours to the bit."""
        import ct_reader

        for scheme in SCHEMES:
            ct_reader.check(self.folder / scheme, self)


class PlanTest(unittest.TestCase):
    """Each plan measures this machine for some seconds."""

    def plan(self, config, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            output = run("quantize", path, "--plan", *(pathlib.Path(folder) / "out" if f == "OUT" else f for f in flags)).stdout
            self.assertFalse((pathlib.Path(folder) / "out").exists())
        return output

    def test_every_scheme_is_planned_from_a_config(self):
        # Pairs that share a scale get exclusive units; rows that do not fit, or are in another file, are read twice.
        little = {"nvfp4": True, "w8a8": False}
        for scheme in SCHEMES:
            memory = "160M" if scheme in little else "4G"
            output = self.plan(KIMI_K2, "--scheme", scheme, "--memory", memory, "--output", "OUT")
            self.assertIn("; limited by ", output)
            self.assertIn("1.03T", output)
            self.assertIn("are missing", output)  # no test machine has the disk space
            if scheme in little:
                check = self.assertRegex if little[scheme] else self.assertNotRegex
                check(output, r"waves .*; \d+ of up to [\d.]+ MiB alone, for")
                check(output, r" [\d.]+ [MG]iB of it twice, for scales")

    def test_mixes_are_planned_without_measurements(self):
        output = self.plan(KIMI_K2, "--mix", "nvfp4,fp8,bf16", "--bits-per-weight", "5", "--memory", "64G", "--mix-tokens", "256",
                           "--output", "OUT")
        self.assertIn("a mix of nvfp4, fp8, bf16", output)
        self.assertIn("in all", output)

    def test_the_output_folder_is_optional(self):
        output = self.plan(DEEPSEEK_V3, "--scheme", "w8a8")
        self.assertIn("; limited by ", output)
        self.assertIn("683B", output)


class BoundsTest(unittest.TestCase):
    """Tests a random checkpoint that is much larger than the memory limit."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.source = cls.folder / "source"
        cls.bytes = random_checkpoint(cls.source, layers=6, experts=64)

        token_file(cls.folder / "tokens.safetensors", 16, 64, 256)

    def test_memory_stays_below_the_limit(self):
        for scheme in ("w8a8", "nvfp4"):
            check_memory(self, self.source, self.folder, self.bytes // 8, "--scheme", scheme)
        calibration = ("--calibration", self.folder / "tokens.safetensors")
        # Variants of this many tokens do not fit the limit at once and need several passes.
        mix = ("--mix", "nvfp4,w8a8", "--bits-per-weight", "6", "--mix-tokens", "256", *calibration)
        planned = run("quantize", self.source, "--plan", "--memory", self.bytes // 6, *mix).stdout
        self.assertRegex(planned, r"measuring +\d+ passes, from layers 0, ")
        check_memory(self, self.source, self.folder, self.bytes // 6, *mix)

    def test_memory_of_calibration_stays_below_the_limit(self):
        """A quarter of the weights, because these methods compute for a tenth of a second per linear."""
        source = self.folder / "calibrated"
        size = random_checkpoint(source, layers=2, experts=48)
        calibration = ("--calibration", self.folder / "tokens.safetensors")
        check_memory(self, source, self.folder, size // 2, "--scheme", "w4a16", "--method", "gptq", *calibration)
        check_memory(self, source, self.folder, size * 3 // 4, "--scheme", "w8a8", "--activations", "static",
                     *calibration)
        check_memory(self, source, self.folder, size * 3 // 4, "--mix", "nvfp4,w8a8", "--bits-per-weight", "6", "--mix-tokens",
                     "128", "--method", "gptq", *calibration)
        # fp16 without bf16 has variants in f32, and one in bf16 for its loss.
        check_memory(self, source, self.folder, size * 3 // 4, "--mix", "fp16,w8a8", "--bits-per-weight", "12", "--mix-tokens",
                     "128", *calibration)

    def test_killed_runs_give_identical_files(self):
        check_kills(self, self.source, self.folder, "--scheme", "w4a16", "--memory", "96M")

    def test_exclusive_units_keep_the_limit_and_survive_kills(self):
        """Gate and up share a scale and have 64 MiB: 80M holds some of their rows, 150M both, but not two such waves."""
        source = self.folder / "wide"
        random_checkpoint(source, layers=1, experts=1, hidden=2048, intermediate=8192)
        for memory, twice in (("80M", True), ("150M", False)):
            flags = ("--scheme", "nvfp4")
            planned = run("quantize", source, "--plan", "--memory", memory, *flags).stdout
            self.assertRegex(planned, r"; \d+ of up to [\d.]+ MiB alone, for scales that linears share")
            (self.assertIn if twice else self.assertNotIn)("of it twice", planned)
            check_memory(self, source, self.folder, int(memory[:-1]) << 20, *flags)
            check_kills(self, source, self.folder, *flags, "--memory", memory)


class CalibrationTest(unittest.TestCase):
    """Tests quality with calibration text similar to the model's training text."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        sampler = generate.Sampler(random.Random("calibration"))
        texts = ("".join(text for text, _ in generate.segments(**sampler.conversation(512, generate.LAST)))
                 for _ in range(200))
        cls.text = cls.folder / "text.jsonl"
        cls.text.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        records = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
        cls.calibration = ("--calibration", cls.text)
        cls.messages = cls.folder / "messages.jsonl"
        cls.messages.write_text("\n".join(json.dumps({"messages": r["messages"]}) for r in records))
        cls.held_out = cls.folder / "heldout.txt"
        cls.held_out.write_text("".join(
            "".join(text for text, _ in generate.segments(r["messages"], r.get("tools"), prompt=True)) + r["expected"]
            for r in records))
        cls.base = cls.folder / "base"
        run("perplexity", TINY, cls.held_out, "--save-logits", cls.base, "--max-tokens", "16384")

    def kl_of(self, folder):
        return json.loads(run("perplexity", folder, self.held_out, "--kl-base", self.base, "--max-tokens", "16384",
                              "--format", "json").stdout)["kl"]

    def kl(self, *flags):
        out = self.folder / "out"
        run("quantize", TINY, "-o", out, *flags)
        run("verify", out, "--source", TINY)
        kl = self.kl_of(out)
        shutil.rmtree(out)
        return kl

    @staticmethod
    def size(folder):
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def test_gptq_diverges_less_than_rounding(self):
        for scheme, share in (("w4a16", 0.6), ("nvfp4", 0.7)):
            nearest = self.kl("--scheme", scheme)
            gptq = self.kl("--scheme", scheme, "--method", "gptq", *self.calibration)
            self.assertLess(gptq, share * nearest, scheme)

    def test_calibration_messages_use_the_chat_template(self):
        out = run("quantize", TINY, "-o", self.folder / "chats", "--scheme", "w4a16", "--method", "gptq", "--calibration",
                  self.messages).stdout
        self.assertIn("gptq: the outputs' squared error is 0.", out)

    def test_smoothed_static_activations_are_near_dynamic_ones(self):
        dynamic = self.kl("--scheme", "w8a8")
        static = self.kl("--scheme", "w8a8", "--activations", "static", *self.calibration)
        self.assertLess(static, 1.5 * dynamic)

    def test_eight_bit_recipe_keeps_the_likeliest_token(self):
        """Dynamic activations, smoothing and GPTQ, on text that is half random (measured 99.03%, rtn 98.59%)."""
        out = self.folder / "recipe"

        def quality(*flags):
            run("quantize", TINY, "-o", out, "--scheme", "w8a8", *flags)
            told = json.loads(run("perplexity", out, "--text", self.held_out, "--reference", TINY, "-c", "1024", "--max-tokens",
                                  "16384", "--format", "json").stdout)
            shutil.rmtree(out)
            return told["same_top"], told["kl"]

        nearest, _ = quality()
        recipe, kl = quality("--method", "gptq", "--activations", "smoothed", *self.calibration)
        self.assertGreater(recipe, nearest)
        self.assertGreater(recipe, 0.988)
        self.assertLess(kl, 0.002)

    @unittest.skipUnless(importlib.util.find_spec("compressed_tensors"), "the compressed-tensors package is missing")
    def test_compressed_tensors_reads_static_scales(self):
        import ct_reader

        out = self.folder / "static"
        run("quantize", TINY, "-o", out, "--scheme", "w8a8", "--activations", "static",
            "--calibration", self.text)
        groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
        self.assertEqual([g["input_activations"]["dynamic"] for g in groups.values()], [False, True])
        ct_reader.check(out, self, calibrated=True)

    def test_killed_runs_give_identical_files(self):
        static = ("--scheme", "w8a8", "--method", "gptq", "--activations", "static")
        mixed = ("--mix", "nvfp4,fp8,bf16", "--bits-per-weight", "6", "--method", "gptq", "--mix-tokens", "256")
        runs = [("--scheme", "nvfp4", "--method", "gptq"), static, mixed]
        if KILLS >= 20:  # every method with every scheme, which takes minutes
            runs = [("--scheme", scheme, "--method", method) for scheme in SCHEMES for method in ("rtn", "mse", "gptq")]
            runs += [static, static[:2] + static[4:], (*static[:5], "smoothed")]
            runs += [mixed]
            runs += [(*mixed[:5], method, *mixed[6:]) for method in ("rtn", "mse")]
        for flags in runs:
            given = set(flags)
            calibration = ()
            if {"gptq", "static", "--mix"} & given:
                calibration = ("--calibration", self.text, "--calibration-tokens", "4096")
            check_kills(self, TINY, self.folder, *flags, *calibration)

    def test_mixes_diverge_less_than_one_precision_of_the_same_size(self):
        """The files are not larger, for nearest rounding and GPTQ, and the divergence is about as predicted."""
        out = self.folder / "mix"
        for method in ("rtn", "gptq"):
            run("quantize", TINY, "-o", out, "--scheme", "w4a16", "--method", method,
                *(self.calibration if method == "gptq" else ()))
            size = self.size(out)
            uniform = self.kl_of(out)
            shutil.rmtree(out)
            told = run("quantize", TINY, "-o", out, "--mix", "w4a16-g64,nvfp4,fp8,w8a8,bf16", "--budget", size, "--method",
                       method, *self.calibration).stdout
            self.assertIn("predicted KL", told)
            self.assertIn("routers are kept", told)
            self.assertLessEqual(self.size(out), size)
            run("verify", out, "--source", TINY)
            mixed = self.kl_of(out)
            self.assertLess(mixed, 0.8 * uniform, method)
            predicted = json.loads((out / "quantize.json").read_text())["mix"]["predicted_loss"]
            self.assertLess(max(mixed, predicted), 2 * min(mixed, predicted), method)
            answer = run("generate", out, "--prompt", "The", "--max-tokens", "4", "--temperature", "0")
            self.assertTrue(answer.stdout.strip())
            run("report", out, "--source", TINY, "--text", self.held_out, "--max-tokens", "2048")
            report = (out / "report.md").read_text()
            self.assertIn("## Mix", report)
            self.assertIn("model.layers.3.mlp.experts", report)
            self.assertIn("nats per token, the sum of the chosen losses; measured on", report)
            shutil.rmtree(out)

    @unittest.skipUnless(importlib.util.find_spec("compressed_tensors"), "the compressed-tensors package is missing")
    def test_compressed_tensors_reads_mixes(self):
        import ct_reader

        out = self.folder / "read"
        run("quantize", TINY, "-o", out, "--mix", "w4a16,nvfp4,fp8,w8a8,w8a16,bf16", "--bits-per-weight", "7", "--calibration",
            self.text)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        self.assertEqual(config["format"], "mixed-precision")
        self.assertGreater(len(config["config_groups"]), 1)
        ct_reader.check(out, self)
        output = run("verify", out, "--loader", "vllm").stdout
        self.assertEqual(output.count("group_"), len(config["config_groups"]))

    def test_layer_that_overflows_fp16_is_kept_in_bf16(self):
        """The changed model computes the same except in fp16: up rows of the last MoE layer are large, down columns small."""
        source = self.folder / "overflows"
        subprocess.run([sys.executable, ROOT / "bench" / "quantizer" / "inject_overflow.py", TINY, source], check=True)
        out = self.folder / "protected"
        told = run("quantize", source, "-o", out, "--mix", "fp16,bf16", "--calibration", self.text).stdout
        self.assertIn("model.layers.3.mlp.experts: fp16 overflows", told)
        dtypes = {}
        for unit in json.loads((out / "quantize.json").read_text())["mix"]["units"]:
            dtypes.setdefault(unit["chosen"], []).append(unit["name"])
        measured = [name for name in dtypes["bf16"] if not name.startswith("model.layers.4.")]  # not the MTP module
        self.assertEqual(measured, ["model.layers.3.mlp.experts"])
        run("verify", out, "--source", source)
        report = json.loads(run("perplexity", out, self.held_out, "--kl-base", self.base, "--max-tokens", "16384",
                                "--format", "json").stdout)
        self.assertLess(report["kl"], 1e-3)

    def test_flags_without_effect_are_rejected(self):
        for flags, expected in (
            (("--scheme", "w8a8", "--device", "cuda"), "--device has no effect without --method gptq"),
            (("--scheme", "w8a8", "--method", "gptq", "--calibration", self.text, "--device", "gpu"),
             "--device gpu: a device is cpu, cuda or cuda:N, found \"gpu\""),
            (("--scheme", "w8a8", "--method", "gptq", "--plan", "--device", "cuda"), "omit --device cuda"),
            (("--scheme", "w8a8", "--method", "gptq", "--plan", "--device", "gpu"), "found \"gpu\""),
            (("--scheme", "nvfp4", "--bits-per-weight", "5"), "--bits-per-weight has no effect without --mix"),
            (("--scheme", "nvfp4", "--mix-tokens", "64"), "--mix-tokens has no effect without --mix"),
            (("--scheme", "w8a8", "--calibration-tokens", "64"), "--calibration-tokens has no effect without --method gptq"),
            (("--mix", "nvfp4,fp8", "--calibration", self.text), "--mix needs either --bits-per-weight or --budget, found none"),
            (("--mix", "nvfp4", "--bits-per-weight", "5"), "--mix needs at least two precisions"),
            (("--mix", "nvfp4,nvfp4", "--bits-per-weight", "5"), "--mix: nvfp4 is repeated"),
            (("--mix", "nvfp4,int3", "--bits-per-weight", "5"), "found \"int3\""),
            (("--mix", "nvfp4,fp8", "--bits-per-weight", "5"), "need --calibration FILE"),
            (("--mix", "nvfp4,fp8", "--bits-per-weight", "4", "--calibration", self.text),
             "--bits-per-weight 4 is too little: the cheapest mix of nvfp4, fp8 takes 4.5"),
            (("--mix", "nvfp4,w8a8", "--bits-per-weight", "5", "--activations", "smoothed", "--calibration", self.text),
             "--activations smoothed needs --scheme w8a8, found a mix of nvfp4, w8a8"),
        ):
            result = run("quantize", TINY, "-o", self.folder / "no", *flags, code=1)
            self.assertIn(expected, result.stderr)
            self.assertFalse((self.folder / "no").exists())

    def test_a_model_may_follow_the_mix(self):
        self.assertIn("a mix of nvfp4, fp8", run("quantize", "--mix", "nvfp4,fp8", TINY, "--bits-per-weight", "5", "--plan").stdout)

    def test_faulty_schemes_and_mixes_are_rejected(self):
        for flags, expected in (
            (("--scheme", "w8a8", "--mix", "nvfp4,fp8"), "--scheme gives all linears one precision, --mix several"),
            (("--mix", "nvfp4,fp8", "--budget", "0"), "--budget"),
            (("--mix", "nvfp4,fp8", "--bits-per-weight", "0"), "--bits-per-weight"),
            (("--scheme", "int3"), "found \"int3\""), (("--scheme", "w4a16-channel"), "a precision must be one of"),
            (("--scheme", "bf16"), "bf16 rounds nothing"),
        ):
            self.assertIn(expected, run("quantize", TINY, "-o", self.folder / "no", *flags, code=2).stderr)

    def test_invalid_arguments_are_rejected(self):
        for flags, expected in (
            (("--scheme", "w4a16", "--method", "gptq"), "need --calibration FILE"),
            (("--scheme", "w4a16", "--activations", "static", "--calibration", self.text),
             "--activations static needs --scheme w8a8, found w4a16"),
        ):
            self.assertIn(expected, run("quantize", TINY, "-o", self.folder / "no", *flags, code=1).stderr)
        bad = self.folder / "bad.jsonl"
        bad.write_text('{"text": "fine"}\n{"prompt": 1}\n')
        result = run("quantize", TINY, "-o", self.folder / "no", "--scheme", "w4a16", "--method", "gptq",
                     "--calibration", bad, code=1)
        self.assertIn("bad.jsonl:2: a line must be a JSON object with a \"text\" or \"messages\"", result.stderr)
        self.assertFalse((self.folder / "no").exists())


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}
DEEPSEEK_V3 = {
    **KIMI_K2, "model_type": "deepseek_v3", "vocab_size": 129280, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}

if __name__ == "__main__":
    unittest.main()
