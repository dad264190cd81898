#!/usr/bin/env python3
"""Tests KV blocks on disk through the server's API. A restarted server must find its prefixes, and damage of its files must
not change an answer.

The model has grouped-query attention, whose answers are bit-identical for every split of a prompt. MLA chooses between two
computations that round differently, so that the tests compare the same splits there."""
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import serving as servers
from serving import ROOT, until

sys.path.insert(0, str(ROOT / "bench"))
import make_shapes  # noqa: E402

MODELS = tempfile.TemporaryDirectory()
GQA = pathlib.Path(MODELS.name) / "gqa.gguf"
make_shapes.write(GQA, "qwen3-moe-small", "q8_0", seed=1, context=0)
serving = functools.partial(servers.serving, model=GQA)
Server = functools.partial(servers.Server, model=GQA)

PROMPTS = [[(i * i * 3 + 11 * i + k * 97) % 9000 + 256 for i in range(900 + 40 * k)] for k in range(4)]
TOKENS = 30


def completion(server, prompt, **fields):
    """Returns (token ids, log-probabilities) and the number of cached tokens."""
    status, answer = server.json("POST", "/v1/completions", {
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "return_token_ids": True, **fields})
    assert status == 200, answer
    choice = answer["choices"][0]
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (choice["token_ids"], choice["logprobs"]["token_logprobs"]), cached


def ask_all(server, **fields):
    return [completion(server, prompt, **fields) for prompt in PROMPTS]


def disk(server, name):
    return server.metric(f"moesaic:kv_disk_{name}")


