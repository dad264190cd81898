#!/usr/bin/env python3
"""Tests the verbs that run no model: tokenize, render, inspect, doctor, completion."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import moesaic_cli as cli
from moesaic_cli import BINARY, GOLDEN, ROOT, run

TINY = ROOT / "models" / "moesaic-tiny"
FIRST = len(cli.SPECIAL)  # the id of a newline, the first character of the tokenizer that add_tokenizer makes


def ids_of(text):
    return [FIRST if c == "\n" else FIRST + 1 + ord(c) - 32 for c in text]


class TokenizeTest(cli.TalkingCase):
    def test_encodes_texts_and_lines(self):
        self.assertEqual(json.loads(run("tokenize", self.model, "ab").stdout), {"ids": ids_of("ab")})
        both = run("tokenize", self.model, "ab", "c\n").stdout.splitlines()
        self.assertEqual([json.loads(line)["ids"] for line in both], [ids_of("ab"), ids_of("c\n")])
        lines = run("tokenize", self.model, stdin='{"text": "ab"}\n\n{"text": ""}\n').stdout.splitlines()
        self.assertEqual([json.loads(line)["ids"] for line in lines], [ids_of("ab"), []])

    def test_decodes_ids(self):
        ids = [0, *ids_of("Hi."), 1]
        line = json.dumps({"ids": ids})
        self.assertEqual(json.loads(run("tokenize", self.model, "--decode", stdin=line).stdout), {"text": "<s>Hi.</s>"})
        bare = run("tokenize", self.model, "--decode", "--no-special", stdin=line).stdout
        self.assertEqual(json.loads(bare), {"text": "Hi."})

    def test_special_tokens_are_added_by_default(self):
        model = self.folder / "bos"
        shutil.copytree(self.model, model)
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.assertEqual(json.loads(run("tokenize", model, "Hello").stdout)["ids"], [0, *ids_of("Hello")])
        self.assertEqual(json.loads(run("tokenize", model, "Hello", "--no-special").stdout)["ids"], ids_of("Hello"))

    def test_output_is_flushed_by_line(self):
        process = subprocess.Popen([str(BINARY), "tokenize", str(self.model)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        with process:
            for text in ("a", "bc"):
                process.stdin.write(json.dumps({"text": text}) + "\n")
                process.stdin.flush()
                self.assertEqual(json.loads(process.stdout.readline()), {"ids": ids_of(text)})
            process.stdin.close()
            self.assertEqual(process.wait(cli.limit()), 0)

    def test_error_states_the_number_of_a_bad_line(self):
        for flags, line, part in (([], "not json", "is not JSON: not json"), ([], '{"ids": [1]}', 'needs {"text": "..."}'),
                                  ([], '["a"]', 'needs {"text": "..."}'), (["--decode"], '{"text": "a"}', 'needs {"ids": [...]}'),
                                  (["--decode"], '{"ids": [100000]}', "found 100000"),
                                  (["--decode"], '{"ids": [-1]}', "found -1"), (["--decode"], '{"ids": [1.5]}', "found 1.5")):
            with self.subTest(line=line):
                good = '{"ids": [7]}' if flags else '{"text": "a"}'
                result = run("tokenize", self.model, *flags, stdin=f"{good}\n{line}\n", code=1)
                self.assertEqual(len(result.stdout.splitlines()), 1)  # earlier output is kept
                (fault,) = result.stderr.splitlines()
                self.assertTrue(fault.startswith("moesaic tokenize: line 2"), fault)
                self.assertIn(part, fault)

    def test_decode_rejects_texts(self):
        self.assertIn("--decode", run("tokenize", self.model, "--decode", "ab", code=2).stderr)


class RenderTest(cli.TalkingCase):
    REQUEST = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    PROMPT = "<s><|system|>Be brief.\n<|user|>Hi\n"

    def test_renders_a_request(self):
        whole = self.PROMPT + "<|assistant|>"
        self.assertEqual(run("render", self.model, stdin=json.dumps(self.REQUEST)).stdout, whole)
        path = self.folder / "request.json"
        path.write_text(json.dumps(self.REQUEST))
        self.assertEqual(run("render", self.model, path).stdout, whole)
        self.assertEqual(run("render", self.model, path, "--no-generation-prompt").stdout, self.PROMPT)
        open_end = {**self.REQUEST, "add_generation_prompt": False}
        self.assertEqual(run("render", self.model, stdin=json.dumps(open_end)).stdout, self.PROMPT)

    def test_invalid_requests_are_reported(self):
        for text in ("", "nonsense", "[]", "{}", '{"messages": "Hi"}'):
            (fault,) = run("render", self.model, stdin=text, code=1).stderr.splitlines()
            self.assertIn('standard input: the request must be a JSON object with "messages"', fault)
        self.assertIn("chat template: ", run("render", GOLDEN / "qwen3-tied", stdin=json.dumps(self.REQUEST), code=1).stderr)


class InspectTest(unittest.TestCase):
    def memory(self, *flags):
        facts = json.loads(run("inspect", TINY, "--json", *flags).stdout)
        return facts, {(cell["context"], cell["sequences"]): cell for cell in facts["memory"]}

    def test_memory_table_ends_at_the_models_context(self):
        facts, cells = self.memory()
        self.assertEqual(sorted({sequences for _, sequences in cells}), [1, 8, 32])
        self.assertEqual(max(context for context, _ in cells), facts["context_length"])
        for (context, sequences), cell in cells.items():
            self.assertEqual(cell["kv_bytes"], facts["kv_bytes_per_token"] * -(-context // 64) * 64 * sequences)
            self.assertEqual(cell["bytes"], facts["weight_bytes"] + cell["kv_bytes"])
        self.assertIn(f"context {facts['context_length']}", run("inspect", TINY).stdout)

    def test_flags_select_contexts_and_dtypes(self):
        _, cells = self.memory("-c", "100,2048", "-s", "3")
        self.assertEqual(list(cells), [(100, 3), (2048, 3)])
        _, int8 = self.memory("-c", "100,2048", "-s", "3", "--kv-dtype", "int8")
        self.assertLess(int8[2048, 3]["kv_bytes"], cells[2048, 3]["kv_bytes"])
        table = run("inspect", TINY, "-c", "100", "-s", "1,3").stdout
        self.assertRegex(table, r"1 sequence +3 sequences\ncontext 100 ")
        self.assertIn("--ctx-size 1000000", run("inspect", TINY, "-c", "1000000", code=1).stderr)


class DoctorTest(unittest.TestCase):
    def test_doctor_lists_operators_and_libraries_in_text_and_json(self):
        report = json.loads(run("doctor", "--quick", "--json").stdout)
        self.assertNotIn("measured", report)
        self.assertGreaterEqual(report["machine"]["cores"], 1)
        self.assertGreaterEqual(report["machine"]["threads_used"], 1)
        self.assertGreater(report["machine"]["memory_bytes"], 0)
        self.assertIn("ref", report["machine"]["instruction_sets"])
        kernels = {row["op"]: row["kernel"] for row in report["kernels"]}
        for op in ("gemm_f32", "gemm_bf16", "gemm_i8", "rms_norm", "attention_kv_f32", "attention_kv_bf16", "attention_kv_i8"):
            self.assertRegex(kernels[op], r"^[a-z]+_.*_[a-z0-9]+$")
        for name in ("hwloc", "Boost", "abseil", "tokenizers", "llguidance", "fmt", "ZeroMQ"):
            self.assertRegex(report["libraries"][name], r"^\d")
        self.assertEqual("why_no_devices" in report, not report["devices"])
        text = run("doctor", "--quick").stdout
        self.assertRegex(text, r"(?m)^devices  none: ." if not report["devices"] else r"(?m)^cuda:0 ")
        for word in (*kernels, *kernels.values(), *report["libraries"], *report["libraries"].values(), report["version"]):
            self.assertIn(word, text)

    def test_isa_limit_is_applied_and_validated(self):
        result = subprocess.run([str(BINARY), "doctor", "--quick", "--json"], capture_output=True, text=True,
                                timeout=cli.limit(), env={**os.environ, "MOESAIC_ISA": "ref"})
        for row in json.loads(result.stdout)["kernels"]:
            self.assertTrue(row["kernel"].endswith("_ref"), row)
            self.assertTrue(row["passed_over"], row)
        result = subprocess.run([str(BINARY), "doctor", "--quick"], capture_output=True, text=True, timeout=cli.limit(),
                                env={**os.environ, "MOESAIC_ISA": "sse9"})
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 1))
        self.assertIn("MOESAIC_ISA", result.stderr)

    def test_measured_rates_are_positive(self):
        measured = json.loads(run("doctor", "--json").stdout)["measured"]
        self.assertGreater(measured["read_bytes_per_s"]["all_threads"], 0)
        for peak in measured["dot_products"]:
            self.assertGreater(peak["one_thread_ops_per_s"], 0)


class TuneTest(unittest.TestCase):
    """Tests `moesaic tune` and the use of its files, which belong to one machine and are optional."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.cache = pathlib.Path(folder.name) / "moesaic"
        self.environment = {**os.environ, "XDG_CACHE_HOME": folder.name}
        self.environment.pop("MOESAIC_TUNING", None)

    def call(self, *arguments, **changed):
        return subprocess.run([str(BINARY), *arguments], capture_output=True, text=True, timeout=cli.limit(),
                              env={**self.environment, **changed})

    def tuning(self, **changed):
        return json.loads(self.call("doctor", "--quick", "--json", **changed).stdout)["tuning"]

    def test_doctor_reports_the_tuning(self):
        machine = self.tuning()["machine"]
        self.assertIn("was not run", self.tuning()["state"])
        self.cache.mkdir()
        cached = self.cache / f"tuning-{machine['threads']}.json"
        cached.write_text(json.dumps({"machine": machine, "cut": {"tasks_per_thread": 5}}))
        self.assertEqual((self.tuning()["state"], self.tuning()["cut"]["tasks_per_thread"]), (f"tuned by {cached}", 5))
        self.assertEqual(self.tuning(MOESAIC_TUNING="off")["cut"]["tasks_per_thread"], 4)
        cached.write_text(json.dumps({"machine": {**machine, "threads": 1000}, "cut": {"tasks_per_thread": 5}}))
        self.assertIn("is ignored: for 1000 threads, but this run has", self.tuning()["state"])
        cached.write_text('{"machine": ')
        self.assertIn("is ignored: not JSON", self.tuning()["state"])
        named = self.call("doctor", "--quick", MOESAIC_TUNING=str(cached))
        self.assertEqual((named.returncode, named.stderr.splitlines()),
                         (1, [f"moesaic doctor: MOESAIC_TUNING={cached}: not JSON"]))

    def test_loading_reports_the_tuning(self):
        bench = ("bench", str(TINY), "-p", "8", "-n", "0", "-r", "1")
        self.assertIn("kernels not tuned: moesaic tune was not run", self.call(*bench).stderr)
        self.assertIn("kernels not tuned: --no-tuning", self.call(*bench, "--no-tuning").stderr)
        self.cache.mkdir()
        machine = {**self.tuning()["machine"], "threads": 1}
        (self.cache / "tuning-1.json").write_text(json.dumps({"machine": machine}))
        self.assertRegex(self.call(*bench, "-t", "1,2").stderr,
                         r"(?s)1 threads read .*; kernels tuned by .*tuning-1\.json\n.*2 threads read .*; kernels not tuned: .* with 2 threads\n")
        missing = self.call(*bench, MOESAIC_TUNING="/nowhere.json")
        self.assertEqual((missing.returncode, len(missing.stderr.splitlines())), (1, 1))
        self.assertIn("/nowhere.json", missing.stderr)

    def test_tune_writes_a_file_that_later_runs_use(self):
        generate = ("generate", str(TINY), "--prompt", "Once upon", "--max-tokens", "12", "--temperature", "0", "-t", "1")
        built_in = self.call(*generate, "--no-tuning")
        tuned = subprocess.run([str(BINARY), "tune", "--threads", "1"], capture_output=True, text=True,
                               env=self.environment, timeout=cli.patient(240))
        self.assertEqual((tuned.returncode, tuned.stderr), (0, ""))
        path = self.cache / "tuning-1.json"
        *table, empty, written = tuned.stdout.splitlines()
        self.assertRegex(table[0], r"^choice +built in +here +faster by$")
        for row in table[1:]:
            self.assertRegex(row, r"^\S.*\S +\d+ +(the same +-|\d+ +\d+\.\d%)$")
        self.assertEqual((empty, written), ("", f"written to {path}; models loaded with 1 threads use it from now on"))
        self.assertEqual(json.loads(path.read_text())["machine"], {**self.tuning()["machine"], "threads": 1})
        loaded = self.call("bench", str(TINY), "-p", "8", "-n", "0", "-r", "1", "-t", "1")
        self.assertIn(f"kernels tuned by {path}", loaded.stderr)
        # Choices never change a result.
        self.assertEqual((built_in.returncode, self.call(*generate).stdout), (0, built_in.stdout))

    def test_interrupted_tune_leaves_no_file(self):
        process = subprocess.Popen([str(BINARY), "tune"], env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        cli.wait_until_caught(process)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=cli.limit())
        self.assertEqual((process.returncode, out), (130, ""))
        self.assertFalse(self.cache.exists())