def saved(server):
    """Waits until all blocks of the prompts are on disk."""
    wanted = sum((len(prompt) + TOKENS - 1) // 64 for prompt in PROMPTS)
    until(lambda: disk(server, "written_blocks_total") >= wanted)


class Disk(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.flags = ("--kv-disk", self.folder.name, "--kv-disk-size", "1GiB")
        self.addCleanup(self.folder.cleanup)

    def files(self):
        return sorted(pathlib.Path(self.folder.name).glob("*.segment"))

    def check_restart(self, *flags, **fields):
        with serving(*flags) as server:
            alone = [answer for answer, _ in ask_all(server, **fields)]
        with serving(*self.flags, *flags) as server:
            self.assertEqual([answer for answer, _ in ask_all(server, **fields)], alone)
        self.assertTrue(self.files())
        for _ in range(2):
            with serving(*self.flags, *flags) as server:
                for (answer, cached), prompt, expected in zip(ask_all(server, **fields), PROMPTS, alone, strict=True):
                    self.assertEqual(cached, (len(prompt) - 1) // 64 * 64)
                    self.assertEqual(answer, expected)
                self.assertEqual(disk(server, "loads_total"), len(PROMPTS))
                self.assertEqual(disk(server, "refused_blocks_total") + disk(server, "refused_files_total"), 0)
                self.assertGreater(disk(server, "load_seconds_total"), 0)
                self.assertGreater(disk(server, "read_bytes_total"), 0)
                self.assertGreater(disk(server, "bytes"), 0)
                self.assertEqual(disk(server, "storing"), 1)

    def test_a_restarted_server_finds_its_prefixes(self):
        self.check_restart()

    def test_a_restarted_server_finds_prefixes_of_mla(self):
        prompts = [[token % 1000 + 5 for token in prompt[:64 * 13 + 1]] for prompt in PROMPTS]
        with servers.serving(*self.flags) as server:
            first = [completion(server, prompt) for prompt in prompts]
            again = [completion(server, prompt) for prompt in prompts]
        with servers.serving(*self.flags) as server:
            self.assertEqual([completion(server, prompt) for prompt in prompts], again)
        # A whole prompt and its last token alone use different computations of MLA (S12), so that near ties may differ.
        self.assertEqual([answer[0][:8] for answer, _ in first], [answer[0][:8] for answer, _ in again])
        self.assertTrue(all(cached == 64 * 13 for _, cached in again))

    def test_a_restarted_server_finds_int8_prefixes(self):
        self.check_restart("--kv-dtype", "int8")

    def test_a_restarted_server_finds_key_summaries(self):
        self.check_restart("--kv-sparsity", "dense", kv_sparsity={"mode": "all", "budget": 256})

    def test_a_restarted_server_finds_key_summaries_of_int8(self):
        self.check_restart("--kv-sparsity", "decode", "--kv-sparsity-budget", 256, "--kv-dtype", "int8")

    def check_lazy(self, *flags, damage=None):
        """Checks that requests whose rows all choose blocks read the key summaries and the chosen blocks only, and give the same
        answers as with all blocks in memory. Returns the bytes read, and the bytes of all blocks."""
        prompts = [[(i * i * 7 + 13 * i + k * 89) % 1300 + 100 for i in range(4000 + 192 * k + 1)] for k in range(3)]
        fields = {"kv_sparsity": {"mode": "all", "budget": 256}}
        flags = ("--kv-sparsity", "dense", "--kv-sparsity-dense-layers", 1, *flags)
        with serving(*self.flags, *flags) as server:
            for prompt in prompts:
                completion(server, prompt, **fields)
            alone = [completion(server, prompt, **fields) for prompt in prompts]
        if damage is not None:
            damage()
        with serving(*self.flags, *flags) as server:
            answers = [completion(server, prompt, **fields) for prompt in prompts]
            self.assertEqual([answer for answer, _ in answers], [answer for answer, _ in alone])
            if damage is not None:
                self.assertGreater(disk(server, "refused_blocks_total"), 0)
                self.assertGreater(disk(server, "lazy_layers_total"), 0)
                self.assertIn("is damaged; it is computed again", server.read_log())
                return None
            self.assertEqual(answers, alone, "cached tokens")
            self.assertEqual(disk(server, "lazy_blocks_total"), sum(len(prompt) // 64 for prompt in prompts))
            self.assertEqual(disk(server, "loads_total"), 0)
            read = disk(server, "read_bytes_total")
            self.assertEqual([completion(server, prompt, **fields) for prompt in prompts], alone)
            whole = disk(server, "bytes") * disk(server, "lazy_blocks_total") / disk(server, "blocks")
        return read, whole

    def test_only_chosen_blocks_are_read(self):
        for flags in ((), ("--kv-dtype", "int8"), ("--speculative", "ngram"), ("--kv-sparsity-audit", 3)):
            with self.subTest(flags=flags):
                read, whole = self.check_lazy(*flags)
                print(f"{flags}: {read / whole:.0%} of {whole / 1e6:.1f} MB were read")
                self.assertGreater(read, 0)
                self.assertLess(read, 0.7 * whole)
                self.doCleanups()
                self.setUp()

    def test_damage_in_chosen_blocks_changes_no_answer(self):
        def damage():
            for file in self.files():
                size = file.stat().st_size
                with open(file, "r+b") as f:
                    for at in range(size // 10, size, 50021):
                        f.seek(at)
                        f.write(b"x")
        self.check_lazy(damage=damage)

    def test_blocks_that_memory_evicts_are_loaded_from_disk(self):
        with serving(*self.flags, "--ctx-size", 1100, "--max-sequences", 1, "--kv-memory", "4MiB") as server:
            first = ask_all(server)
            saved(server)
            again = ask_all(server)
            self.assertGreater(server.metric("moesaic:kv_evicted_blocks_total"), 0)
        self.assertEqual([answer for answer, _ in again], [answer for answer, _ in first])
        self.assertTrue(all(cached > 800 for _, cached in again), again)

    def test_namespaces_share_no_blocks(self):
        with serving(*self.flags) as server:
            completion(server, PROMPTS[0], cache_salt="a")
        with serving(*self.flags) as server:
            self.assertEqual(completion(server, PROMPTS[0], cache_salt="b")[1], 0)
            self.assertEqual(completion(server, PROMPTS[0])[1], 0)
            self.assertGreater(completion(server, PROMPTS[0], cache_salt="a")[1], 0)

    def test_another_kv_type_is_refused(self):
        with serving(*self.flags) as server:
            ask_all(server)
        with serving(*self.flags, "--kv-dtype", "int8") as server:
            self.assertEqual(disk(server, "refused_files_total"), len(self.files()))
            self.assertEqual(completion(server, PROMPTS[0])[1], 0)
        self.assertIn("another model, KV type or build", server.read_log())

    def test_a_flipped_bit_in_every_file_changes_no_answer(self):
        with serving(*self.flags) as server:
            alone = ask_all(server)
        places = 0
        for place in range(0, 100, 7):  # hundredths of the file: header, records and blocks
            for file in self.files():
                with open(file, "r+b") as f:
                    size = os.fstat(f.fileno()).st_size
                    f.seek(size * place // 100 + place)
                    byte = f.read(1)
                    f.seek(-1, os.SEEK_CUR)
                    f.write(bytes([byte[0] ^ 1 << place % 8]))
            with serving(*self.flags) as server:
                for (answer, _), (expected, _) in zip(ask_all(server), alone, strict=True):
                    self.assertEqual(answer, expected)
                places += disk(server, "refused_blocks_total") + disk(server, "refused_files_total")
        self.assertGreater(places, 0)

    def test_cut_files_change_no_answer(self):
        with serving(*self.flags) as server:
            alone = ask_all(server)
        for share in (0.9, 0.5, 0.1, 0.001, 0):
            for file in self.files():
                os.truncate(file, int(file.stat().st_size * share))
            with serving(*self.flags) as server:
                for (answer, _), (expected, _) in zip(ask_all(server), alone, strict=True):
                    self.assertEqual(answer, expected)

    def test_a_kill_during_writes_changes_no_answer(self):
        with serving() as server:
            alone = [answer for answer, _ in ask_all(server)]
        cached_at_all = 0
        for kill in range(10):
            server = Server(*self.flags)
            for prompt, expected in zip(PROMPTS, alone, strict=True):
                answer, cached = completion(server, prompt)
                self.assertEqual(answer, expected)
                cached_at_all += cached
            completion(server, PROMPTS[kill % len(PROMPTS)][kill:])
            time.sleep(0.002 * kill)
            server.stop(signal.SIGKILL)
        self.assertGreater(cached_at_all, 5000)
        with serving(*self.flags) as server:
            self.assertEqual(disk(server, "refused_files_total"), 0)

    def test_a_full_disk_stops_only_writes(self):
        with tempfile.TemporaryDirectory() as small:
            mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", small]
            if subprocess.run(mount, capture_output=True).returncode != 0:
                self.skipTest("no right to mount")
            try:
                with serving("--kv-disk", small, "--kv-disk-size", "1GiB") as server:
                    first = ask_all(server)
                    until(lambda: disk(server, "write_errors_total") > 0)
                    self.assertEqual(disk(server, "storing"), 0)
                    self.assertEqual([answer for answer, _ in ask_all(server)], [answer for answer, _ in first])
                self.assertEqual(server.read_log().count("no more KV blocks are stored"), 1)
                with serving("--kv-disk", small, "--kv-disk-size", "1GiB") as server:
                    self.assertEqual([answer for answer, _ in ask_all(server)], [answer for answer, _ in first])
            finally:
                subprocess.run(["umount", small], check=True)

    def test_files_stay_within_a_small_budget(self):
        with serving(*self.flags[:2], "--kv-disk-size", "2MiB") as server:
            for _ in range(2):
                ask_all(server)
                server.wait_until_quiet()
        self.assertLessEqual(sum(file.stat().st_size for file in self.files()), 2 << 20)

    def test_a_size_needs_a_folder(self):
        with self.assertRaises(AssertionError) as refused:
            Server("--kv-disk-size", "2MiB")
        self.assertIn("--kv-disk-size needs --kv-disk", str(refused.exception))

    def test_ranks_are_refused_before_the_model_is_loaded(self):
        with self.assertRaises(AssertionError) as refused:
            Server(*self.flags, "-tp", "2")
        if "no UCX" in str(refused.exception):
            self.skipTest("the binary was built without UCX")
        self.assertIn("--kv-disk goes with one rank", str(refused.exception))

    def test_two_servers_need_two_folders(self):
        with serving(*self.flags):
            with self.assertRaises(AssertionError) as refused:
                Server(*self.flags)
        self.assertIn("another process keeps KV blocks there", str(refused.exception))


if __name__ == "__main__":
    unittest.main()