class NumaTest(unittest.TestCase):
    """Simulates two NUMA nodes with hwloc: the text is the same, and the line after loading names the placement."""

    def test_mirror_and_slice_give_the_same_text(self):
        if len(os.sched_getaffinity(0)) < 2:
            self.skipTest("two nodes need two processors")
        each = os.cpu_count() // 2
        nodes = {**os.environ, "HWLOC_SYNTHETIC": f"numa:2 core:{each} pu:1"}
        texts = set()
        for numa, said in (("local", ""), ("mirror", "mirrored on 2 NUMA nodes"), ("slice", "sliced over 2 NUMA nodes")):
            flags = ("--numa", numa, "--threads", str(2 * each))
            generate = ("generate", str(TINY), "--prompt", "Once upon", "--max-tokens", "12", "--temperature", "0")
            result = subprocess.run([str(BINARY), *generate, *flags], capture_output=True, text=True, env=nodes,
                                    timeout=cli.limit())
            self.assertEqual(result.returncode, 0, result.stderr)
            texts.add(result.stdout)
            bench = subprocess.run([str(BINARY), "bench", str(TINY), "-p", "8", "-n", "0", "-r", "1", *flags],
                                   capture_output=True, text=True, env=nodes, timeout=cli.limit())
            self.assertIn(said, bench.stderr)
        self.assertEqual(len(texts), 1)


class HelpTest(unittest.TestCase):
    def test_help_shows_names_choices_and_defaults_only(self):
        text = run("--help").stdout
        self.assertIn("Usage: moesaic [OPTIONS] VERB", text)
        self.assertRegex(text, r"(?m)^Verbs:$")
        for verb in CompletionTest.VERBS:
            self.assertRegex(text, rf"(?m)^  {verb} +\S")
            text_of_verb = run(verb, "--help").stdout
            self.assertIn("moesaic " + verb, text_of_verb)
            self.assertRegex(text_of_verb, r"\n\nExit codes: 0 .*130 interrupted.*143.*129.*\n$")
            for noise in ("INT in [", "PATH(", "{false}", "TEXT:", "=[", "[Option Group", "[Exactly"):
                self.assertNotIn(noise, text_of_verb)
        self.assertRegex(run("chat", "--help").stdout, r"(?m)^  --dtype \{auto,f32,bf16,int8,fp8_g128,int8_g32,int4_g32,mxfp4,nvfp4\}=auto$")
        self.assertRegex(run("bench", "--help").stdout, r"(?m)^  -p,--prompt-tokens INT=512 \.\.\.")


class CompletionTest(unittest.TestCase):
    VERBS = ("chat", "generate", "serve", "perplexity", "bench", "tokenize", "render", "logits", "inspect", "convert",
             "carve", "quantize", "verify", "report", "doctor", "tune", "completion", "help", "version")

    def complete(self, *words):
        """Returns bash's completions of the last of `words`."""
        script = run("completion", "bash").stdout
        words = " ".join(f"'{word}'" for word in ("moesaic", *words))
        script += f"\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _moesaic; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()

    def test_bash_completes_verbs_and_flags(self):
        self.assertEqual(self.complete("co"), ["convert", "completion"])
        self.assertLessEqual(set(self.VERBS), set(self.complete("")))
        self.assertEqual(self.complete("chat", "model", "--top-"), ["--top-k", "--top-p"])

    def test_every_supported_shell_has_a_script(self):
        self.assertTrue(run("completion", "zsh").stdout.startswith("autoload"))
        fish = run("completion", "fish").stdout
        for verb in self.VERBS:
            self.assertRegex(fish, rf"(?m)^complete -c moesaic -n __fish_use_subcommand -a {verb} -d '[^']+'$")
        self.assertEqual(run("completion").stdout, run("completion", "bash").stdout)
        self.assertIn("powershell", run("completion", "powershell", code=2).stderr)
        self.assertTrue(all(re.fullmatch(r"complete -c moesaic .*", line) for line in fish.splitlines()))


if __name__ == "__main__":
    cli.main()
